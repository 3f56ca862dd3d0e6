"""`shoal` in one process that stays: it runs a line of JSON as a command, and answers with what
that has printed. To start a process for each takes half a second of a processor.
"""

import contextlib
import io
import json
import sys

from shoal_cli.commands.app import run_app

if __name__ == "__main__":
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_app(json.loads(line))
        print(json.dumps(printed.getvalue()), flush=True)
