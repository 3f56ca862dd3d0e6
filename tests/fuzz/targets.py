"""What is fuzzed: readers of bytes that others have made, each as a function of bytes.

A target raises nothing for whatever bytes: it takes the errors that its reader declares, and
asserts what must hold afterwards. So every exception that leaves it is a fault. `check_harmless`
also counts memory; time is the fuzzer's to watch.
"""

import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from fuzz import agent_messages, coordinator_messages, documents, frames, stored_files
from shoal_protocol.v1 import session_pb2, tensors_pb2

FOUND: Final = Path(__file__).parent / "found"
"""Inputs that once showed a fault, in a folder for each target."""
GROWTH_BYTES: Final = 256 << 20
"""No input of the fuzzer is longer than 64 KiB, and no target may read more than 64 MiB at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader. `seeds` are inputs that it takes; `message` is what they are, if they are messages
    of protobuf, so that fields are mutated and not only bytes."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    message: type[Message] | None = None


TARGETS: Final = {
    "frames": Target(run=frames.split, seeds=frames.seeds),
    "tensors": Target(run=frames.receive, seeds=frames.seeds, message=tensors_pb2.Frame),
    "items": Target(run=frames.receive_items, seeds=frames.item_seeds, message=tensors_pb2.Frame),
    "local": Target(run=frames.receive_locally, seeds=frames.local_seeds),
    "control": Target(run=frames.receive_control, seeds=frames.control_seeds),
    "arrays": Target(run=stored_files.read_inputs, seeds=stored_files.input_seeds),
    "parts": Target(run=stored_files.recover_part, seeds=stored_files.part_seeds),
    "journal": Target(run=stored_files.open_results, seeds=stored_files.journal_seeds),
    "manifests": Target(run=documents.load_manifests, seeds=documents.manifest_seeds),
    "partitions": Target(run=documents.read_partition, seeds=documents.partition_seeds),
    "fragments": Target(run=documents.read_fragment, seeds=documents.fragment_seeds),
    "coordinator": Target(
        run=coordinator_messages.serve,
        seeds=coordinator_messages.seeds,
        message=session_pb2.AgentBatch,
    ),
    "agent": Target(
        run=agent_messages.serve, seeds=agent_messages.seeds, message=session_pb2.CoordinatorBatch
    ),
}


def found(name: str) -> list[Path]:
    """The inputs that are kept for a target."""
    return sorted((FOUND / name).glob("*"))


def check_harmless(target: Target, data: bytes) -> None:
    """Run a target. Raises what is a fault: any exception, and memory that the input explains
    in no way."""
    before = _peak_bytes()
    target.run(data)
    grown = _peak_bytes() - before
    assert grown < GROWTH_BYTES, f"{len(data)} bytes made the process grow by {grown >> 20} MiB"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
