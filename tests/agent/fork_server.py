"""A process that has imported the agent, and forks one for each request.

    python tests/agent/fork_server.py    standard input is a socket, with a line of JSON each way

`{"arguments", "environment", "errors"}` starts an agent that writes its stderr to that file, and is
answered by its process; `{"ended"}` asks for the status of one that has ended.
"""

import json
import os
import signal
import socket
import sys

from shoal_agent.unused_modules import execute_when_used

execute_when_used()

import shoal_agent.agent  # noqa: E402 - it imports what need not be executed
import shoal_agent.telemetry.logs  # noqa: E402, F401 - so that no agent has to
from shoal_agent.command import main  # noqa: E402


def start(connection: socket.socket, request: dict[str, object]) -> int:
    """The process of a new agent."""
    process = os.fork()
    if process:
        return process
    connection.close()
    errors = os.open(str(request["errors"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 2)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    try:
        status = main(arguments)
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    sys.stderr.flush()
    os._exit(status)


def serve(connection: socket.socket) -> None:
    """Until the other side closes."""
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            if "ended" in request:
                _, status = os.waitpid(request["ended"], 0)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = start(connection, request)
            lines.write(f"{answer}\n")
            lines.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve(socket.socket(fileno=os.dup(0)))
