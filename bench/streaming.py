"""DistilBERT in three stages over unequal devices: streaming, pipelining, and starting warm.

python bench/streaming.py [--loaded] [--quick] [--json FILE]

Each device has memory for one stage only. Their processor shares and memory limits are held by the
kernel (cgroups), so one machine gives devices as unequal as phones are; links are paced. The
reference is CROWDio, "Main Results": N=5 inputs, S=3 stages, streaming 34 % shorter than barrier, a
start from disk 6 s against 48 s cold.

Streaming is stated beside its bound, and the pipeline in its steady state beside its slowest stage
alone (`steady`); both need a hundred items and more, which the quick form does not have. Runs
during which others use the machine are refused (`foreign`).
"""

import asyncio
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from foreign import refused
from measurement import RATIO, Measurement, Report, argument_parser, compared, shared
from pool import Pool, cut, running_pool, write_items
from steady import alone, ended_at, stage_inputs, steady_rate, streaming_bound
from zoo.materialise import materialise

from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.v1 import coordinator_pb2 as pb

MODEL = "distilbert_sst2"
STAGES, BATCH, WORDS, ITEMS = 3, 5, 128, 150
# Two layers in each stage, as the paper cuts: the table of words makes the first one the largest.
CUTS = tuple(
    f"distilbert.transformer.layer.{layer}.output_layer_norm/LayerNormalization_out"
    for layer in (1, 3)
)
LINK = "200M"  # of a small board on good Wi-Fi


@dataclass(frozen=True, slots=True)
class Device:
    """A share of a processor, and memory for one of the stages only."""

    processors: float
    memory_mib: int


