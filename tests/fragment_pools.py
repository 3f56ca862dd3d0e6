"""Partitions and pools for tests of placement, and the plainest reckoning of weights read again."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations, product

from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Infeasible, Plan
from shoal_protocol.cut_table import Candidate, CutTable
from shoal_protocol.digests import Digest
from shoal_protocol.frame_sizes import frame_bytes, received_frame_bytes
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument

Division = list[tuple[range, list[PoolDevice]]]

MIB = 1 << 20
SECOND = 1_000_000_000


def partition(
    flops: Sequence[int | None],
    resident: Sequence[int],
    crossing: Sequence[int | None] | None = None,
    skips: Sequence[tuple[int, int, int]] = (),
    least: Sequence[int] | None = None,
) -> PartitionDocument:
    """A chain of fragments; `crossing[i]` bytes enter fragment i, the last ones leave the model.

    Half of what a fragment needs are weights; without `least`, swapping saves nothing.
    """
    count = len(flops)
    sizes = crossing if crossing is not None else [0] * (count + 1)
    chain = [
        Edge(producer=i - 1 if i else MODEL, consumer=i, tensors=("t",), bytes_per_item=sizes[i])
        for i in range(count)
    ]
    out = Edge(producer=count - 1, consumer=MODEL, tensors=("o",), bytes_per_item=sizes[count])
    more = [
        Edge(producer=a, consumer=b, tensors=(f"s{a}-{b}",), bytes_per_item=size)
        for a, b, size in skips
    ]
    fragments = tuple(
        Fragment(
            index=index,
            digest=Digest(f"sha256:{index:064x}"),
            nodes=1,
            weight_bytes=resident[index] // 2,
            resident_bytes=resident[index],
            least_bytes=(resident if least is None else least)[index],
            activation_bytes=1,
            flops=flops[index],
            inputs=(),
            outputs=(),
        )
        for index in range(count)
    )
    return PartitionDocument(
        model_digest=Digest("sha256:" + "0" * 64),
        fragments=fragments,
        edges=(*chain, *more, out),
        inputs=(),
        outputs=(),
    )


def cut_table(
    flops: Sequence[int],
    weights: Sequence[int],
    crossing: Sequence[int] = (),
    least: Sequence[int] = (),
) -> CutTable:
    """A chain of layers; `crossing[i]` bytes enter layer i, the last ones leave the model. A
    fragment needs twice its weights, and in blocks the most that one of its layers needs."""
    count = len(flops)
    moved = crossing or [0] * (count + 1)

    def candidate(start: int, end: int) -> Candidate:
        resident = 2 * sum(weights[start:end])
        return Candidate(
            weight_bytes=sum(weights[start:end]),
            resident_bytes=resident,
            least_bytes=max(least[start:end]) if least else resident,
            flops=sum(flops[start:end]),
            work=None,
            received_bytes=moved[start],
            sent_bytes=moved[end],
        )

    return CutTable(
        model_digest=Digest("sha256:" + "0" * 64),
        tensors=tuple(f"t{number}" for number in range(1, count)),
        rows=tuple(
            tuple(candidate(start, end) for end in range(start + 1, count + 1))
            for start in range(count)
        ),
    )


def device(name: str, budget: int = 24 * MIB, flops: int = SECOND, **rest: object) -> PoolDevice:
    return PoolDevice(name=name, budget_bytes=budget, flops_per_second=flops, **rest)  # type: ignore[arg-type]


def placed(answer: Plan | Infeasible) -> Plan:
    assert isinstance(answer, Plan), answer
    return answer


def reloads(answer: Plan) -> bool:
    """Whether some device does not hold its fragments at once, with room for other items."""
    return answer.waiting or any(stage.held(Holding.RELOADED) for stage in answer.stages)


def every_division(document: PartitionDocument, pool: Sequence[PoolDevice]) -> Iterator[Division]:
    """All ways to divide fragments, and to give each part devices of its own."""
    count = len(document.fragments)
    for borders in product((False, True), repeat=count - 1):
        cuts = [0, *(i + 1 for i, cut in enumerate(borders) if cut), count]
        spans = [range(a, b) for a, b in pairwise(cuts)]
        for owner in product(range(-1, len(spans)), repeat=len(pool)):
            serving = [
                [d for d, o in zip(pool, owner, strict=True) if o == s] for s in range(len(spans))
            ]
            if all(serving):
                yield list(zip(spans, serving, strict=True))


def frames_across(document: PartitionDocument, span: range) -> int:
    """What the frames take in which items enter a run of fragments and leave it."""
    coming = going = 0
    for edge in document.edges:
        size = edge.bytes_per_item or 0
        coming += size * (edge.consumer in span and edge.producer not in span)
        going += size * (edge.producer in span and edge.consumer not in span)
    return received_frame_bytes(coming) + frame_bytes(going)


def read_again(document: PartitionDocument, span: range, on: PoolDevice, moved: int) -> int:
    """Bytes of weights: the fewest, whichever fragment is granted the spare bytes first."""
    fragments = [document.fragments[i] for i in span]
    frames = frames_across(document, span)
    if sum(each.resident_bytes for each in fragments) + frames <= on.budget_bytes:
        return 0
    kept_free = max(2 * moved, frames, on.budget_bytes // 16)
    left = max(0, on.budget_bytes - kept_free - sum(each.least_bytes for each in fragments))
    fewest = []
    for order in permutations(fragments):
        spare, read = left, 0
        for each in order:
            more = min(spare, each.resident_bytes - each.least_bytes)
            spare -= more
            lacking = each.resident_bytes - each.least_bytes - more
            if lacking:
                swapped = each.resident_bytes - each.least_bytes
                read += ceil(each.weight_bytes * lacking, swapped)
        fewest.append(read)
    return min(fewest)


def ceil(a: int, b: int) -> int:
    return (a + b - 1) // b
