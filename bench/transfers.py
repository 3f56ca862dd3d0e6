"""How well the planner's line predicts what tensors take over links that are unlike.

An agent measures a link by its fastest large transfer and its shortest round trip; the planner adds
bytes over the one to the other. Tensors of other sizes go from agent to agent, over mutual TLS,
through links of many rates, and what they take is compared. The peer is a boosted estimator, as
nodes have one (`costmodel`): it corrects the line, and has learnt from all links but the one that
it is judged on. Each link is the loopback of a network namespace; root makes it.

    sudo .venv/bin/python bench/transfers.py [--quick] [--json FILE]
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from hop import Streams, timed
from hop_receiver import receiver
from measurement import VALUE, Report, argument_parser, measured, shared
from sklearn.ensemble import GradientBoostingRegressor

from shoal_agent.telemetry.link import LinkMeter
from shoal_planner.devices import PeerLink
from shoal_planner.links import over
from shoal_protocol.units import nanoseconds

MEGABITS: Final = (5, 10, 20, 40, 60, 100, 150, 200, 300, 500, 1000)
QUICK: Final = (10, 60, 200, 1000)
PROBE_BYTES: Final = 512 << 10
PING_BYTES: Final = 64
SIZES: Final = tuple(4096 * 2**step + 512 * step for step in range(11))
"""4 KiB to 4 MiB; none is a probe's."""
TURNS: Final = 9
_LEAST_BURST_BYTES: Final = 32 << 10
_TICKS_PER_SECOND: Final = 250
"""A shaper lets no more pass in a tick of the kernel than it has saved up."""
_RANDOM: Final = np.random.default_rng(0).integers(0, 256, SIZES[-1], np.uint8)
"""No codec makes it smaller."""


@dataclass(frozen=True)
class Link:
    """What a link was measured to be, and the median time of a tensor by its bytes."""

    megabits: int
    bytes_per_second: float
    round_trip_seconds: float
    seconds: Mapping[int, float]

    def line(self, size: int) -> float:
        """What the planner counts until a tensor of this size is acknowledged."""
        latency = nanoseconds(self.round_trip_seconds / 2)
        way = over(PeerLink("", int(self.bytes_per_second), latency), size)
        return float(way.duration + 2 * way.delay) / 1e9

    def rows(self) -> list[tuple[float, ...]]:
        """What the estimator sees of each tensor."""
        return [
            (
                float(np.log2(size)),
                float(np.log2(self.bytes_per_second)),
                float(np.log2(self.round_trip_seconds)),
                float(np.log2(self.line(size))),
            )
            for size in self.seconds
        ]

    def ratios(self) -> list[float]:
        """Measured over predicted."""
        return [taken / self.line(size) for size, taken in self.seconds.items()]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--burst", type=int, help="measure the loopback of this namespace")
    options = parser.parse_args()
    if options.burst is not None:
        print(json.dumps(asyncio.run(measure(options.burst))))
        return
    report = Report(shared(options))
    links = [_link(megabits) for megabits in (QUICK if options.quick else MEGABITS)]
    lines: list[float] = []
    boosted: list[float] = []
    for link in links:
        own = [abs(1 / each - 1) for each in link.ratios()]
        lines += own
        boosted += _errors(_trained([each for each in links if each is not link]), link)
        report.note(
            f"{link.megabits} Mbit/s: measured {link.bytes_per_second * 8e-6:.1f}, "
            f"{link.round_trip_seconds * 1e3:.2f} ms; a line errs {median(own):.1%}"
        )
    report.add(measured("a line: error", lines, unit="of the time", goal=VALUE <= 0.15))
    report.add(measured("boosted, link not seen: error", boosted, unit="of the time"))
    report.finish()


def _link(megabits: int) -> Link:
    """Measure a link of such a rate, in a namespace that is gone with the process."""
    burst = max(_LEAST_BURST_BYTES, int(megabits * 1e6 / 8 / _TICKS_PER_SECOND))
    shaper = f"tbf rate {megabits}mbit burst {burst} latency 400ms"
    script = f'ip link set lo mtu 1500 up && tc qdisc replace dev lo root {shaper} && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh"]
    command += [sys.executable, __file__, "--burst", str(burst)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(ended.stdout)
    seconds = {int(size): taken for size, taken in found.pop("seconds").items()}
    return Link(megabits=megabits, seconds=seconds, **found)


async def measure(burst: int) -> dict[str, Any]:
    """As an agent measures its link, and then tensors of each size, in turns. What the shaper has
    saved up, `burst` bytes at most, is spent before."""

    async def taken(size: int) -> float:
        await streams.agent(_RANDOM[:burst])
        return await timed(streams.agent(_RANDOM[:size]))

    with (
        tempfile.TemporaryDirectory(prefix="shoal-transfers-") as folder,
        receiver(folder) as ports,
    ):
        streams = await Streams.open(folder, ports)
        meter = LinkMeter()
        for _ in range(TURNS):
            meter.pinged(await taken(PING_BYTES))
            meter.transferred(PROBE_BYTES, await taken(PROBE_BYTES))
        samples: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(TURNS):
            for size, times in samples.items():
                times.append(await taken(size))
        await streams.close()
    known = meter.read()
    return {
        "bytes_per_second": known.bytes_per_second,
        "round_trip_seconds": known.round_trip_seconds,
        "seconds": {size: median(times) for size, times in samples.items()},
    }


def _trained(links: Sequence[Link]) -> GradientBoostingRegressor:
    rows = [row for link in links for row in link.rows()]
    ratios = [ratio for link in links for ratio in link.ratios()]
    return GradientBoostingRegressor(
        n_estimators=150, max_depth=3, learning_rate=0.08, subsample=0.7, random_state=0
    ).fit(rows, ratios)


def _errors(estimator: GradientBoostingRegressor, link: Link) -> list[float]:
    found = zip(estimator.predict(link.rows()), link.ratios(), strict=True)
    return [abs(float(predicted) / ratio - 1) for predicted, ratio in found]


if __name__ == "__main__":
    main()