# The processors are below two together, so that every device gets its share.
THREE = {"a": Device(0.5, 180), "b": Device(0.4, 90), "c": Device(0.35, 90)}
FIVE = {
    "a": Device(0.4, 180),
    "b": Device(0.35, 90),
    "c": Device(0.3, 90),
    "d": Device(0.25, 90),
    "e": Device(0.2, 90),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A pool with the model cut into its store, and items to run."""

    pool: Pool
    document: PartitionDocument
    homes: tuple[tuple[str, ...], ...]
    few: Path
    label: str
    loaded: bool

    async def run(self, name: str, inputs: Path, mode: "pb.Mode" = pb.STREAMING) -> pb.JobStatus:
        """One job; every item must succeed."""
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as outputs:
            return await self._run(name, inputs, Path(outputs) / "out", mode=mode)

    async def rate(self, name: str, inputs: Path, stage: int | None = None) -> float:
        """Items a second in the steady state: of the pipeline, or of one of its stages alone."""
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            outputs = Path(folder) / "out"
            await self._run(name, inputs, outputs, stage=stage)
            return steady_rate(ended_at(outputs))

    async def _run(
        self,
        name: str,
        inputs: Path,
        outputs: Path,
        *,
        stage: int | None = None,
        mode: "pb.Mode" = pb.STREAMING,
    ) -> pb.JobStatus:
        """A run of the whole pipeline or of a stage. Raises `ForeignLoad` where others used the
        machine meanwhile."""
        document, homes = self.document, self.homes
        if stage is not None:
            document, homes = alone(document, stage), (homes[stage],)
        label = f"{self.label}-{name}"
        with nullcontext() if self.loaded else refused(self._processes):
            status = await self.pool.run(label, document, inputs, outputs, homes=homes, mode=mode)
        assert status.state == pb.JobStatus.COMPLETE, status
        return status

    def _processes(self) -> Iterable[int]:
        return map(self.pool.process_id, ("coordinator", *self.pool.device_names))


def planned_homes(document: PartitionDocument, pool: Pool) -> tuple[tuple[str, ...], ...]:
    """Where the product's own plan puts the stages."""
    found = plan(document, pool.planned_devices(), Objective.THROUGHPUT)
    assert isinstance(found, Plan), found
    return found.homes()


def text_items(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        {
            "input_ids": random.integers(1000, 20_000, (1, WORDS)),
            "attention_mask": np.ones((1, WORDS), np.int64),
        }
        for _ in range(count)
    ]


async def starts(bench: Bench, label: str, turns: int) -> list[Measurement]:
    """What a start costs: from submitting one item to its result, beyond what that takes where
    every fragment is resident; cold, and with the fragments on disk."""
    one = write_items(bench.few.parent / "one", text_items(1))

    async def once(name: str) -> float:
        started = time.perf_counter()
        await bench.run(name, one)
        return time.perf_counter() - started

    cold = await once("cold")
    cached, resident = [], []
    for turn in range(turns):
        await asyncio.gather(*map(bench.pool.restart, bench.pool.device_names))
        cached.append(await once(f"cached-{turn}"))
        resident.append(await once(f"resident-{turn}"))
    warm = median(resident)
    colds = [cold] * len(cached)
    costs, peers = [taken - warm for taken in cached], [cold - warm] * len(cached)
    name = f"{label}: what a start from disk (tier 2) adds, against what a cold one adds"
    return [
        compared(f"{label}: one item, resident (tier 1), against cold", resident, colds, unit="s"),
        compared(f"{label}: one item, from disk (tier 2), against cold", cached, colds, unit="s"),
        compared(name, costs, peers, unit="s", goal=RATIO <= 6 / 48),
    ]


async def batches(bench: Bench, label: str, turns: int) -> Measurement:
    """The batch of the paper in both modes, in turns."""
    streaming: list[float] = []
    barrier: list[float] = []
    for turn in range(turns):
        both = [(pb.STREAMING, streaming), (pb.BARRIER, barrier)]
        for mode, samples in both if turn % 2 == 0 else reversed(both):
            status = await bench.run(f"batch-{mode}-{turn}", bench.few, mode)
            samples.append(status.seconds)
    name = f"{label}: batch of {BATCH} in {STAGES} stages, streaming against barrier"
    return compared(name, streaming, barrier, unit="s", goal=RATIO <= 0.66)


async def throughput(bench: Bench, label: str, turns: int) -> list[Measurement]:
    """How near the pipeline comes to its slowest stage, and streaming to its bound."""
    items = text_items(ITEMS)
    folders = [
        write_items(bench.few.parent / f"stage-{stage}", taken)
        for stage, taken in enumerate(stage_inputs(bench.document, bench.pool.store, items))
    ]
    rates = [
        await bench.rate(f"stage-{stage}", folder, stage) for stage, folder in enumerate(folders)
    ]
    slowest = rates.index(min(rates))
    reached: list[float] = []
    best: list[float] = []
    for turn in range(turns):
        reached.append(await bench.rate(f"many-{turn}", folders[0]))
        best.append(await bench.rate(f"alone-{turn}", folders[slowest], slowest))
    bound = streaming_bound([1 / rate for rate in rates], BATCH)
    return [
        compared(
            f"{label}: pipeline of {ITEMS}, against its slowest stage alone",
            reached,
            best,
            unit="items/s",
            goal=RATIO >= 0.95,
        ),
        Measurement(
            name=f"{label}: the least of streaming against barrier, by the stages alone",
            value=bound,
            unit="",
        ),
    ]


async def measure(
    folder: Path, report: Report, given: Mapping[str, Device], *, relay: bool, loaded: bool
) -> None:
    """Everything, for one set of devices and one way that activations take."""
    label = f"{len(given)} devices, {'relayed' if relay else 'direct'}"
    turns = 2 if report.quick else 7
    devices = [
        {
            "name": name,
            "memory": f"{device.memory_mib}Mi",
            "cpus": str(device.processors),
            "link": {"rate": LINK},
        }
        for name, device in given.items()
    ]
    model = materialise(MODEL, Path(tempfile.gettempdir()) / "shoal-zoo")
    async with running_pool(folder, devices, relay=relay) as pool:
        shapes = {"input_ids": (1, WORDS), "attention_mask": (1, WORDS)}
        document = cut(model, pool.store, CUTS, shapes)
        bench = Bench(
            pool=pool,
            document=document,
            homes=planned_homes(document, pool),
            few=write_items(folder / "few", text_items(BATCH)),
            label="relayed" if relay else "direct",
            loaded=loaded,
        )
        report.note(f"{label}: {placed(bench.homes, given)}")
        if not (relay and report.quick):
            for line in await starts(bench, label, 1 if report.quick else 5):
                report.add(line)
        report.add(await batches(bench, label, turns))
        # With several devices in a stage, none of them is its time.
        if len(given) == STAGES and not report.quick:
            for line in await throughput(bench, label, turns=3):
                report.add(line)


def placed(homes: Sequence[Sequence[str]], given: Mapping[str, Device]) -> str:
    """For a note: which devices, with what share of a processor, serve each stage."""
    stages = [" + ".join(f"{name} ({given[name].processors})" for name in stage) for stage in homes]
    return f"stages on {', '.join(stages)}"


def main() -> None:
    """Run the bench, direct and relayed."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--loaded", action="store_true", help="measure while others use the machine"
    )
    options = parser.parse_args()
    report = Report(shared(options))
    for given in (THREE,) if report.quick else (THREE, FIVE):
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            for relay in (False, True):
                # In its quick form in one folder: what the devices have fetched for the first pool,
                # the second finds there. A cold start needs a folder of its own.
                place = Path(folder) / ("both" if report.quick else f"relay-{relay}")
                place.mkdir(exist_ok=True)
                asyncio.run(measure(place, report, given, relay=relay, loaded=options.loaded))
    report.finish()


if __name__ == "__main__":
    main()
