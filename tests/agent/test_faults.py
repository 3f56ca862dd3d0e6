"""What goes wrong, and what the agent makes of it."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, slow_model, write_fragment
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from agent.test_memory_of_fragments import run
from agent.test_running import edge, task
from shoal_agent.shell.cache import CorruptFragment, FragmentCache
from shoal_protocol.channels import open_channel
from shoal_protocol.frames import join_frame, split_frame
from shoal_protocol.services import PeerClient
from shoal_protocol.tensors import encode_activation
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FetchFragmentRequest, FrameHeader
from small_disk import small_disk

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20


@pytest.fixture
def fragment(coordinator: ScriptedCoordinator) -> MadeFragment:
    return write_fragment(coordinator.store, dense_model([64, 512, 64]))


def execute(fragment: MadeFragment, item: int = 0, epoch: int = 1, **more: Any) -> pb.Execute:
    return pb.Execute(
        task=task(0, item, epoch),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        results=["y"],
        **more,
    )


def cached(joined: Joined, fragment: MadeFragment, file: str) -> Path:
    return joined.agent.cache / "fragments" / fragment.folder.name / file


async def runs(device: ConnectedDevice, fragment: MadeFragment, item: int = 0) -> None:
    """Load and run: all is well."""
    loaded = await device.load(fragment.digest, fragment.resident_bytes)
    assert loaded.HasField("loaded"), loaded
    reply = await run(device, fragment.digest, 64, item)
    assert reply.HasField("executed"), reply


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "manifest"])
async def test_a_damaged_cached_fragment_is_detected_and_fetched_again(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment, damage: str
) -> None:
    joined = await join()
    await joined.device.ask("prefetch", pb.Prefetch(digest=fragment.digest))
    await joined.agent.kill()
    weights = cached(joined, fragment, "weights.bin")
    match damage:
        case "flipped byte":
            data = bytearray(weights.read_bytes())
            data[5000] ^= 1
            weights.write_bytes(data)
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-1])
        case _:
            cached(joined, fragment, "fragment.json").write_text("{}")
    coordinator.fetches.clear()
    joined = await join()
    noticed_at_start = damage != "flipped byte"
    assert [c.digest for c in joined.device.hello.cached] == (
        [] if noticed_at_start else [fragment.digest]
    )
    await runs(joined.device, fragment)
    assert {request.file for request in coordinator.fetches} >= {"weights.bin"}
    assert weights.read_bytes() == (fragment.folder / "weights.bin").read_bytes()


async def test_a_cached_fragment_is_not_fetched_again_after_a_restart(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await runs(joined.device, fragment)
    await joined.agent.kill()
    coordinator.fetches.clear()
    joined = await join()
    assert [c.digest for c in joined.device.hello.cached] == [fragment.digest]
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.loaded.fetched_bytes == 0
    assert coordinator.fetches == []


async def test_a_fetch_that_breaks_is_continued_where_it_ended(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([512, 1024, 512]))
    joined = await join()
    coordinator.cut_fetch_after_bytes = MIB
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "coordinator: UNAVAILABLE the link broke" in reply.failure.message
    await joined.agent.kill()  # not even the process has to be the same
    joined = await join()
    coordinator.fetches.clear()
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.HasField("loaded"), reply
    (request,) = [request for request in coordinator.fetches if request.file == "weights.bin"]
    assert request.offset > MIB // 2


async def test_a_peer_is_asked_first_and_the_coordinator_when_it_lies(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    holder, other = await join("pi-4"), await join("jetson")
    await holder.device.load(fragment.digest, fragment.resident_bytes)
    address = f"pi-4@{holder.device.hello.address}"
    coordinator.fetches.clear()
    reply = await other.device.load(fragment.digest, fragment.resident_bytes, address)
    assert reply.loaded.fetched_bytes > 0
    assert coordinator.fetches == []

    weights = cached(holder, fragment, "weights.bin")
    data = bytearray(weights.read_bytes())
    data[0] ^= 1
    weights.unlink()  # what is mapped stays as it was
    weights.write_bytes(data)
    third = await join("pi-zero")
    reply = await third.device.load(
        fragment.digest, fragment.resident_bytes, f"nobody@unix:{holder.agent.cache}/no", address
    )
    assert reply.HasField("loaded"), reply
    assert {request.file for request in coordinator.fetches} >= {"weights.bin"}


async def test_a_fragment_that_nobody_has_is_unavailable_with_every_answer(join: Join) -> None:
    joined = await join()
    reply = await joined.device.load("sha256:" + "0" * 64, MIB)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "coordinator: NOT_FOUND" in reply.failure.message
    reply = await joined.device.load("sha256:../../etc/passwd", MIB)
    assert reply.failure.code == pb.UNAVAILABLE
    assert "no digest" in reply.failure.message


async def test_a_store_that_gives_wrong_bytes_is_corrupt_and_leaves_nothing(
    join: Join, fragment: MadeFragment
) -> None:
    weights = fragment.folder / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    joined = await join()
    reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
    assert reply.failure.code == pb.CORRUPT
    assert "weights.bin does not match its digest" in reply.failure.message
    assert list((joined.agent.cache / "fragments").iterdir()) == []


async def test_the_cache_drops_what_was_used_longest_ago_but_not_what_is_resident(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    first, second, third, fourth = (
        write_fragment(coordinator.store, dense_model([256, 1024, 8], seed)) for seed in range(4)
    )
    # Three quarters of it are for fragments: room for two.
    joined = await join("pi-4", "--cache-size", "3500Ki")
    await joined.device.load(first.digest, first.resident_bytes)
    await joined.device.ask("prefetch", pb.Prefetch(digest=second.digest))
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=third.digest))
    assert list(reply.prefetched.dropped) == [second.digest]
    reply = await joined.device.load(third.digest, third.resident_bytes)
    assert reply.loaded.fetched_bytes == 0
    reply = await joined.device.ask("prefetch", pb.Prefetch(digest=fourth.digest))
    assert reply.failure.code == pb.DISK_FULL
    assert reply.failure.need_bytes > reply.failure.have_bytes
    names = {path.name for path in (joined.agent.cache / "fragments").iterdir()}
    assert names == {first.folder.name, third.folder.name}


async def test_a_full_disk_fails_the_load_cleans_up_and_leaves_the_agent_alive(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    large = write_fragment(coordinator.store, dense_model([1024, 2048, 8]))
    joined = await join("pi-4", file_limit_bytes=4 * MIB)
    reply = await joined.device.load(large.digest, large.resident_bytes)
    assert reply.failure.code == pb.DISK_FULL, reply
    assert list((joined.agent.cache / "fragments").iterdir()) == []
    await runs(joined.device, fragment)


@pytest.mark.real
async def test_a_full_disk_drops_as_many_fragments_as_the_new_one_needs(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    small = [
        write_fragment(coordinator.store, dense_model([256, 512, 8], seed)) for seed in range(4)
    ]
    large = write_fragment(coordinator.store, dense_model([1024, 512, 8]))  # 2 MiB
    with small_disk(folder / "cache-pi-4", "2700k"):
        joined = await join()
        for each in small:
            reply = await joined.device.ask("prefetch", pb.Prefetch(digest=each.digest))
            assert reply.HasField("prefetched"), reply
        reply = await joined.device.ask("prefetch", pb.Prefetch(digest=large.digest))
        assert list(reply.prefetched.dropped) == [each.digest for each in small[:3]], reply
        assert (await joined.device.load(large.digest, 8 * MIB)).loaded.fetched_bytes == 0


@pytest.mark.parametrize("change", ["another byte", "another file", "gone"])
def test_a_cached_fragment_that_changed_since_it_was_verified_is_verified_again(
    tmp_path: Path, change: str
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    assert cache.verify(made.digest) == cache.verify(made.digest) == made.folder
    weights = made.folder / "weights.bin"
    data, before = bytearray(weights.read_bytes()), weights.stat()
    data[5000] ^= 1
    match change:
        case "another byte":
            with weights.open("r+b") as file:
                file.write(data)
        case "another file":
            weights.unlink()
            weights.write_bytes(data)
        case _:
            weights.unlink()
    if change != "gone":  # not even the time that people see gives it away
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptFragment, match=str(weights)):
        cache.verify(made.digest)
    assert made.digest not in cache


def test_a_cached_fragment_that_is_as_it_was_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([64, 512, 64]))
    cache = FragmentCache(tmp_path, 1 << 30)
    cache.verify(made.digest)
    monkeypatch.setattr("shoal_agent.shell.cache.file_sha256", lambda path: pytest.fail(str(path)))
    assert cache.verify(made.digest) == made.folder


# ---- sessions ------------------------------------------------------------------------------------


async def test_after_a_broken_session_the_agent_comes_back_with_fragments_and_without_tasks(
    coordinator: ScriptedCoordinator, join: Join, folder: Path, fragment: MadeFragment
) -> None:
    joined = await join()
    await runs(joined.device, fragment)
    joined.device.begin("execute", execute(fragment, 1))
    joined.device.send(probe=pb.Probe(nonce=1))
    await joined.device.probe_replies.get()
    await coordinator.stop()
    again = ScriptedCoordinator(coordinator.store)
    await again.start(f"unix:{folder}/c.sock")
    try:
        device = await again.device()
        assert device.hello.incarnation == joined.device.hello.incarnation
        assert [r.digest for r in device.hello.resident] == [fragment.digest]
        assert [c.digest for c in device.hello.cached] == [fragment.digest]
        telemetry = await device.telemetry.get()
        assert telemetry.queued_tasks == 0
        reply = await run(device, fragment.digest, 64, 2)
        assert reply.HasField("executed"), reply
    finally:
        await again.stop()


async def test_a_restarted_agent_has_a_greater_incarnation(join: Join) -> None:
    first = await join()
    await first.agent.kill()
    second = await join()
    assert second.device.hello.incarnation > first.device.hello.incarnation


async def test_an_older_epoch_is_refused_as_task_and_as_activation(
    join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await runs(joined.device, fragment)
    joined.device.send(cancel=pb.Cancel(job="j", epoch=7))
    reply = await joined.device.ask("execute", execute(fragment, 5, epoch=6))
    assert reply.failure.code == pb.CANCELLED
    assert "epoch 6 of job j is over" in reply.failure.message
    answer = await joined.device.give(edge(-1, 0, 5, epoch=6), {"x": np.ones((1, 64), np.float32)})
    assert answer.outcome == Acknowledgement.STALE


async def test_a_probe_is_answered_while_a_task_runs_and_a_running_task_can_be_cancelled(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    slow = write_fragment(coordinator.store, slow_model(100_000), 8 * MIB)
    joined = await join()
    device = joined.device
    await device.load(slow.digest, 8 * MIB)
    await device.give(edge(-1, 0), {"x": np.ones((256, 256), np.float32)})
    running = device.begin("execute", execute(slow))
    for nonce in range(20):
        device.send(probe=pb.Probe(nonce=nonce))
        assert (await asyncio.wait_for(device.probe_replies.get(), 10)).nonce == nonce
    assert not running.done()
    device.send(cancel=pb.Cancel(instruction=next(device.numbers) - 1))
    reply = await asyncio.wait_for(running, 10)
    assert reply.failure.code == pb.CANCELLED


async def test_sigterm_lets_the_running_task_end_and_answers_the_others(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    slow = write_fragment(coordinator.store, slow_model(300), 8 * MIB)
    joined = await join()
    device = joined.device
    await device.load(slow.digest, 8 * MIB)
    for item in range(2):
        await device.give(edge(-1, 0, item), {"x": np.ones((256, 256), np.float32)})
    running, queued = (device.begin("execute", execute(slow, item)) for item in range(2))
    device.send(probe=pb.Probe(nonce=1))
    await device.probe_replies.get()
    joined.agent.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(device.draining.wait(), 10)
    assert (await asyncio.wait_for(queued, 10)).failure.code == pb.CANCELLED
    assert (await asyncio.wait_for(running, 10)).HasField("executed")
    assert (await device.result()).key.item == 0
    assert await joined.agent.ended() == 0
    await asyncio.wait_for(device.gone.wait(), 10)


async def test_a_task_that_is_cancelled_as_soon_as_it_is_given_does_not_run(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    slow = write_fragment(coordinator.store, slow_model(1_000_000), 8 * MIB)
    device = (await join()).device
    await device.load(slow.digest, 8 * MIB)
    await device.give(edge(-1, 0), {"x": np.ones((256, 256), np.float32)})
    order = execute(slow)
    running = device.begin("execute", order)
    assert device.down.get_nowait() is not None
    device.send(
        batch=pb.CoordinatorBatch(
            messages=[
                pb.CoordinatorMessage(execute=order),
                pb.CoordinatorMessage(cancel=pb.Cancel(instruction=order.instruction)),
            ]
        )
    )
    reply = await asyncio.wait_for(running, 10)
    assert (reply.failure.code, reply.failure.message) == (pb.CANCELLED, "stopped before it began")


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
async def test_sigint_or_a_second_sigterm_ends_at_once(
    coordinator: ScriptedCoordinator, join: Join, numbers: list[signal.Signals]
) -> None:
    slow = write_fragment(coordinator.store, slow_model(100_000), 8 * MIB)
    joined = await join()
    await joined.device.load(slow.digest, 8 * MIB)
    await joined.device.give(edge(-1, 0), {"x": np.ones((256, 256), np.float32)})
    running = joined.device.begin("execute", execute(slow))
    joined.device.send(probe=pb.Probe(nonce=1))
    await joined.device.probe_replies.get()
    for number in numbers[:-1]:
        joined.agent.process.send_signal(number)
        await asyncio.wait_for(joined.device.draining.wait(), 10)
    joined.agent.process.send_signal(numbers[-1])
    assert await joined.agent.ended() == 128 + numbers[-1]
    assert not running.done()


# ---- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"x": np.ones((1, 65), np.float32)}, "input x: shape [1,65] does not fit [?,64]"),
        ({"x": np.ones(64, np.float32)}, "input x: shape [64] does not fit [?,64]"),
        ({"x": np.ones((1, 64), np.float64)}, "input x: type float64 is not float32"),
    ],
)
async def test_an_input_that_does_not_suit_the_model_fails_with_what_is_wrong(
    join: Join, fragment: MadeFragment, tensors: dict[str, np.ndarray], text: str
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    await joined.device.give(edge(-1, 0), tensors)
    reply = await joined.device.ask("execute", execute(fragment))
    assert (reply.failure.code, reply.failure.message) == (pb.INVALID_INPUT, text)
    await runs(joined.device, fragment, 1)


async def test_a_task_that_waits_in_vain_meets_its_deadline(
    join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    reply = await joined.device.ask("execute", execute(fragment, deadline_seconds=0.05))
    assert reply.failure.code == pb.DEADLINE
    assert "waiting for activations of the model's inputs" in reply.failure.message


async def test_a_task_without_its_fragment_is_not_resident(
    join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    reply = await joined.device.ask("execute", execute(fragment))
    assert reply.failure.code == pb.NOT_RESIDENT
    assert (await joined.device.unload(fragment.digest)).failure.code == pb.NOT_RESIDENT


async def test_a_peer_that_cannot_be_reached_is_left_to_the_dispatcher(
    join: Join, fragment: MadeFragment, folder: Path
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    await joined.device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    route = pb.Route(consumer=1, device="gone", address=f"unix:{folder}/gone.sock", tensors=["y"])
    reply = await joined.device.ask("execute", execute(fragment, routes=[route]))
    assert reply.HasField("executed"), reply
    assert list(reply.executed.delivered) == []
    forward = pb.Forward(task=task(0), route=route)
    reply = await joined.device.ask("forward", forward)
    assert reply.failure.code == pb.UNREACHABLE
    joined.device.send(release=pb.Release(tasks=[task(0)]))
    reply = await joined.device.ask("forward", forward)
    assert reply.failure.code == pb.MISSING_ACTIVATION


async def test_what_a_relay_does_not_take_is_told_in_its_words(
    coordinator: ScriptedCoordinator, join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    await joined.device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    reply = await joined.device.ask("execute", execute(fragment, kept=["y"]))
    assert reply.HasField("executed"), reply
    await joined.device.result()
    coordinator.outcomes = [Acknowledgement.STALE]
    coordinator.reason = "jetson is not connected"
    route = pb.Route(consumer=1, device="jetson", tensors=["y"])
    reply = await joined.device.ask("forward", pb.Forward(task=task(0), route=route))
    assert reply.failure.code == pb.CANCELLED
    assert reply.failure.message == "the activation was not taken: jetson is not connected"


# ---- peers ---------------------------------------------------------------------------------------


async def test_a_peer_that_sends_nonsense_is_cut_off_and_others_are_not(
    join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    async with open_channel(joined.device.hello.address) as channel:
        call = PeerClient(channel).push()
        await call.write(b"\xff\xff\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT

        stream = PeerClient(channel).push()
        tensors = {"x": np.ones((1, 64), np.float32)}
        outcomes = []
        lie = encode_activation(edge(-1, 0), "pi-4", tensors, transfer=2)
        lie.header.activation.tensors[0].decoded_bytes = 1 << 40
        for frames in (
            encode_activation(edge(-1, 0), "another", tensors, transfer=1),
            lie,
            [join_frame(FrameHeader(transfer=3, offset=9), b"tail")],
            encode_activation(edge(-1, 0), "pi-4", tensors, transfer=4),
        ):
            for frame in frames:
                await stream.write(frame)
            header, _ = split_frame(await anext(aiter(stream)))
            outcomes.append(header.acknowledgement.outcome)
        refused = Acknowledgement.REFUSED
        assert outcomes == [refused, refused, refused, Acknowledgement.ACCEPTED]
        stream.cancel()
    reply = await joined.device.ask("execute", execute(fragment))
    assert reply.HasField("executed"), reply


@pytest.mark.parametrize(
    ("digest", "file", "code"),
    [
        ("sha256:" + "0" * 64, "../../../etc/passwd", "INVALID_ARGUMENT"),
        ("../" * 10 + "etc", "model.onnx", "INVALID_ARGUMENT"),
        ("sha256:" + "0" * 64, "model.onnx", "NOT_FOUND"),
    ],
)
async def test_a_peer_gets_nothing_but_the_files_of_cached_fragments(
    join: Join, digest: str, file: str, code: str
) -> None:
    joined = await join()
    async with open_channel(joined.device.hello.address) as channel:
        call = PeerClient(channel).fetch_fragment(FetchFragmentRequest(digest=digest, file=file), 5)
        assert code in str(await call.code())


async def test_an_activation_larger_than_the_budget_is_refused(join: Join) -> None:
    joined = await join(budget="1Mi")
    answer = await joined.device.give(edge(-1, 0), {"x": np.ones((1025, 256), np.float32)})
    assert answer.outcome == Acknowledgement.REFUSED
    assert "at most 1048576 are allowed" in answer.message


async def test_activations_beyond_memory_are_spilled_and_beyond_the_disk_are_put_off(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([1024, 16]), 14 * MIB)
    joined = await join("pi-4", "--cache-size", "24Mi", budget="16Mi")
    await joined.device.load(fragment.digest, 14 * MIB)
    outcomes = []
    # A megabyte each: two fit into memory, four onto the disk, which has a place for all six.
    for item in range(8):
        x = np.full((256, 1024), item, np.float32)
        outcomes.append((await joined.device.give(edge(-1, 0, item), {"x": x})).outcome)
    accepted, busy = Acknowledgement.ACCEPTED, Acknowledgement.BUSY
    assert outcomes == [accepted] * 6 + [busy] * 2
    assert sum(1 for _ in (joined.agent.cache / "activations").iterdir()) == 4
    weight = json.loads((fragment.folder / "fragment.json").read_text())["initializers"]["w0"]
    raw = (fragment.folder / "weights.bin").read_bytes()[weight["offset"] :][: weight["bytes"]]
    matrix = np.frombuffer(raw, np.float32).reshape(weight["shape"])
    for item in range(6):
        reply = await joined.device.ask("execute", execute(fragment, item))
        assert reply.HasField("executed"), reply
        expected = np.maximum(np.full((256, 1024), item, np.float32) @ matrix, 0)
        received = await joined.device.result()
        np.testing.assert_allclose(received.tensors["y"], expected, rtol=1e-4, atol=1e-4)
    assert list((joined.agent.cache / "activations").iterdir()) == []


@pytest.mark.real
async def test_a_load_that_finds_no_disk_for_activations_says_so_and_works_when_there_is_room(
    coordinator: ScriptedCoordinator, join: Join, folder: Path
) -> None:
    small, large = (
        write_fragment(coordinator.store, dense_model([64, 512, 64], seed), 2 * MIB)
        for seed in range(2)
    )
    with small_disk(folder / "cache-pi-4", "3m"):
        joined = await join(budget="16Mi")
        device = joined.device
        await runs(device, small)
        x = np.zeros((4096, 64), np.float32)
        for item in range(1, 11):  # a megabyte each, in memory
            answer = await device.give(edge(-1, 0, item), {"x": x})
            assert answer.outcome == Acknowledgement.ACCEPTED
        for _ in range(2):
            reply = await device.load(large.digest, 12 * MIB)
            assert reply.failure.code == pb.DISK_FULL, reply
            assert "No space left on device" in reply.failure.message
        for item in range(1, 11):  # what waited is unharmed, also that which found a place
            reply = await device.ask("execute", execute(small, item))
            assert reply.HasField("executed"), reply
            assert (await device.result()).tensors["y"].shape == (4096, 64)
        await runs(device, large, 11)
        assert joined.agent.errors.read_text().count("nobody foresaw") == 0
