"""Cuts and fragments planned on pools of many unequal devices: time, gap, simple splits, moves.

Part of `planner.py`. Each figure is the worst of some pools:

- processor time and gap of a planned cut, of 48 cuts, on 12 and 16 devices; its value by that of
  the best simple split that fits: even, by memory, one device, replicas of the whole model;
- after the loss of a device, the bytes of weights that devices have to get, by those that were
  lost;
- a second model beside a first: its value where the plan knows how busy the first keeps the
  devices, by that of the plan that knows what memory is left alone. Both are weighed with what is
  left.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from measurement import RATIO, VALUE, Measurement

from shoal_planner.costs import Costs, Division, Span, SpanCosts
from shoal_planner.devices import PoolDevice
from shoal_planner.dividing import simple_splits
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan, replan
from shoal_planner.planned_cuts import TableCosts, choose_cut, with_room
from shoal_planner.search import Question
from shoal_planner.sharing import left_over, taken_by
from shoal_protocol.choices import Objective
from shoal_protocol.cut_table import Candidate, CutTable
from shoal_protocol.digests import Digest
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument
from shoal_protocol.units import Bytes, Nanoseconds

MIB: Final = 1 << 20
CUTS: Final = 48
MODEL_MIB: Final = 100
FRAGMENTS: Final = 16
SECONDS: Final = 5.0
GAP: Final = 0.35
NO_DIGEST: Final = Digest("sha256:" + "0" * 64)


def measurements(*, quick: bool) -> Iterator[Measurement]:
    pools = 1 if quick else 4
    for devices in (12, 16):
        for objective in Objective:
            yield from cuts(devices, objective, pools)
    yield moved(pools)
    yield second_models(pools)


def cuts(devices: int, objective: Objective, pools: int) -> Iterator[Measurement]:
    goal, took, gaps, ratios = Goal(objective), [0.0], [0.0], [0.0]
    for seed in range(pools):
        chance = random.Random(seed)  # noqa: S311 - a fixed seed
        table, pool = random_table(chance), random_pool(chance, devices)
        started = time.process_time()
        found = choose_cut(table, pool, goal)
        took.append(time.process_time() - started)
        assert found is not None
        assert found.gap is not None
        gaps.append(found.gap)
        costs = TableCosts(table, goal.loading_items)
        question = Question(costs=costs, pool=with_room(pool), goal=goal)
        splits = [each for each in simple_splits(question) if fits(costs, each)]
        least = min((goal.value(*costs.totals(each)) for each in splits), default=None)
        if least is not None:
            ratios.append(found.value(goal) / least)
    name = f"{CUTS} cuts on {devices} unequal devices, {objective}"
    yield Measurement(
        name=f"{name}, processor time", value=max(took), unit="s", goal=SECONDS >= VALUE
    )
    yield Measurement(name=f"{name}, gap", value=max(gaps), unit="", goal=GAP >= VALUE)
    yield Measurement(
        name=f"{name}, against the best simple split",
        value=max(ratios),
        unit="",
        peer=1.0,
        ratio=max(ratios),
        goal=RATIO <= 1.0,
    )


def moved(pools: int) -> Measurement:
    """Bytes of weights, over all pools. Judged over several: what a single device held may be next
    to nothing."""
    got = lost = 0
    for seed in range(pools):
        chance = random.Random(seed)  # noqa: S311 - a fixed seed
        document, pool = random_document(chance), random_pool(chance, 12)
        before = made(document, pool)
        gone = chance.choice(sorted({name for home in before.homes() for name in home}))
        left = [each for each in pool if each.name != gone]
        after = replan(document, left, made(document, left), before.stages)
        weights = Costs(document).weights
        got += sum(weights[fragment] for fragment, _ in held(after) - held(before))
        lost += sum(weights[fragment] for fragment, name in held(before) if name == gone)
    return Measurement(
        name="12 unequal devices, one is lost: bytes that move, by those that were lost",
        value=float(got),
        unit="B",
        peer=float(lost),
        ratio=got / lost,
        goal=RATIO <= 3.0 if pools > 1 else None,
    )


def second_models(pools: int) -> Measurement:
    ratios = []
    for seed in range(pools):
        chance = random.Random(seed)  # noqa: S311 - a fixed seed
        pool = [
            replace(each, budget_bytes=Bytes(2 * each.budget_bytes))
            for each in random_pool(chance, 8)
        ]
        taken = taken_by([made(random_document(chance), pool)])
        second, left = random_document(chance), left_over(pool, taken)
        idle = left_over(pool, {name: replace(each, busy=0.0) for name, each in taken.items()})
        costs = Costs(second)
        knowing, blind = (
            costs.totals(divisions(made(second, devices), left))[0] for devices in (left, idle)
        )
        ratios.append(knowing / blind)
    return Measurement(
        name="a second model on 8 devices: with what the first leaves of processors, by without",
        value=max(ratios),
        unit="",
        peer=1.0,
        ratio=max(ratios),
        goal=RATIO <= 1.0,
    )


def fits(costs: SpanCosts, split: Divisions) -> bool:
    return all(costs.at_once(each.span, device) for each in split for device in each.devices)


def made(document: PartitionDocument, pool: Sequence[PoolDevice]) -> Plan:
    found = plan(document, pool, Objective.THROUGHPUT)
    assert isinstance(found, Plan)
    return found


def held(of: Plan) -> set[tuple[int, str]]:
    return {(fragment, name) for fragment, home in enumerate(of.homes()) for name in home}


def divisions(of: Plan, pool: Sequence[PoolDevice]) -> Divisions:
    devices = {each.name: each for each in pool}
    return tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1),
            tuple(devices[name] for name in stage.devices),
        )
        for stage in of.stages
    )


def random_pool(chance: random.Random, count: int) -> list[PoolDevice]:
    """Devices that differ tenfold in speed, sixfold in memory, and links three hundredfold."""
    return [
        PoolDevice(
            name=f"d{index:02}",
            budget_bytes=Bytes(chance.randint(10, 60) * MIB),
            flops_per_second=chance.randint(10, 100) * 10**8,
            link_bytes_per_second=int(10 ** chance.uniform(6, 8.5)),
            latency_nanoseconds=Nanoseconds(chance.randint(0, 3) * 10**6),
        )
        for index in range(count)
    ]


def random_parts(chance: random.Random, count: int) -> tuple[list[int], list[int], list[int]]:
    """Of a chain: FLOPs and bytes of each part, and the bytes that cross each border."""
    shares = [chance.random() + 0.1 for _ in range(count)]
    flops = [chance.randint(10, 100) * 4 * 10**9 // count for _ in range(count)]
    sizes = [int(MODEL_MIB * MIB * each / sum(shares)) for each in shares]
    return flops, sizes, [int(10 ** chance.uniform(3.5, 5.7)) for _ in range(count + 1)]


def random_table(chance: random.Random) -> CutTable:
    flops, sizes, crossing = random_parts(chance, CUTS + 1)

    def candidate(start: int, end: int) -> Candidate:
        size = sum(sizes[start:end])
        return Candidate(
            weight_bytes=size // 2,
            resident_bytes=size,
            least_bytes=max(sizes[start:end]),
            flops=sum(flops[start:end]),
            work=None,
            received_bytes=crossing[start],
            sent_bytes=crossing[end],
        )

    ends = range(1, CUTS + 2)
    return CutTable(
        model_digest=NO_DIGEST,
        tensors=tuple(f"t{each}" for each in ends[:-1]),
        rows=tuple(
            tuple(candidate(start, end) for end in ends[start:]) for start in range(CUTS + 1)
        ),
    )


def random_document(chance: random.Random) -> PartitionDocument:
    flops, sizes, crossing = random_parts(chance, FRAGMENTS)
    fragments = tuple(
        Fragment(
            index=index,
            digest=Digest(f"sha256:{index:064x}"),
            nodes=1,
            weight_bytes=size // 2,
            resident_bytes=size,
            least_bytes=size,
            activation_bytes=None,
            flops=work,
            inputs=(),
            outputs=(),
        )
        for index, (work, size) in enumerate(zip(flops, sizes, strict=True))
    )
    ends = [MODEL, *range(FRAGMENTS), MODEL]
    edges = tuple(
        Edge(producer=ends[place], consumer=ends[place + 1], tensors=(), bytes_per_item=size)
        for place, size in enumerate(crossing)
    )
    return PartitionDocument(
        model_digest=NO_DIGEST, fragments=fragments, edges=edges, inputs=(), outputs=()
    )
