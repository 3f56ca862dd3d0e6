"""What the queue of tasks receives and answers: tasks, tensors by their keys, and effects."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from shoal_protocol.tensors import ActivationKey
from shoal_protocol.units import Nanoseconds


class Made(NamedTuple):
    """Names what a task makes: the outputs of a stage for one item."""

    job: str
    epoch: int
    item: int
    stage: int


Key = Made | ActivationKey
"""Of tensors that were made here, or sent here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Tensors that a task takes from one producer."""

    producer: int
    tensors: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One Execute: a task, the fragment that runs it, and what it waits for. `batch` is how many
    tasks may run at once with it, itself included."""

    instruction: int
    task: Made
    digest: str
    needs: tuple[Need, ...] = ()
    deadline: Nanoseconds | None = None
    batch: int = 1


class Reason(Enum):
    """Why a task is answered without having run to its end."""

    CANCELLED = auto()
    DEADLINE = auto()
    NOT_RESIDENT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run it now; `inputs` says under which key each needed tensor is found. Those `joined` to it
    may run at once with it, all of them or some: `put_back` takes the others."""

    assignment: Assignment
    inputs: tuple[tuple[Key, frozenset[str]], ...]
    joined: "tuple[Start, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stop the running task if that is possible; its end is reported as any other's."""

    instruction: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer to a task that will not run."""

    instruction: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Nobody needs these tensors any more."""

    keys: tuple[Key, ...]


Effect = Start | Stop | Refused | Drop
