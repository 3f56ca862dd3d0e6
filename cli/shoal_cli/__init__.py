"""The `shoal` command.

commands/    options, what a terminal shows, and how errors read
local/       local mode: a coordinator and its agents as processes of one machine
transfer/    files between folders, buckets, web servers, registries and coordinators
"""

import sys

__version__ = "0.1.0"


def main() -> None:
    """Entry point of `shoal`."""
    from shoal_cli.commands.app import run_app  # noqa: PLC0415 - `import shoal_cli` stays light

    sys.exit(run_app(sys.argv[1:]))
