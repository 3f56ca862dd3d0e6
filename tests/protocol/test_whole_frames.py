"""Transfers of one frame: their arrays lie in it, where it has little beside them."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer
from shoal_protocol.bulk.transport import Received, read_message
from shoal_protocol.frames import acknowledgement
from shoal_protocol.tensors import ActivationKey, Array, encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb

KEY = ActivationKey(job="j", epoch=1, item=0, producer=0, consumer=1)


class Memory:
    """Counts what is asked for beside the frames (a `ReceiveBuffer`)."""

    blocks = False

    def __init__(self) -> None:
        self.allocated = 0

    def allocate(self, size: int) -> NDArray[np.uint8]:
        self.allocated += size
        return np.empty(size, np.uint8)

    def settle(self) -> None:
        """Memory is memory."""

    def abandon(self) -> None:
        """Memory is memory."""


class Taker:
    """Takes all (a `Receiver`)."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.tensors: dict[str, Array] = {}

    def admit(self, activation: pb.Activation, memory_bytes: int) -> ReceiveBuffer:
        return self.memory

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        self.tensors = received.tensors

    def refused(self, error: Exception) -> None:
        """The answer says it."""


class Unread:
    """A payload that nobody may take."""

    size = 800

    async def read(self, allocate: object = None) -> memoryview:
        raise AssertionError("it is not what the header says")

    async def read_into(self, targets: object) -> None:
        raise AssertionError("it is not what the header says")

    def pieces(self, most_bytes: int) -> AsyncIterator[memoryview]:
        raise AssertionError("it is not what the header says")


async def taken(received: Received) -> Taker:
    taker = Taker()
    answer = await Intake(taker).take(received.header, received.payload)
    assert answer == acknowledgement(1)
    return taker


@pytest.mark.parametrize("ticket_bytes", [16, 100_000])
async def test_arrays_stay_in_a_frame_with_a_header_of_usual_length(ticket_bytes: int) -> None:
    tensors = {"x": np.arange(100.0), "y": np.arange(7)}
    encoded = encode_activation(KEY, "b", tensors, transfer=1)
    encoded.header.activation.ticket = bytes(ticket_bytes)
    (message,) = encoded
    (received,) = read_message(message)
    taker = await taken(received)
    for name, array in taker.tensors.items():
        np.testing.assert_array_equal(array, tensors[name])
        stays = np.shares_memory(array, np.frombuffer(message, np.uint8))
        assert stays == (ticket_bytes == 16), "what nobody counts must not stay in memory"
    assert taker.memory.allocated == 0


async def test_arrays_are_copied_where_one_of_them_lies_where_it_must_not_begin() -> None:
    tensors = {"odd": np.ones(3, np.uint8), "x": np.arange(100.0)}
    (message,) = encode_activation(KEY, "b", tensors, transfer=1)
    (received,) = read_message(message)
    taker = await taken(received)
    for name, array in taker.tensors.items():
        np.testing.assert_array_equal(array, tensors[name])
        assert array.flags.aligned
        assert not np.shares_memory(array, np.frombuffer(message, np.uint8))
    assert taker.memory.allocated >= received.payload.size


async def test_a_payload_of_another_size_than_its_header_says_is_refused_unread() -> None:
    (message,) = encode_activation(KEY, "b", {"x": np.arange(100.0)}, transfer=1)
    (received,) = read_message(message)
    header = received.header
    del header.activation.tensors[0].shape[:]
    header.activation.tensors[0].encoded_bytes = header.activation.tensors[0].decoded_bytes = 8
    taker = Taker()
    answer = await Intake(taker).take(header, Unread())
    assert answer is not None
    assert b"more than the 8 bytes" in answer.header
