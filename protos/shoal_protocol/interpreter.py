"""How this program starts Python for a module of its own."""

import sys


def module_command(module: str, *flags: str) -> list[str]:
    """What runs a module with this interpreter; arguments of the module may follow. `flags` are
    Python's. Nothing is imported from the folder in which that process begins: it is where a user
    happens to be, and may have a `random.py`.
    """
    return [sys.executable, *flags, "-P", "-m", module]
