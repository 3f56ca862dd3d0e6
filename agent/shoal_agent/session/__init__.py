"""One session with the coordinator: control messages, tasks, what tasks produce."""
