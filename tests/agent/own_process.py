"""A process of its own for what a test measures to a part of a MiB: what other tests have left in
their process, threads above all, comes and goes by more."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_RUN: Final = """
import pickle, sys
function, args, kwargs = pickle.load(sys.stdin.buffer)
given = function(*args, **kwargs)
sys.stdout.buffer.write(pickle.dumps(given))
"""


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function of a module gives there. Raises `CalledProcessError` where it fails; its
    traceback is on stderr."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN],
        input=pickle.dumps((function, args, kwargs)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    return cast(R, pickle.loads(done.stdout))  # noqa: S301 - of a process of ours
