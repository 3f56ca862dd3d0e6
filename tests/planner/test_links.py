"""What rates between pairs of devices, and the processor's part of a transfer, change of a plan."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from fragment_pools import MIB, SECOND, device, partition, placed
from shoal_planner.borders import Borders
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.placement import plan
from shoal_planner.speeds import levelled, link_tables, measured_device
from shoal_protocol.choices import Objective
from shoal_protocol.digests import Digest
from shoal_protocol.partition import MODEL, Edge
from shoal_protocol.speeds import Link
from shoal_protocol.units import Bytes, Nanoseconds, nanoseconds

BUDGET = Bytes(24 * MIB)
SIZE = 1_000_000
CHAIN = partition([1000] * 2, [MIB] * 2, [0, SIZE, 0])


def linked(name: str, peers: Mapping[str, float], rate: float | None = 1e9) -> PoolDevice:
    links = tuple((peer, Link(bytes_per_second=each)) for peer, each in peers.items())
    return measured_device(name, BUDGET, link=Link(bytes_per_second=rate, peers=links))


def transfer(front: PoolDevice, back: PoolDevice) -> tuple[int, int]:
    """What the first sends and the second receives, in milliseconds."""
    divisions = (Division(Span(0, 1), (front,)), Division(Span(1, 2), (back,)))
    answer = Costs(CHAIN).totals(divisions)
    assert answer[0] > 0
    homes = {0: (front,), 1: (back,)}
    sent = Costs(CHAIN).on(Span(0, 1), front, homes).send
    received = Costs(CHAIN).on(Span(1, 2), back, homes).receive
    return sent * 1000 // SECOND, received * 1000 // SECOND


def test_a_message_takes_what_the_link_between_two_devices_takes() -> None:
    slow = linked("a", {"b": 1e7, "c": 1e8})
    assert transfer(slow, linked("b", {})) == (100, 100)
    assert transfer(slow, linked("c", {})) == (10, 10)


def test_the_measurement_of_the_one_that_sends_counts_and_else_the_other_ones() -> None:
    assert transfer(linked("a", {"b": 1e7}), linked("b", {"a": 1e8})) == (100, 100)
    assert transfer(linked("a", {}), linked("b", {"a": 1e8})) == (10, 10)


def test_where_a_pair_is_not_known_each_end_takes_its_own_rate_or_none() -> None:
    assert transfer(linked("a", {"c": 1.0}, 1e7), linked("b", {}, None)) == (100, 0)


def test_of_several_devices_at_the_other_end_the_mean_counts() -> None:
    front = linked("a", {"b": 1e7, "c": 1e8})
    homes = {0: (front,), 1: (linked("b", {}), linked("c", {}))}
    assert Costs(CHAIN).on(Span(0, 1), front, homes).send == 55 * SECOND // 1000


def test_a_pipeline_goes_over_the_fast_one_of_two_links() -> None:
    """`a` and `c` have room for half of the model each, and so has `b`, which is far from `a`."""
    document, tight = partition([1000] * 2, [12 * MIB] * 2, [0, SIZE, 0]), Bytes(20 * MIB)
    pool = [
        replace(linked("a", {"b": 1e6, "c": 1e9}), budget_bytes=tight),
        replace(linked("b", {"a": 1e6, "c": 1e6}), budget_bytes=tight),
        replace(linked("c", {"a": 1e9, "b": 1e6}), budget_bytes=tight),
    ]
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert {name for stage in answer.stages for name in stage.devices} == {"a", "c"}
    assert answer.stages[0].costs[0].send == SECOND // 1000


def test_the_processor_takes_part_in_transfers_and_in_tasks() -> None:
    quick = device("quick", flops=1000)
    busy = replace(
        quick, moved_bytes_per_second=100 * SIZE, handling_nanoseconds=nanoseconds(0.003)
    )
    here, there = (Costs(CHAIN).on(Span(0, 1), each) for each in (quick, busy))
    assert here.move == 0
    assert there.move == nanoseconds(0.01 + 2 * 0.003)  # a task, and what it sends
    assert there.busy == here.busy + there.move
    assert there.latency == here.latency + there.move
    both = Costs(CHAIN).on(Span(0, 2), busy)
    assert both.move == nanoseconds(0.006)  # nothing crosses, and there are two tasks


def test_links_that_are_like_the_devices_own_do_not_tell_it_from_others() -> None:
    near, far = levelled([linked("a", {"b": 0.9e9, "": 1.1e9}), linked("b", {"a": 1e6})])
    assert near.peers == ()
    assert [each.name for each in far.peers] == ["a"]


def test_links_between_devices_are_shown_where_they_are_known() -> None:
    assert link_tables([linked("a", {})]) == ()
    (table,) = link_tables([linked("a", {"b": 1 << 20, "": 2 << 20})])
    assert [row[:3] for row in table.rows] == [
        ("a", "b", "1 MiB/s"),
        ("a", "the coordinator", "2 MiB/s"),
    ]


def test_a_device_is_the_same_after_its_way_through_json() -> None:
    sent = replace(
        linked("a", {"b": 2e6}, 1e6),
        times=((Digest("sha256:" + "a" * 64), Nanoseconds(5)),),
        ratios=((Digest("sha256:" + "b" * 64), 900),),
    )
    received = PoolDevice.from_json(json.loads(json.dumps(asdict(sent))))
    assert received == sent
    assert hash(received) == hash(sent)


def test_each_edge_is_a_transfer_but_small_inputs_and_results_are_none() -> None:
    """Fragments 0, 1 and 2 in a row, and from the first to the third."""
    edges = [(MODEL, 0, 16 << 10), (0, 1, 8), (0, 2, 8), (1, 2, 8), (2, MODEL, (16 << 10) + 1)]
    document = replace(
        partition([1] * 3, [MIB] * 3),
        edges=tuple(
            Edge(producer=one, consumer=other, tensors=("x",), bytes_per_item=size)
            for one, other, size in edges
        ),
    )
    borders = Borders(document)
    transfers = {span: borders.of(*span).transfers for span in ((0, 1), (0, 2), (1, 3), (0, 3))}
    assert transfers == {(0, 1): 2, (0, 2): 2, (1, 3): 3, (0, 3): 1}
