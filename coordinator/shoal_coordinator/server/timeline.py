"""What the devices did over time: recorded as answers come, read by whoever draws a run.

Recording begins with the first of the jobs that run and ends with the last. It is bounded: time is
divided into `COLUMNS` columns, whose length doubles when there are no more, so that a minute and a
week take the same memory. What an answer reports happened before it came: a task computed, then
sent. No clock is read here.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from shoal_coordinator.server import wire
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1 import session_pb2 as pb

COLUMNS: Final = 512
FIRST_COLUMN: Final = Nanoseconds(10_000_000)
MOST_DEVICES: Final = 64
"""Of more, the first that did something are recorded."""
MOST_CHANGES: Final = 64
_COUNTERS: Final = ("sent_bytes", "received_bytes", "fetched_bytes")
_SUMS: Final = (
    *("busy_seconds", "computing_seconds", "loading_seconds", "sending_seconds"),
    *_COUNTERS,
)


def _zeros() -> "array[float]":
    return array("d", bytes(8 * COLUMNS))


@dataclass(slots=True)
class _Lane:
    """One device: sums of each column by name, and the most memory of each."""

    sums: dict[str, "array[float]"] = field(
        default_factory=lambda: {name: _zeros() for name in _SUMS}
    )
    memory: "array[int]" = field(default_factory=lambda: array("Q", bytes(8 * COLUMNS)))
    busy_since: Nanoseconds | None = None
    reported_at: Nanoseconds | None = None
    counted: dict[str, int] = field(default_factory=dict)
    """What the counters of the last telemetry were."""
    changes: deque[api.SessionChange] = field(default_factory=lambda: deque(maxlen=MOST_CHANGES))

    def fold(self) -> None:
        """Make one column of each two."""
        rest = COLUMNS // 2
        for sums in self.sums.values():
            sums[:rest] = array("d", (a + b for a, b in zip(sums[::2], sums[1::2], strict=True)))
            sums[rest:] = array("d", bytes(8 * rest))
        pairs = zip(self.memory[::2], self.memory[1::2], strict=True)
        self.memory[:rest] = array("Q", map(max, pairs))
        self.memory[rest:] = array("Q", bytes(8 * rest))


class Timeline:
    """Of all devices. Times are those of one clock that does not go back."""

    def __init__(self) -> None:
        self._began: Nanoseconds | None = None
        self._began_seconds = 0.0
        self._recording = False
        self._column = FIRST_COLUMN
        self._last = 0
        self._lanes: dict[str, _Lane] = {}

    # ---- recording -------------------------------------------------------------------------------

    def begin(self, at: Nanoseconds, at_seconds: float) -> None:
        """The first of the jobs was submitted: what was recorded before goes. `at_seconds` is `at`
        by the wall clock, since 1970."""
        self._began, self._began_seconds, self._recording = at, at_seconds, True
        self._column, self._last = FIRST_COLUMN, 0
        self._lanes.clear()

    def end(self, at: Nanoseconds) -> None:
        """The last of the jobs has ended."""
        self._settle(at)
        self._recording = False

    def joined(self, device: str, at: Nanoseconds) -> None:
        """A session of the device has begun; what an earlier one was busy with is void."""
        if (lane := self._lane(device)) is not None:
            self._rested(lane, at)
            lane.reported_at, lane.counted = None, {}
            lane.changes.append(api.SessionChange(seconds=self._since(at), joined=True))

    def lost(self, device: str, at: Nanoseconds, reason: str) -> None:
        """The device's session has ended."""
        if (lane := self._lane(device)) is not None:
            self._rested(lane, at)
            lane.changes.append(api.SessionChange(seconds=self._since(at), reason=reason))

    def instructed(self, device: str, at: Nanoseconds) -> None:
        """The device has an instruction to answer."""
        lane = self._lane(device)
        if lane is not None and lane.busy_since is None:
            lane.busy_since = at

    def answered(self, device: str, reply: pb.Reply, at: Nanoseconds, *, idle: bool) -> None:
        """The device has answered an instruction. `idle`: it has no other."""
        if (lane := self._lane(device)) is None:
            return
        match reply.WhichOneof("outcome"):
            case "executed":
                executed = reply.executed
                sending = wire.duration(executed.sending_seconds)
                computed = Nanoseconds(at - sending)
                computing = wire.duration(executed.compute_seconds)
                self._spend(lane.sums["sending_seconds"], computed, at)
                begun = Nanoseconds(computed - computing)
                self._spend(lane.sums["computing_seconds"], begun, computed)
                self._measure(lane, wire.size(executed.peak_bytes), at)
            case "loaded" | "prefetched" | "forwarded" as outcome:
                doing = "sending_seconds" if outcome == "forwarded" else "loading_seconds"
                begun = Nanoseconds(at - wire.duration(getattr(reply, outcome).seconds))
                self._spend(lane.sums[doing], begun, at)
        if idle:
            self._rested(lane, at)

    def travelled(
        self, computed: Iterable[tuple[str, Nanoseconds]], items: int, at: Nanoseconds
    ) -> None:
        """Items have come through stages on these devices, each of which took so long for each."""
        for device, computing in computed:
            if (lane := self._lane(device)) is not None:
                begun = Nanoseconds(at - items * computing)
                self._spend(lane.sums["computing_seconds"], begun, at)

    def rested(self, device: str, at: Nanoseconds) -> None:
        """The device has no instruction any more."""
        if (lane := self._lane(device)) is not None:
            self._rested(lane, at)

    def reported(self, device: str, telemetry: pb.Telemetry, at: Nanoseconds) -> None:
        """The device has sent telemetry; its counters grow from one to the next."""
        if (lane := self._lane(device)) is None:
            return
        self._measure(lane, wire.size(telemetry.used_bytes), at)
        for name in _COUNTERS:
            count = wire.size(getattr(telemetry, name))
            if lane.reported_at is not None and (grown := count - lane.counted[name]) > 0:
                self._spread(lane.sums[name], lane.reported_at, at, grown)
            lane.counted[name] = count
        lane.reported_at = at

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, now: Nanoseconds) -> api.Timeline:
        """All of it."""
        if self._began is None:
            return api.Timeline()
        if self._recording:
            self._settle(now)
        used = self._last + 1
        return api.Timeline(
            began_seconds=self._began_seconds,
            column_seconds=seconds(self._column),
            devices=[
                api.DeviceTimeline(
                    name=name,
                    memory_bytes=lane.memory[:used],
                    changes=lane.changes,
                    **{each: lane.sums[each][:used] for each in _SUMS},
                )
                for name, lane in sorted(self._lanes.items())
            ],
        )

    # ---- inside ----------------------------------------------------------------------------------

    def _lane(self, device: str) -> _Lane | None:
        """Where a device is recorded; None if it is not."""
        if not self._recording:
            return None
        lane = self._lanes.get(device)
        if lane is None and len(self._lanes) < MOST_DEVICES:
            lane = self._lanes[device] = _Lane()
        return lane

    def _since(self, at: Nanoseconds) -> float:
        assert self._began is not None
        return seconds(Nanoseconds(at - self._began))

    def _settle(self, at: Nanoseconds) -> None:
        """Record what devices are busy with up to now."""
        for lane in self._busy():
            self._rested(lane, at)
            lane.busy_since = at

    def _busy(self) -> Iterable[_Lane]:
        return [lane for lane in self._lanes.values() if lane.busy_since is not None]

    def _rested(self, lane: _Lane, at: Nanoseconds) -> None:
        if lane.busy_since is not None:
            self._spend(lane.sums["busy_seconds"], lane.busy_since, at)
            lane.busy_since = None

    def _measure(self, lane: _Lane, measured: int, at: Nanoseconds) -> None:
        column = self._column_of(at)
        lane.memory[column] = max(lane.memory[column], measured)

    def _spend(self, sums: "array[float]", begun: Nanoseconds, ended: Nanoseconds) -> None:
        """Add the time between two moments; what was before the beginning is cut off."""
        assert self._began is not None
        begun = max(begun, self._began)
        if begun < ended:
            self._spread(sums, begun, ended, seconds(Nanoseconds(ended - begun)))

    def _spread(
        self, sums: "array[float]", begun: Nanoseconds, ended: Nanoseconds, amount: float
    ) -> None:
        """Add an amount, evenly over the columns of a time."""
        assert self._began is not None
        last = self._column_of(ended)
        start, end = begun - self._began, ended - self._began
        first = min(start // self._column, last)
        if first == last:
            sums[last] += amount
            return
        rate = amount / (end - start)
        for column in range(first, last + 1):
            left = max(start, column * self._column)
            right = end if column == last else (column + 1) * self._column
            sums[column] += rate * (right - left)

    def _column_of(self, at: Nanoseconds) -> int:
        """The column of a moment; there is one for each, after folding if need be."""
        assert self._began is not None
        past = max(0, at - self._began)
        while past >= COLUMNS * self._column:
            for lane in self._lanes.values():
                lane.fold()
            self._column = Nanoseconds(2 * self._column)
            self._last //= 2
        column = past // self._column
        self._last = max(self._last, column)
        return column
