"""What an operator sees of an agent: command line, metrics, health, logs, and its imports."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agent.conftest import AgentProcess, Joined
from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ScriptedCoordinator
from agent.test_memory_of_fragments import run
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.readings import gauges
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.settings import parse
from shoal_agent.telemetry.machine import Machine
from shoal_protocol import PROTOCOL
from shoal_protocol.units import Bytes
from shoal_protocol.v1 import session_pb2 as pb
from small_disk import small_disk

Join = Callable[..., Awaitable[Joined]]
pytestmark = pytest.mark.forked


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--budget", "24Mi"], "the following arguments are required: --coordinator"),
        (["--coordinator", "unix:/c", "--budget", "5X"], "'5X' is not a quantity such as 64Mi"),
        (["--coordinator", "unix:/c", "--budget", "0"], "'0' is less than 1 MiB (--help"),
        (["--coordinator", "unix:/c", "--budget", "64"], "1 MiB (did you mean 64Mi?)"),
        (["--coordinator", "unix:/c", "--cache-size", "0"], "'0' leaves nothing to work with"),
        (["--coordinator", "unix:/c", "--budget", "1Mi", "--name", "Pi_4"], "is no DNS label"),
        (["--coordinator", "unix:/c", "--budget", "1Mi", "--threads", "0"], "no number from 1 on"),
        (["--coordinator", "unix:/c", "--budget", "1Mi", "--tls-ca", "x"], "go together"),
        (["--coordinator", "unix:/c", "--budget", "1Mi", "--advertise", "x"], "needs --listen"),
        (["--coordinator", "unix:/c", "--budget", "1Mi", "--metrics-address", "x"], "HOST:PORT"),
    ],
)
def test_a_bad_command_line_gives_one_clear_line_and_status_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(arguments)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal agent: ")
    assert text in line


def test_an_identity_is_kept_in_a_folder_of_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    enrol = [f"--{name}=x" for name in ("enrol", "enrol-ca", "enrol-token")]
    for runtime, folder in (
        ("/run/user/7", "/run/user/7/shoal-identity"),
        ("", "/users/me/.local/state/shoal-identity"),
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("HOME", "/users/me")
        settings = parse(["--coordinator", "unix:/c", "--budget", "1Mi", *enrol])
        assert settings.enrolment is not None
        assert settings.enrolment.folder == Path(folder)


def test_a_user_without_a_home_is_asked_for_the_folder_of_the_identity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enrol = [f"--{name}=x" for name in ("enrol", "enrol-ca", "enrol-token")]
    for name in ("XDG_RUNTIME_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # whom no machine knows
    with pytest.raises(SystemExit) as ending:
        parse(["--coordinator", "unix:/c", "--budget", "1Mi", *enrol])
    assert ending.value.code == 2
    assert "give --identity-folder DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--coordinator", "nowhere"], "neither unix:/path nor HOST:PORT"),
        (["--coordinator", "10.0.0.1:7400"], "needs --tls-ca"),
        (["--coordinator", "10.0.0.1:7400", "--insecure"], "--insecure is for loopback only"),
        (["--coordinator", "unix:/c", "--listen", "0.0.0.0:0"], "needs --tls-ca"),
        (["--coordinator", "unix:/c", "--cache", "/proc/no"], "/proc/no"),
    ],
)
async def test_an_address_or_folder_that_cannot_be_used_gives_one_line_and_status_2(
    start_agent: Callable[..., Awaitable[AgentProcess]], arguments: list[str], text: str
) -> None:
    agent = await start_agent("pi-4", "--relayed", *arguments)
    assert await agent.ended() == 2
    (line,) = [line for line in agent.errors.read_text().splitlines() if " INFO " not in line]
    assert text in line


def test_the_help_names_every_option() -> None:
    command = [sys.executable, "-m", "shoal_agent", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for option in ("--budget", "--listen", "--cache-size", "--exit-with-parent", "SIGTERM"):
        assert option in shown


def test_the_agent_imports_nothing_of_the_control_plane() -> None:
    program = (
        "import sys, shoal_agent.command, shoal_agent.agent\n"
        "import shoal_agent.telemetry.metrics\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"onnx", "kopf", "kubernetes", "typer", "rich", "yaml", "psutil", "shoal_operator"}
    assert set(shown.split()) & heavy == set()


@pytest.mark.parametrize(
    "module",
    ["shoal_agent.runtime.onnx_runtime", "shoal_agent.__main__", "shoal_cli.local.whole_model"],
)
def test_the_runtime_reports_to_nobody(module: str) -> None:
    program = (
        "import os, sys, importlib\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'onnxruntime':\n"
        "            print(os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        f"importlib.import_module('{module}')\n"
        "import shoal_agent.agent\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ORT_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert shown.stdout == "1\n"


async def test_metrics_count_what_was_done_and_readiness_follows_the_session(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    model = dense_model([64, 512, 64])
    fragment = write_fragment(coordinator.store, model, 8 << 20, InBlocks(2))
    joined = await join("pi-4", "--metrics-address", "127.0.0.1:0")
    (url,) = re.findall(r"metrics at (http://\S+)/metrics", joined.agent.errors.read_text())

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url + path, timeout=60) as answer:  # noqa: S310 - http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    await joined.device.load(fragment.digest, fragment.resident_bytes)
    await run(joined.device, fragment.digest, 64)
    _, text = await asyncio.to_thread(get, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert values['shoal_agent_tasks_total{outcome="executed"}'] == "1.0"
    assert values['shoal_agent_loads_total{outcome="loaded"}'] == "1.0"
    assert values["shoal_agent_task_compute_seconds_count"] == "1.0"
    assert values["shoal_agent_resident_fragments"] == "1.0"
    assert values["shoal_agent_session_connected"] == "1.0"
    assert float(values["shoal_agent_budget_bytes"]) == 64 << 20
    assert float(values['shoal_agent_fetched_bytes_total{source="coordinator"}']) > 0
    label = f'{{fragment="{short(fragment.digest)}"}}'
    shares = {"granted": 8 << 20, "wanted": 8 << 20, "least": fragment.least_bytes, "lent": 0}
    for name, size in shares.items():
        assert float(values[f"shoal_agent_fragment_{name}_bytes{label}"]) == size
    assert values["shoal_agent_memory_estimate_ratio_count"] == "1.0"
    assert float(values["shoal_agent_disk_free_bytes"]) > 0
    assert float(values["shoal_agent_cache_limit_bytes"]) > 0
    assert float(values["process_resident_memory_bytes"]) > 0
    assert "shoal_agent_certificate_expiration_timestamp_seconds" not in values
    assert all(name.startswith(("shoal_agent_", "process_")) for name in values)
    healthy = [await asyncio.to_thread(get, path) for path in ("/healthz", "/readyz")]
    assert healthy == 2 * [(200, "ok\n")]
    await coordinator.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (ready := await asyncio.to_thread(get, "/readyz"))[0] == 200:
            pass
    healthy = [await asyncio.to_thread(get, "/healthz"), (ready[0], ready[1][:12])]
    assert healthy == [(200, "ok\n"), (503, "no session: ")]
    await asyncio.to_thread(refuse_connections, joined.agent.errors.with_name("c.sock"), 8)
    assert max(Counter(re.findall("no session: .*", joined.agent.errors.read_text())).values()) == 1


def refuse_connections(path: Path, number: int) -> None:
    """Accept so many at a Unix socket, and close each at once."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.settimeout(PATIENCE_SECONDS)
        listening.bind(str(path))
        listening.listen()
        for _ in range(number):
            listening.accept()[0].close()


