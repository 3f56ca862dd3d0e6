"""One module per command, the live progress, the tables.

Commands parse, call `local`, `transfer`, the planner or the compiler, and print. Modules import
what is heavy inside the command that needs it, so that `shoal --help` answers at once.
"""
