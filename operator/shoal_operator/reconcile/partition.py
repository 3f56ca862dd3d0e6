"""Partition: cut by one worker, described in a ConfigMap that everyone else reads. Pure.

What is cut and how is the *recipe*: the model's address, digest and shapes, and what the spec says.
With none of fragments, maxFragmentSize and cuts, the fragments are made for the smallest budget of
the namespace's pools at that time. They are made anew when budgets have changed in the pools that
they are placed on, as soon as no job runs by them; another pool cuts nothing anew.
With cutting Planned, a Placement chooses (`planned_cuts`): the finished cut stays ready until the
next one is stored.

A Partition is ready when the stored document was made by its recipe and its status describes that
document: first a worker cuts, then its answer is stored in the ConfigMap, as gzip in binaryData,
with what made it. A ConfigMap holds at most 1 MiB, so a document that is larger even when it is
packed is refused.
"""

import base64
import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, assert_never

from shoal_api.columns import print_partition
from shoal_api.fields import MAX_FRAGMENTS
from shoal_api.kinds import DevicePool, Model, Partition
from shoal_api.kinds.partition import FragmentStatus, PartitionStatus
from shoal_operator.reconcile.addresses import offline
from shoal_operator.reconcile.bounded_json import MOST_BYTES, is_bounded
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    Cause,
    ConditionUpdate,
    not_ready,
    shortened,
    with_conditions,
)
from shoal_operator.reconcile.decision import Decision, Manifest, Note
from shoal_operator.reconcile.manifests import labels_of, manifest
from shoal_operator.reconcile.names import document_name, fingerprint
from shoal_operator.reconcile.planned_cuts import (
    RECIPE,
    chooser,
    cut_arguments,
    cuts_at,
    cuts_of,
    is_planned,
    table_map,
)
from shoal_operator.reconcile.pool_budgets import have_changed, is_cut_for_pools, smallest_budget
from shoal_operator.reconcile.snapshot import (
    PartitionSnapshot,
    StoredDocument,
    StoredTable,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    cut_worker,
    delivers,
    given_digest,
    retry_in,
    shape_arguments,
    table_worker,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)
from shoal_protocol.copying import copied
from shoal_protocol.cut_table import TableRefused, table_from_json
from shoal_protocol.partition import (
    MODEL,
    DocumentRefused,
    PartitionDocument,
    TensorSpec,
    document_from_json,
    document_to_json,
)
from shoal_protocol.units import counted, format_bytes, format_need

KEY: Final = "partition.json.gz"
ARGUMENTS: Final = "shoal.dev/arguments"
MAX_PACKED_BYTES: Final = 1_000_000
_AGAIN_SECONDS: Final = 60.0
"""While a job runs, it is asked again whether one does."""
_NAMES: Final = 256
_NAME_LENGTH: Final = 512
_ALL_NAMES: Final = 256 << 10
"""Characters of tensors' names in a status: the API server keeps objects of 1.5 MiB at most."""


def reconcile_partition(snapshot: PartitionSnapshot) -> Decision:
    """What is to be done about a Partition."""
    model, stored = snapshot.model, snapshot.document
    if model is None:
        name = snapshot.partition.spec.model_ref.name
        return _waits(snapshot, Cause("ModelNotFound", f"there is no Model {name}"))
    if (cause := not_ready(model)) is not None:
        return _waits(snapshot, cause)
    if is_planned(snapshot.partition):
        return _planned(snapshot, model)
    if stored is not None and stored.recipe == recipe_of(snapshot.partition, model):
        return _cut_for_pools(snapshot, model, stored)
    arguments = _arguments(snapshot.partition, model, snapshot.pools)
    if arguments is None:
        text = "no DevicePool here has a known budget to cut for; make one, or give fragments"
        return _waits(snapshot, Cause("WaitingForPool", text))
    return _cutting(snapshot, model, arguments)


def recipe_of(partition: Partition, model: Model) -> str:
    """What is cut and how, but for the budget that the planner chooses."""
    spec = partition.spec
    how: list[object] = [spec.fragments, spec.max_fragment_size, list(spec.cuts or ())]
    if spec.cutting is not None:
        how.append(spec.cutting.value)
    if spec.seen:
        how.append(sorted([each.tensor, *each.shape] for each in spec.seen))
    if spec.outgrown:
        how.append([[each.fragment, each.need_bytes] for each in spec.outgrown])
    return fingerprint([given_digest(model), *shape_arguments(model), *how])


