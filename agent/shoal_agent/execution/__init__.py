"""The queue of tasks: which runs next, and what each waits for. Pure."""