def test_before_the_floor_is_known_nothing_counts_as_use(tmp_path: Path) -> None:
    """Else all that is resident would be shown as a peak, far above the budget."""
    options = ["--coordinator", "unix:/c", "--budget", "8Mi", "--cache", str(tmp_path)]
    meter, cache = MemoryMeter(), FragmentCache(tmp_path, 1 << 20)
    ledger = Ledger(budget=Bytes(8 << 20), single=False)

    def used() -> set[float | None]:
        found = gauges(parse(options), meter, cache, ledger, None)
        return {found[f"{name}_bytes"] for name in ("floor", "used", "peak")}

    assert used() == {None}
    meter.settle()
    assert None not in used()


async def test_telemetry_leaves_out_what_the_machine_does_not_have(join: Join) -> None:
    joined = await join("pi-4", "--telemetry-interval", "0.05")
    first, second = [await joined.device.telemetry.get() for _ in range(2)]
    assert not first.HasField("cpu_fraction")
    assert 0 <= second.cpu_fraction <= 1
    assert second.memory_available_bytes > 0
    readings = Machine().read()
    assert second.HasField("battery_fraction") == readings.HasField("battery_fraction")
    assert second.HasField("temperature_celsius") == readings.HasField("temperature_celsius")


async def test_every_session_knows_its_round_trip_also_where_nothing_is_sent(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    coordinator.pong.clear()
    joined = await join("pi-4", "--telemetry-interval", "0.05")
    for _ in range(3):
        assert not (await joined.device.telemetry.get()).HasField("round_trip_seconds")
    coordinator.pong.set()
    telemetry = pb.Telemetry()
    while not telemetry.HasField("round_trip_seconds"):
        telemetry = await asyncio.wait_for(joined.device.telemetry.get(), PATIENCE_SECONDS)
    first = telemetry.round_trip_seconds
    assert first > 0
    while telemetry.round_trip_seconds == first:  # it is measured again and again
        telemetry = await asyncio.wait_for(joined.device.telemetry.get(), PATIENCE_SECONDS)


async def test_hello_says_what_the_device_is(join: Join) -> None:
    hello = (await join("pi-4", "--cache-size", "1Gi")).device.hello
    assert (hello.device, hello.protocol, hello.residency) == ("pi-4", PROTOCOL, pb.ADAPTIVE)
    assert hello.budget_bytes == 64 << 20
    assert hello.capabilities.processors >= 1
    assert hello.capabilities.memory_bytes > 1 << 28
    assert hello.capabilities.runtime.startswith("onnxruntime ")
    assert hello.cache_bytes == 3 << 28


async def test_logs_can_be_json_and_tell_the_story(
    coordinator: ScriptedCoordinator, join: Join
) -> None:
    fragment = write_fragment(coordinator.store, dense_model([64, 64]))
    joined = await join("pi-4", "--log-format", "json")
    await joined.device.load(fragment.digest, fragment.resident_bytes)
    lines = [json.loads(line) for line in joined.agent.errors.read_text().splitlines()]
    story = " | ".join(line["message"] for line in lines)
    assert re.search(r"floor [\d.]+ MiB.*session 1 with .*loaded [0-9a-f]{12} in ", story), story


async def test_an_agent_ends_with_the_process_that_started_it(folder: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "agent = subprocess.Popen([sys.executable, '-m', 'shoal_agent', '--budget', '8Mi',\n"
        f"    '--coordinator', 'unix:{folder}/none', '--cache', '{folder}/cache',\n"
        "    '--exit-with-parent', '--log-level', 'info', '--listen', 'unix:{0}/a'], stderr=-1)\n"
        "agent.stderr.readline()\n"
        "print(agent.pid, flush=True)\n"
        "time.sleep(600)\n"
    ).replace("{0}", str(folder))
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    agent = int(await asyncio.wait_for(parent.stdout.readline(), PATIENCE_SECONDS))
    status = Path(f"/proc/{agent}/status")
    assert "shoal" in Path(f"/proc/{agent}/cmdline").read_text()
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while status.exists() and "State:\tZ" not in status.read_text():
            await asyncio.sleep(0.01)


def test_a_budget_beyond_the_machines_memory_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = ("--coordinator", "unix:/s", "--name", "a", "--budget")
    assert parse([*here, "8Mi"]).budget == 8 << 20
    assert capsys.readouterr().err == ""
    assert parse([*here, "900Ti"]).budget == 900 << 40
    text = "shoal agent: warning: a budget of 900 TiB is more than this machine's memory, "
    assert capsys.readouterr().err.startswith(text)


def test_a_cache_that_is_memory_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--coordinator", "unix:/s", "--name", "a", "--budget", "8Mi", "--cache")
    assert parse([*here, str(tmp_path / "cache")]).cache == tmp_path / "cache"
    assert capsys.readouterr().err == ""
    with small_disk(tmp_path / "memory", "64k"):
        parse([*here, str(tmp_path / "memory" / "cache")])
    text = f"shoal agent: warning: the cache {tmp_path}/memory/cache is on a tmpfs: "
    assert capsys.readouterr().err.startswith(text)


def test_a_cache_in_which_nothing_could_be_opened_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = ("--coordinator", "unix:/s", "--name", "a", "--budget", "8Mi", "--cache")
    assert parse([*here, "cache/möwe"]).cache == Path("cache/möwe")
    with pytest.raises(SystemExit) as ended:
        parse([*here, os.fsdecode(b"cache/m\xf6we")])
    assert ended.value.code == 2
    said = r"--cache 'cache/m\udcf6we': the path of the cache must be UTF-8"
    assert said in capsys.readouterr().err