def current_document(
    partition: Partition | None, stored: StoredDocument | None
) -> PartitionDocument | None:
    """The stored document, if the Partition is ready and its status describes that one."""
    if partition is None or partition.status is None or stored is None:
        return None
    if not partition.holds("Ready"):
        return None
    shown = [fragment.digest for fragment in partition.status.fragments]
    is_current = shown == [fragment.digest for fragment in stored.document.fragments]
    return stored.document if is_current else None


# ---- cutting -------------------------------------------------------------------------------------


def _planned(snapshot: PartitionSnapshot, model: Model) -> Decision:
    """A Placement chooses the cuts. What is cut stays until the next cut is finished."""
    recipe, stored = recipe_of(snapshot.partition, model), None
    if snapshot.document is not None and snapshot.document.recipe == recipe:
        stored = snapshot.document
    if snapshot.table is None or snapshot.table.recipe != recipe:
        decision = _tabulating(snapshot, model, recipe)
        return decision if stored is None else _still_cut(snapshot, stored, decision)
    first = chooser(snapshot.placements)
    chosen = None if first is None or first.status is None else first.status.cut
    if chosen is None and stored is None:
        text = "a Placement of it chooses where to cut: make one"
        if first is not None:
            text = f"Placement {first.metadata.name} chooses where to cut"
        return _waits(snapshot, Cause("WaitingForPlacement", text))
    if stored is not None and (chosen is None or cuts_of(stored) == chosen.cuts):
        return _cut(snapshot, stored.document)
    assert chosen is not None, "there is nothing else to cut for"
    arguments = (*cut_arguments(chosen.cuts), *_source_arguments(model))
    if stored is None:
        return _cutting(snapshot, model, arguments)
    return _next_cut(snapshot, model, stored, arguments)


def _cut_for_pools(snapshot: PartitionSnapshot, model: Model, stored: StoredDocument) -> Decision:
    """What is cut stays, unless it was left to us for which budgets, and these have changed."""
    used = {each.spec.pool_ref.name for each in snapshot.placements}
    pools = [pool for pool in snapshot.pools if pool.metadata.name in used]
    is_ours = is_cut_for_pools(snapshot.partition) and not snapshot.partition.spec.outgrown
    if not is_ours or not have_changed(pools, stored):
        return _cut(snapshot, stored.document)
    if snapshot.runs:
        return replace(_cut(snapshot, stored.document), requeue_seconds=_AGAIN_SECONDS)
    arguments = _arguments(snapshot.partition, model, pools)
    assert arguments is not None, "a budget is known that has changed"
    return _next_cut(snapshot, model, stored, arguments)


def _next_cut(
    snapshot: PartitionSnapshot, model: Model, stored: StoredDocument, arguments: tuple[str, ...]
) -> Decision:
    decision = _cutting(snapshot, model, arguments)
    ready = decision.status.condition("Ready")
    done = ready is not None and ready.status is TRUE
    return decision if done else _still_cut(snapshot, stored, decision)


def _still_cut(snapshot: PartitionSnapshot, stored: StoredDocument, other: Decision) -> Decision:
    """The finished cut stays ready while another is being made."""
    return replace(other, status=_cut(snapshot, stored.document).status)


def _tabulating(snapshot: PartitionSnapshot, model: Model, recipe: str) -> Decision:
    """A worker makes the table of what may be chosen from."""
    spec = table_worker(snapshot.partition, model, _source_arguments(model))
    return _working(snapshot, model, spec, lambda done: _tabulated(snapshot, recipe, done))


def _tabulated(snapshot: PartitionSnapshot, recipe: str, worker: Worker) -> Decision:
    assert worker.output is not None, "`_working` has checked"
    try:
        table = table_from_json(worker.output)
    except TableRefused as error:
        text = f"worker {worker.name} answers what this operator does not read: {error}"
        return _waits(snapshot, Cause("TableUnreadable", text), keep=worker.name)
    child = table_map(snapshot.partition, StoredTable(recipe=recipe, table=table))
    text = f"it can be cut in {len(table.tensors)} places; a Placement of it chooses"
    decision = _waits(snapshot, Cause("WaitingForPlacement", text), keep=worker.name)
    return replace(decision, children=(child,))


def _cutting(snapshot: PartitionSnapshot, model: Model, arguments: tuple[str, ...]) -> Decision:
    spec = cut_worker(snapshot.partition, model, arguments)
    return _working(snapshot, model, spec, lambda done: _answered(snapshot, model, done, arguments))


