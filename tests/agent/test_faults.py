"""What goes wrong, and what the agent makes of it."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from agent.conftest import Joined
from agent.fragment_making import MadeFragment, dense_model, slow_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_memory_of_fragments import run
from agent.test_running import edge, task
from shoal_protocol.channels import open_channel
from shoal_protocol.frames import join_frame, split_frame
from shoal_protocol.services import PeerClient
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.tickets import make_ticket, new_ticket_key
from shoal_protocol.transfers import STALL_SECONDS
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FetchFragmentRequest, FrameHeader

Join = Callable[..., Awaitable[Joined]]
MIB = 1 << 20
pytestmark = pytest.mark.forked


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


def route_to(peer: Joined) -> pb.Route:
    """For the output of `execute`, to a consumer on that device."""
    hello = peer.device.hello
    return pb.Route(consumer=1, device=hello.device, address=hello.address, tensors=["y"])


async def runs(device: ConnectedDevice, fragment: MadeFragment, item: int = 0) -> None:
    """Load and run: all is well."""
    loaded = await device.load(fragment.digest, fragment.resident_bytes)
    assert loaded.HasField("loaded"), loaded
    reply = await run(device, fragment.digest, 64, item)
    assert reply.HasField("executed"), reply


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
    slow = write_fragment(coordinator.store, slow_model(1000), 8 * MIB)
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
    assert not running.done()
    assert (await asyncio.wait_for(queued, 10)).failure.code == pb.CANCELLED
    assert (await asyncio.wait_for(running, PATIENCE_SECONDS)).HasField("executed")
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


async def test_an_input_that_does_not_suit_the_model_fails_with_what_is_wrong(
    join: Join, fragment: MadeFragment
) -> None:
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    unsuitable: list[tuple[np.ndarray, str]] = [
        (np.ones((1, 65), np.float32), "input x: shape [1,65] does not fit [?,64]"),
        (np.ones(64, np.float32), "input x: shape [64] does not fit [?,64]"),
        (np.ones((1, 64), np.float64), "input x: type float64 is not float32"),
    ]
    for item, (array, text) in enumerate(unsuitable):
        await joined.device.give(edge(-1, 0, item), {"x": array})
        reply = await joined.device.ask("execute", execute(fragment, item))
        assert (reply.failure.code, reply.failure.message) == (pb.INVALID_INPUT, text)
    await runs(joined.device, fragment, 3)


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


async def test_what_is_on_its_way_to_a_lost_peer_is_given_up_at_once_and_goes_again_when_it_is_back(
    join: Join, fragment: MadeFragment
) -> None:
    """A frozen peer takes the bytes that its buffers hold, and never says a word."""
    joined, peer = await join(), await join("jetson")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    route = route_to(peer)
    peer.agent.process.send_signal(signal.SIGSTOP)
    try:
        await joined.device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
        waiting = joined.device.begin("execute", execute(fragment, routes=[route]))
        await joined.device.result()  # so it has run, and sends
        assert not waiting.done()
        joined.device.send(peer_lost=pb.PeerLost(device="jetson"))
        reply = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        assert reply.HasField("executed"), reply
        assert list(reply.executed.delivered) == []
    finally:
        peer.agent.process.send_signal(signal.SIGCONT)
    reply = await joined.device.ask("forward", pb.Forward(task=task(0), route=route))
    assert reply.HasField("forwarded"), reply


async def test_a_fetch_from_a_lost_peer_goes_on_elsewhere_at_once(
    join: Join, fragment: MadeFragment
) -> None:
    joined, peer = await join(), await join("jetson")
    await peer.device.load(fragment.digest, fragment.resident_bytes)
    peer.agent.process.send_signal(signal.SIGSTOP)
    try:
        source = f"jetson@{peer.device.hello.address}"
        load = joined.device.load(fragment.digest, fragment.resident_bytes, source)
        waiting = asyncio.create_task(load)
        done, _ = await asyncio.wait([waiting], timeout=1)
        assert not done, "nothing comes, and nobody else is asked"
        joined.device.send(peer_lost=pb.PeerLost(device="jetson"))
        reply = await asyncio.wait_for(waiting, STALL_SECONDS / 2)
        assert reply.HasField("loaded"), reply
    finally:
        peer.agent.process.send_signal(signal.SIGCONT)


async def test_a_task_given_before_its_peer_was_lost_does_not_try_to_reach_it(
    join: Join, fragment: MadeFragment
) -> None:
    joined, peer = await join(), await join("jetson")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    route = route_to(peer)
    waiting = joined.device.begin("execute", execute(fragment, routes=[route]))
    joined.device.send(peer_lost=pb.PeerLost(device="jetson"))
    await joined.device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    reply = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    assert list(reply.executed.delivered) == []


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
        true = encode_activation(edge(-1, 0), "pi-4", tensors, transfer=4)
        key = joined.device.ticket_keys["pi-4"]
        true.header.activation.ticket = make_ticket(key, edge(-1, 0))
        for frames in (
            encode_activation(edge(-1, 0), "another", tensors, transfer=1),
            lie,
            [join_frame(FrameHeader(transfer=3, offset=9), b"tail")],
            true,
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


async def test_a_peer_s_activation_is_taken_only_with_the_ticket_of_its_route(
    join: Join, fragment: MadeFragment
) -> None:
    """Any device of the pool can open a stream to any other; the coordinator says who sends."""
    joined = await join()
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    key = joined.device.ticket_keys["pi-4"]
    right, other_item = edge(-1, 0), edge(-1, 0, 1)
    forged = {"x": np.full((1, 64), 666, np.float32)}
    true = {"x": np.ones((1, 64), np.float32)}
    async with open_channel(joined.device.hello.address) as channel:
        stream = PeerClient(channel).push()
        answers = []
        for number, (tensors, ticket) in enumerate(
            (
                (forged, b""),
                (forged, bytes(16)),
                (forged, make_ticket(key, other_item)),
                (forged, make_ticket(key, edge(-1, 1))),
                (forged, make_ticket(new_ticket_key(), right)),
                (true, make_ticket(key, right)),
                (forged, b""),
            )
        ):
            encoded = encode_activation(right, "pi-4", tensors, transfer=number)
            encoded.header.activation.ticket = ticket
            for frame in encoded:
                await stream.write(frame)
            header, _ = split_frame(await anext(aiter(stream)))
            answers.append(header.acknowledgement)
        stream.cancel()
    stale, accepted = Acknowledgement.STALE, Acknowledgement.ACCEPTED
    assert [a.outcome for a in answers] == [stale] * 5 + [accepted, stale]
    assert "the coordinator has not asked for it" in answers[0].message
    assert (await joined.device.ask("execute", execute(fragment))).HasField("executed")
    result = (await joined.device.result()).tensors["y"]
    await runs(joined.device, fragment, 1)
    reply = await joined.device.ask(
        "execute", execute(fragment, 2, input_frame=inline(edge(-1, 0, 2), true))
    )
    assert reply.HasField("executed"), reply
    np.testing.assert_array_equal(result, (await joined.device.result()).tensors["y"])


def inline(key: ActivationKey, tensors: dict[str, np.ndarray]) -> bytes:
    (frame,) = encode_activation(key, "pi-4", tensors, transfer=0)
    return frame


async def test_a_peer_gets_nothing_but_the_files_of_cached_fragments(join: Join) -> None:
    joined = await join()
    unknown = "sha256:" + "0" * 64
    async with open_channel(joined.device.hello.address) as channel:
        for digest, file, code in (
            (unknown, "../../../etc/passwd", "INVALID_ARGUMENT"),
            ("../" * 10 + "etc", "model.onnx", "INVALID_ARGUMENT"),
            (unknown, "model.onnx", "NOT_FOUND"),
        ):
            request = FetchFragmentRequest(digest=digest, file=file)
            call = PeerClient(channel).fetch_fragment(request, 5)
            assert code in str(await call.code()), (digest, file)


async def test_an_activation_larger_than_the_budget_is_refused(join: Join) -> None:
    joined = await join(budget="1Mi")
    answer = await joined.device.give(edge(-1, 0), {"x": np.ones((1025, 256), np.float32)})
    assert answer.outcome == Acknowledgement.REFUSED
    assert "at most 1 MiB are allowed" in answer.message
