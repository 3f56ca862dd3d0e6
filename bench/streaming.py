"""DistilBERT in three stages over unequal devices: streaming, pipelining, and starting warm.

Each device has memory for one stage only. Their processor shares and memory limits are held by the
kernel (cgroups), so one machine gives devices as unequal as phones are; their links are paced. The
reference is CROWDio, "Main Results": N=5 inputs, S=3 stages, streaming 34 % shorter than barrier, a
start from disk 6 s against 48 s cold.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measurement import RATIO, Measurement, Report, compared, parse_arguments
from pool import Pool, cut, running_pool, write_items
from zoo.materialise import materialise

from shoal_operator.api.choices import Objective
from shoal_operator.api.partition import PartitionDocument
from shoal_operator.planning.costs import ASSUMED_FLOPS_PER_CPU, PoolDevice
from shoal_operator.planning.outcome import Plan
from shoal_operator.planning.placement import plan
from shoal_protocol.units import Bytes, Nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb

MODEL = "distilbert_sst2"
STAGES, BATCH, WORDS = 3, 5, 128
# Together below two processors, so that every device gets its share.
THREE = {"a": 0.55, "b": 0.4, "c": 0.3}
FIVE = {"a": 0.45, "b": 0.35, "c": 0.3, "d": 0.25, "e": 0.2}
MEMORY_MIB = 160  # for one stage of about 90 MiB of weights, not for two
LINK = "100M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A pool with the model cut into its store, and items to run."""

    pool: Pool
    document: PartitionDocument
    homes: tuple[tuple[str, ...], ...]
    few: Path
    many: Path

    async def run(self, name: str, inputs: Path, mode: "pb.Mode" = pb.STREAMING) -> pb.JobStatus:
        """One job; every item must succeed."""
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as outputs:
            status = await self.pool.run(
                name, self.document, inputs, Path(outputs) / "out", homes=self.homes, mode=mode
            )
        assert status.state == pb.JobStatus.COMPLETE, status
        return status


def planned_homes(
    document: PartitionDocument, shares: Mapping[str, float]
) -> tuple[tuple[str, ...], ...]:
    """Where the product's own plan puts the stages."""
    devices = [
        PoolDevice(
            name=name,
            budget_bytes=Bytes(MEMORY_MIB << 20),
            flops_per_second=int(ASSUMED_FLOPS_PER_CPU * share),
            link_bytes_per_second=None,
            latency_nanoseconds=Nanoseconds(0),
            single=False,
        )
        for name, share in shares.items()
    ]
    found = plan(document, devices, Objective.THROUGHPUT)
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


async def starts(bench: Bench, label: str) -> list[Measurement]:
    """Time from submitting one item to its result: cold, with fragments on disk, and resident."""
    one = write_items(bench.few.parent / "one", text_items(1))

    async def once(name: str) -> float:
        started = time.perf_counter()
        await bench.run(name, one)
        return time.perf_counter() - started

    cold = await once("cold")
    cached, resident = [], []
    for turn in range(3):
        for device in bench.pool.device_names:
            bench.pool.kill(device)
        await asyncio.sleep(0.3)
        await bench.pool.ready()
        cached.append(await once(f"cached-{turn}"))
        resident.append(await once(f"resident-{turn}"))
    peers = [cold] * len(cached)
    return [
        compared(
            f"{label}: start from disk (tier 2), against cold",
            cached,
            peers,
            unit="s",
            goal=RATIO <= 6 / 48,
        ),
        compared(
            f"{label}: start resident (tier 1), against cold",
            resident,
            peers,
            unit="s",
            goal=RATIO <= 6 / 48,
        ),
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


async def throughput(bench: Bench, label: str, items: int, turns: int) -> Measurement:
    """How near the pipeline comes to its slowest stage.

    The best that a pipeline can do: the first item passes every stage, then one item ends each time
    the slowest stage has computed one. What is given is that time over the time that it took.
    """
    reached, best = [], []
    for turn in range(turns):
        status = await bench.run(f"many-{turn}", bench.many)
        times = [stage.compute_seconds for stage in status.stages]
        ideal = sum(times) + (items - 1) * max(times)
        reached.append(items / status.seconds)
        best.append(items / ideal)
    return compared(
        f"{label}: pipeline of {items}, against its slowest stage alone",
        reached,
        best,
        unit="items/s",
        goal=RATIO >= 0.95,
    )


async def measure(
    folder: Path, report: Report, shares: Mapping[str, float], *, relay: bool
) -> None:
    """Everything, for one set of devices and one way that activations take."""
    label = f"{len(shares)} devices, {'relayed' if relay else 'direct'}"
    items, turns = (25, 3) if report.quick else (150, 7)
    devices = [
        {"name": n, "memory": f"{MEMORY_MIB}Mi", "cpus": str(share), "link": {"rate": LINK}}
        for n, share in shares.items()
    ]
    model = materialise(MODEL, Path(tempfile.gettempdir()) / "shoal-zoo")
    async with running_pool(folder, devices, relay=relay) as pool:
        shapes = {"input_ids": (1, WORDS), "attention_mask": (1, WORDS)}
        document = cut(model, pool.store, STAGES, shapes)
        bench = Bench(
            pool=pool,
            document=document,
            homes=planned_homes(document, shares),
            few=write_items(folder / "few", text_items(BATCH)),
            many=write_items(folder / "many", text_items(items)),
        )
        report.note(f"{label}: {placed(bench.homes, shares)}")
        if not relay:
            for line in await starts(bench, label):
                report.add(line)
        report.add(await batches(bench, label, turns))
        report.add(await throughput(bench, label, items, 1 if report.quick else 3))


def placed(homes: Sequence[Sequence[str]], shares: Mapping[str, float]) -> str:
    """For a note: which devices, with what share of a processor, serve each stage."""
    stages = [" + ".join(f"{name} ({shares[name]})" for name in stage) for stage in homes]
    return f"stages on {', '.join(stages)}"


def main() -> None:
    """Run the bench, direct and relayed."""
    report = Report(parse_arguments(__doc__))
    for shares in (THREE,) if report.quick else (THREE, FIVE):
        for relay in (False, True):
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
                asyncio.run(measure(Path(folder), report, shares, relay=relay))
    report.finish()


if __name__ == "__main__":
    main()
