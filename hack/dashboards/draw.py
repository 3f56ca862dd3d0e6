"""Draw the pictures of docs/dashboards.md anew: each dashboard of the chart, after a bad night.

    PYTHONPATH=tests:bench:hack/cluster .venv/bin/python hack/dashboards/draw.py [--again]

A real Prometheus scrapes three devices that embed sentences, while one hangs and is killed and an
item fails, and two operators on a real control plane, of which one is killed (`make cluster-build`;
nodes and coordinator of that one are simulated). Grafana's panel library draws what the panels'
queries give: npm puts it into a cache folder, Chromium shows it. With `--again` nothing runs: the
data of the last time is drawn.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scale_story import NAMESPACE, PATIENCE_SECONDS, Size, job, manifest, shelf, simulating
from simulated_coordinator import Work

import browser
from monitoring import as_prometheus_takes_it
from operator_processes import RunningOperator, operators
from prometheus_server import Server, prometheus_of
from rendered_chart import CHART, ROOT
from shoal_cluster import ControlPlane
from shoal_cluster.ports import lasting_port

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shoal"
PACKAGES = CACHE / "dashboard-pictures"
DATA = ROOT / "out" / "dashboards"
TARGET = ROOT / "docs" / "pictures"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
EXAMPLE = ROOT / "examples" / "embeddings"

SCRAPE_SECONDS = 5
RATE = f"{4 * SCRAPE_SECONDS}s"  # as Grafana chooses $__rate_interval for this scrape interval
ALERT_SECONDS = 20  # in place of minutes
SHOWN_SECONDS = 260
HUNG = "tablet"
HANGS_AFTER_SECONDS = 90
KILLED_AFTER_SECONDS = 140
ITEMS = 5400  # of a job of the simulated cluster: four fifths of what its plan predicts
COPIES = {"night": 2000, "evening": 80, "odd": 10}
WIDTH_PIXELS = 1280
COLOURS = 256

POOL = """\
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: desk}
spec:
  local:
    devices:
    - {name: laptop, memory: 28Mi}
    - {name: tablet, memory: 28Mi}
    - {name: phone, memory: 16Mi}
  budget: {memory: 28Mi}