def _working(
    snapshot: PartitionSnapshot,
    model: Model,
    worker_spec: WorkerSpec,
    answered: Callable[[Worker], Decision],
) -> Decision:
    """A worker that opens the model; `answered` decides when it has succeeded."""
    settings, name = snapshot.settings, model.metadata.name
    if (cause := offline(model.spec.source.uri, settings)) is not None:
        return _waits(snapshot, cause)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        decision = _waits(snapshot, Cause("Cutting", f"{name} is about to be cut"))
        child = worker_job(snapshot.partition, worker_spec, settings)
        return replace(decision, children=(child,))
    match worker.phase:
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            text = worker_text(worker, f"{name} is being cut")
            return _waits(snapshot, Cause("Cutting", text), keep=worker.name)
        case WorkerPhase.SUCCEEDED if worker.output is None:
            # Its log is gone, so it runs again.
            text = "what the worker printed is gone; it starts again"
            return _waits(snapshot, Cause("Cutting", text))
        case WorkerPhase.SUCCEEDED:
            return answered(worker)
        case WorkerPhase.FAILED:
            return _failed(snapshot, worker)
        case _:
            assert_never(worker.phase)


def _arguments(
    partition: Partition, model: Model, pools: Sequence[DevicePool]
) -> tuple[str, ...] | None:
    """How `shoal partition` is to cut; None while there is no pool to cut for."""
    spec = partition.spec
    if spec.fragments is not None:
        how = ["--fragments", str(spec.fragments)]
    elif spec.max_fragment_size is not None:
        how = ["--max-bytes", str(spec.max_fragment_size)]
    elif spec.cuts is not None:
        how = [*cuts_at(spec.cuts)]
    else:
        smallest = smallest_budget(pools)
        if smallest is None:
            return None
        how = ["--max-bytes", str(smallest)]
    for seen in spec.seen:
        how += ["--seen", f"{seen.tensor}={','.join(map(str, seen.shape))}"]
    if spec.outgrown:
        pairs = (f"{each.fragment}={each.need_bytes}" for each in spec.outgrown)
        how += ["--outgrown", ",".join(pairs)]
    return (*how, *_source_arguments(model))


def _source_arguments(model: Model) -> tuple[str, ...]:
    """Which model it must be, and the shapes of its inputs."""
    digest = given_digest(model)
    assert digest is not None, "a Model that is ready has a digest"
    return ("--digest", digest, *shape_arguments(model))


def _answered(
    snapshot: PartitionSnapshot, model: Model, worker: Worker, arguments: tuple[str, ...]
) -> Decision:
    """The worker has cut: store what it says."""
    partition = snapshot.partition
    assert worker.output is not None, "`_working` has checked"
    try:
        document = document_from_json(worker.output)
    except DocumentRefused as error:
        text = f"worker {worker.name} answers what this operator does not read: {error}"
        return _waits(snapshot, Cause("DocumentUnreadable", text), keep=worker.name)
    count = len(document.fragments)
    if count > MAX_FRAGMENTS:
        text = f"{count} fragments; at most {MAX_FRAGMENTS} are kept: cut coarser"
        return _waits(snapshot, Cause("TooManyFragments", text), keep=worker.name)
    recipe = recipe_of(partition, model)
    stored = StoredDocument(recipe=recipe, arguments=arguments, document=document)
    packed = _pack(stored)
    if len(packed) > MAX_PACKED_BYTES:
        text = (
            f"its description takes {format_bytes(len(packed))} when it is packed, and a ConfigMap "
            f"holds {format_bytes(MAX_PACKED_BYTES)}: cut coarser"
        )
        return _waits(snapshot, Cause("DocumentTooLarge", text), keep=worker.name)
    note = Note(reason="CutModel", message=_summary(document), since=worker.ended_at or "")
    child = _config_map(partition, stored, packed)
    decision = _cut(snapshot, document, keep=worker.name)
    return replace(decision, notes=(note,), children=(child,))


def _failed(snapshot: PartitionSnapshot, worker: Worker) -> Decision:
    text = worker_text(worker, f"{snapshot.partition.spec.model_ref.name} could not be cut")
    cause = Cause("Refused" if worker.refused else "CuttingFailed", text)
    note = Note(*cause, warning=True, since=worker.ended_at or "")
    if worker.refused:
        return replace(_waits(snapshot, cause, keep=worker.name), notes=(note,))
    remaining = retry_in(worker, snapshot.now)
    decision = _waits(snapshot, cause, keep=worker.name if remaining else None)
    return replace(decision, notes=(note,), requeue_seconds=max(1.0, remaining))


