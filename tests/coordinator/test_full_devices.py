"""A device that has room for the inputs of one item at a time."""

import pytest

from coordinator.scripted import ScriptedDevice, connected
from coordinator.world import World
from shoal_protocol.bulk import link
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.frames import acknowledgement, split_frame
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.tensors_pb2 import Acknowledgement


class FullDevice(ScriptedDevice):
    """It takes inputs of one item at a time: of the next one when that has come to its end."""

    refused = 0
    _item = -1
    _refusing = 0

    async def _take_frame(self, frame: bytes) -> bool:
        header, _ = split_frame(frame)
        if header.WhichOneof("kind") == "acknowledgement":
            return False
        if header.WhichOneof("kind") == "activation":
            if self._item in (-1, header.activation.key.item) or (self._item, 2) in self.executed:
                self._item = header.activation.key.item
            else:
                self._refusing = header.transfer
        if not self._refusing or header.transfer != self._refusing:
            return False
        if header.last:
            self.refused += 1
            answer = acknowledgement(header.transfer, Acknowledgement.BUSY, "full")
            await self._write(bytes(answer))
        return True


async def test_inputs_for_which_there_is_no_room_yet_are_no_try_of_their_item(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ROOM_SECONDS", 0.05)
    rows = world.inputs(6, size=INLINE_BYTES // 4 + 1)
    device = FullDevice(world.target, "a", world.document)
    async with connected(device):
        await world.submit(backoff_limit=0)
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert device.refused > 3
    world.check_results(rows)