"""
JOB = """\
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {{name: {name}}}
spec:
  partitionRef: {{name: minilm-l6-3}}
  poolRef: {{name: desk}}
  inputs: {{uri: pvc://{name}/in}}
  outputs: {{uri: pvc://{name}/out}}
"""


def main() -> None:
    """Load, unless there is one, and draw."""
    if "--again" not in sys.argv[1:]:
        shutil.rmtree(DATA, ignore_errors=True)
        DATA.mkdir(parents=True)
        ended = asyncio.run(night())
        (DATA / "ended").write_text(str(ended))
    page = bundled()
    asyncio.run(draw(page, float((DATA / "ended").read_text())))


# ---- the load ------------------------------------------------------------------------------------


async def night() -> float:
    """Everything that happens; when it ended, in seconds since 1970."""
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True)
    devices = f"127.0.0.1:{lasting_port()}"
    async with cluster() as (plane, leading, waiting):
        targets = {devices: {"namespace": "desks"}}
        for operator in (leading, waiting):
            assert operator.url is not None
            targets[operator.url] = {"namespace": "shoal-system", "pod": operator.name}
        often = {"scrape_seconds": SCRAPE_SECONDS, "alert_seconds": ALERT_SECONDS}
        with prometheus_of(DATA, targets, **often), running(devices) as run:
            begun = time.monotonic()
            for second in range(SHOWN_SECONDS):
                await asyncio.to_thread(happens, second, plane, leading)
                assert run.poll() is None, "the jobs ended too early"
                await asyncio.sleep(begun + second + 1 - time.monotonic())
            return time.time()


def happens(second: int, plane: ControlPlane, leading: RunningOperator) -> None:
    """What befalls devices and cluster in that second."""
    if second == HANGS_AFTER_SECONDS:
        os.kill(agent(HUNG), signal.SIGSTOP)
    if second == KILLED_AFTER_SECONDS:
        os.kill(agent(HUNG), signal.SIGKILL)
        leading.kill()
    if second == 0:
        plane.access.apply(*shelf(), without_partition(), namespace=NAMESPACE)
    if second % 10 == 5:
        jobs = [job(f"job-{second:03}-{number}") for number in range(2 + second % 4)]
        plane.access.apply(*jobs, namespace=NAMESPACE)


def without_partition() -> dict[str, object]:
    """A job that waits for ever."""
    return manifest(
        "InferenceJob",
        "without-partition",
        partitionRef={"name": "forgotten"},
        poolRef={"name": "shelf"},
        inputs={"uri": "s3://lines/in"},
        outputs={"uri": "s3://lines/out"},
    )


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[ControlPlane, RunningOperator, RunningOperator]]:
    """A control plane with two operators: the one that leads, and the one that waits."""
    work = Work(items=ITEMS, seconds=15.0, at_once=6)
    size = Size(jobs=0, devices=8, work=work, idle_seconds=0)
    folder = DATA / "cluster"
    folder.mkdir()
    with ControlPlane(node_grace_seconds=PATIENCE_SECONDS) as plane:
        async with simulating(plane, size, folder) as simulated:
            with operators(folder, simulated.account) as started:
                option = ("--coordinator", f"{NAMESPACE}/shelf={simulated.target}")
                leading = started.start(*option)
                await asyncio.to_thread(leading.wait_until_leading)
                waiting = started.start(*option)
                while waiting.url is None:
                    await asyncio.sleep(0.2)
                yield plane, leading, waiting


@contextmanager
def running(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`shoal run` at work: a long job, one that ends well, and one of which an item fails."""
    folder = DATA / "run"
    for name, copies in COPIES.items():
        inputs = folder / name / "in"
        inputs.mkdir(parents=True)
        for path in (EXAMPLE / "sentences" / "in").iterdir():
            for number in range(copies):
                os.link(path, inputs / f"{number:03}-{path.name}")
    np.savez(folder / "odd" / "in" / "odd.npz", input_ids=np.zeros((1, 8, 2), np.int64))
    parts = [(EXAMPLE / f"{part}.yaml").read_text() for part in ("model", "partition")]
    jobs = "".join(JOB.format(name=name) for name in COPIES)
    (folder / "run.yaml").write_text("---\n".join([*parts, POOL]) + jobs)
    command: list[str | Path] = [sys.executable, "-m", "shoal_cli", "run", folder / "run.yaml"]
    command += ["--volume", f"models={EXAMPLE / 'models'}", "--work", folder / "work"]
    command += ["--metrics-address", address]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def agent(device: str) -> int:
    """The process of a device's agent."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split("\0")
        if device in words and any(word.startswith(str(DATA)) for word in words):
            return int(path.parent.name)
    raise SystemExit(f"no agent {device} runs")


# ---- the pictures --------------------------------------------------------------------------------


def bundled() -> Path:
    """The page's script, in one file with Grafana's packages, and a folder for pages beside it."""
    PACKAGES.mkdir(parents=True, exist_ok=True)
    asked, had = HERE / "package.json", PACKAGES / "package.json"
    if not had.exists() or had.read_bytes() != asked.read_bytes():
        shutil.copy(asked, PACKAGES)
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")
        try:
            subprocess.run(["npm", "install", "--loglevel=error", *quiet], cwd=PACKAGES, check=True)
        except subprocess.CalledProcessError:
            had.unlink()
            raise
    fonts = PACKAGES / "public" / "fonts" / "inter"  # where the library looks for them
    fonts.mkdir(parents=True, exist_ok=True)
    for name, weight in {"Regular": 400, "Medium": 500}.items():
        font = f"node_modules/@fontsource/inter/files/inter-latin-{weight}-normal.woff2"
        shutil.copy(PACKAGES / font, fonts / f"Inter-{name}.woff2")
    subprocess.run(
        [
            *(PACKAGES / "node_modules/.bin/esbuild", HERE / "page.jsx", "--bundle", "--minify"),
            *("--format=esm", "--jsx=automatic", "--log-level=error", "--loader:.ttf=empty"),
            f"--outfile={PACKAGES / 'page.js'}",
        ],
        env=os.environ | {"NODE_PATH": str(PACKAGES / "node_modules")},
        check=True,
    )
    return PACKAGES / "page.js"


async def draw(script: Path, ended: float) -> None:
    """A picture of each dashboard, in few colours."""
    with prometheus_of(DATA, {}) as server:
        boards = {path.stem: json.loads(path.read_text()) for path in BOARDS}
        asked = {name: asked_of(server, board, ended) for name, board in boards.items()}
    async with browser.browsing() as opened:
        for name, data in asked.items():
            page, picture = script.with_name(f"{name}.html"), TARGET / f"dashboard-{name}.png"
            page.write_text(html(script, data))
            await opened.show(page, width=WIDTH_PIXELS)
            await opened.picture(picture)
            assert not opened.complaints, opened.complaints
            with Image.open(picture) as drawn:
                drawn.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def html(script: Path, data: dict[str, Any]) -> str:
    code = script.read_text().replace("</script", "<\\/script")
    style = script.with_suffix(".css").read_text()
    given = json.dumps(data).replace("</", "<\\/")
    return (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body>"
        f"<script>window.dashboard = {given}</script><script type=module>{code}</script>"
    )


def asked_of(server: Server, board: dict[str, Any], ended: float) -> dict[str, Any]:
    """A dashboard with the answers of its queries."""
    begun = ended - SHOWN_SECONDS
    answers = {
        panel["id"]: [
            series
            for target in panel["targets"]
            for series in series_of(server, target, begun, ended)
        ]
        for panel in board["panels"]
    }
    chosen = {each["name"]: "All" for each in board["templating"]["list"]}
    chosen["datasource"] = "Prometheus"
    shown = {"from": begun * 1000, "to": ended * 1000}
    return {"board": board, "answers": answers, "chosen": chosen} | shown


def series_of(
    server: Server, target: dict[str, Any], begun: float, ended: float
) -> Iterator[dict[str, Any]]:
    """What Grafana's data source makes of the answer; where there is no point, there is a gap."""
    query = as_prometheus_takes_it(target["expr"], RATE, f"{SHOWN_SECONDS}s")
    if target["instant"]:
        times = [ended]
        found = server.ask("query", query=query, time=str(ended))["result"]
    else:
        step, count = SCRAPE_SECONDS, SHOWN_SECONDS // SCRAPE_SECONDS
        times = [ended - step * (count - number) for number in range(count + 1)]
        shown = {"start": str(times[0]), "end": str(ended), "step": str(step)}
        found = server.ask("query_range", query=query, **shown)["result"]
    for each in found:
        points = each["values"] if "values" in each else [each["value"]]
        known = {round(at): float(value) for at, value in points}
        values = [known.get(round(at)) for at in times]
        yield {
            "legend": legend(target["legendFormat"], each["metric"]),
            "labels": each["metric"],
            "times": [at * 1000 for at in times],
            "values": [None if value is None or np.isnan(value) else value for value in values],
        }


def legend(asked: str, labels: dict[str, str]) -> str:
    """`{{label}}` is that label's value."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), asked)


if __name__ == "__main__":
    main()
