"""Documents that users and other processes write: manifests, partitions, fragments' manifests."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from coordinator.scripted import put_model
from fuzz.scratch import scratch_folder
from shoal_cli.local import manifests
from shoal_coordinator.server import wire
from shoal_protocol.digests import digest_of
from shoal_protocol.manifest import FragmentDamaged, parse_manifest
from shoal_protocol.partition import (
    DocumentRefused,
    document_from_json,
    document_to_json,
)
from shoal_protocol.v1.coordinator_pb2 import SubmitJobRequest

EXAMPLES: Final = Path(__file__).parents[2] / "examples"


def load_manifests(data: bytes) -> None:
    """A file of YAML is objects, or errors with their lines."""
    file = scratch_folder() / "manifest.yaml"
    file.write_bytes(data)
    with contextlib.suppress(manifests.ManifestErrors):
        manifests.load_manifests([file])


def manifest_seeds() -> Iterable[bytes]:
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        yield file.read_bytes()
    yield b"a: &a [1, 2.5, ~, yes, 0x1f, 12:30]\nb: *a\n---\n- {c: !!str d, e: |\n  f\n}\n"


def read_partition(data: bytes) -> None:
    """A partition that is accepted can be written again, and dispatched."""
    try:
        document = document_from_json(data)
    except DocumentRefused:
        return
    assert document_from_json(document_to_json(document)) == document
    request = SubmitJobRequest(name="job", partition=data)
    wire.check_submission(request, document)
    wire.stage_wires(document, request.batch)
    wire.job_spec(request, document, items=1, epoch=1, deadline=None)


def partition_seeds() -> Iterable[bytes]:
    yield document_to_json(put_model(scratch_folder() / "store")).encode()


def read_fragment(data: bytes) -> None:
    """A manifest that has its digest is still not believed."""
    try:
        manifest = parse_manifest(data, digest_of(data))
    except FragmentDamaged:
        return
    assert manifest.total_bytes >= len(data)


def fragment_seeds() -> Iterable[bytes]:
    put_model(scratch_folder() / "store")
    for file in (scratch_folder() / "store").rglob("fragment.json"):
        yield file.read_bytes()
    yield json.dumps({"version": 1, "files": {}}).encode()