# ---- the status ----------------------------------------------------------------------------------


def _waits(snapshot: PartitionSnapshot, cause: Cause, keep: str | None = None) -> Decision:
    """Not cut (yet); fragments of another recipe are not shown any more."""
    updates = [ConditionUpdate(type_, FALSE, *cause) for type_ in ("Cut", "Ready")]
    return _decision(snapshot, PartitionStatus(), updates, keep)


def _cut(
    snapshot: PartitionSnapshot, document: PartitionDocument, keep: str | None = None
) -> Decision:
    summary = _summary(document)
    updates = [ConditionUpdate(type_, TRUE, type_, summary) for type_ in ("Cut", "Ready")]
    status = PartitionStatus(fragments=_fragments(document), boundary_bytes=_boundary(document))
    return _decision(snapshot, status, updates, keep)


def _decision(
    snapshot: PartitionSnapshot,
    status: PartitionStatus,
    updates: Sequence[ConditionUpdate],
    keep: str | None,
) -> Decision:
    """All workers but `keep` and those that deliver are removed."""
    partition = snapshot.partition
    status = with_conditions(status, partition, updates, snapshot.now)
    removals = tuple(
        worker_key(partition, worker.name)
        for worker in snapshot.workers
        if worker.name != keep and not delivers(worker.name)
    )
    return Decision(status=print_partition(status), removals=removals)


def _summary(document: PartitionDocument) -> str:
    count = counted(len(document.fragments), "fragment")
    largest = max((fragment.resident_bytes for fragment in document.fragments), default=0)
    least = max((fragment.least_bytes for fragment in document.fragments), default=0)
    return f"{count}, the largest needs {format_need(least, largest)}"


def _boundary(document: PartitionDocument) -> int | None:
    """What one item sends between fragments; None where a shape is unknown."""
    inner = (edge for edge in document.edges if MODEL not in (edge.producer, edge.consumer))
    total = 0
    for edge in inner:
        if edge.bytes_per_item is None:
            return None
        total += edge.bytes_per_item
    return total


def _fragments(document: PartitionDocument) -> tuple[FragmentStatus, ...]:
    names = sum(
        min(len(spec.name), _NAME_LENGTH)
        for fragment in document.fragments
        for spec in (*fragment.inputs[:_NAMES], *fragment.outputs[:_NAMES])
    )
    named = names <= _ALL_NAMES
    return tuple(
        copied(
            FragmentStatus,
            fragment,
            inputs=_names(fragment.inputs) if named else (),
            outputs=_names(fragment.outputs) if named else (),
            successors=tuple(
                edge.consumer for edge in document.out_of(fragment.index) if edge.consumer != MODEL
            ),
        )
        for fragment in document.fragments
    )


def _names(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    return tuple(shortened(spec.name, _NAME_LENGTH) for spec in specs[:_NAMES])


# ---- the document in its ConfigMap ---------------------------------------------------------------


def _pack(stored: StoredDocument) -> bytes:
    """The document as the ConfigMap holds it; the same bytes every time."""
    return gzip.compress(document_to_json(stored.document).encode(), mtime=0)


def _config_map(partition: Partition, stored: StoredDocument, packed: bytes) -> Manifest:
    annotations = {RECIPE: stored.recipe, ARGUMENTS: json.dumps(list(stored.arguments))}
    return manifest(
        partition,
        "ConfigMap",
        document_name(partition.metadata.name),
        labels_of(partition, "document"),
        {"annotations": annotations},
        binaryData={KEY: base64.b64encode(packed).decode()},
    )


def read_document(config_map: Mapping[str, object]) -> StoredDocument | None:
    """What a ConfigMap of ours holds; None where somebody has made it useless: it is made again."""
    match config_map:
        case {
            "metadata": {
                "annotations": {
                    "shoal.dev/recipe": str(recipe),
                    "shoal.dev/arguments": str(arguments),
                }
            },
            "binaryData": {"partition.json.gz": str(packed)},
        }:
            try:
                unpacker = zlib.decompressobj(wbits=31)
                text = unpacker.decompress(base64.b64decode(packed), MOST_BYTES)
                if not is_bounded(text):
                    return None
                given = json.loads(arguments)
                document = document_from_json(text)
            except (ValueError, RecursionError, zlib.error, DocumentRefused):
                return None
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                return None
            return StoredDocument(recipe=recipe, arguments=tuple(given), document=document)
    return None
