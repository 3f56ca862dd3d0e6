"""The `shoal` command: options, what a terminal shows, and how errors read.

Here belong: one module per command, the live progress, the tables. Not here: doing anything;
commands parse, call `shell`, `planning` or `modelling`, and print. Modules import what is heavy
inside the command that needs it, so that `shoal --help` answers at once.
"""

import sys


def main() -> None:
    """Entry point of `shoal`."""
    from shoal_operator.cli.app import run_app

    sys.exit(run_app(sys.argv[1:]))
