"""`shoal plan --profile`: what it prints, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from cli.commands.test_commands import shoal

PROFILES = Path(__file__).parents[3] / "bench" / "profiles"
DEVICES = {
    "devices": [
        {"name": "pi", "kind": "raspberry-pi-4"},
        {"name": "edge", "kind": "vm-2core"},
    ],
    "links": [{"between": ["pi", "edge"], "bytes_per_second": 2.5e6, "latency_seconds": 0.02}],
}


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    file = tmp_path / "devices.json"
    file.write_text(json.dumps(DEVICES))
    return file


@pytest.mark.parametrize("objective", ["throughput", "latency", "makespan"])
def test_a_profile_is_planned_and_explained(devices: Path, objective: str) -> None:
    profile = PROFILES / "scission" / "vgg16.json"
    shown = shoal("plan", "--profile", profile, "--devices", devices, "--objective", objective)
    assert shown.returncode == 0, shown.stderr
    assert "no plan is better" in shown.stdout
    assert "even split" in shown.stdout
    assert "edge" in shown.stdout


def test_a_profile_is_planned_for_programs_and_drawn(devices: Path, tmp_path: Path) -> None:
    profile, picture = PROFILES / "scission" / "vgg16.json", tmp_path / "plan.svg"
    given = ("--profile", profile, "--devices", devices, "--objective", "latency")
    shown = shoal("plan", *given, "--output", "json", "--svg", picture)
    assert shown.returncode == 0, shown.stderr
    (planned,) = json.loads(shown.stdout)["plans"]
    plan = planned["plan"]
    assert plan["gap"] == 0
    served = [layer for stage in plan["stages"] for layer in stage["fragments"]]
    assert served == list(range(len(planned["layers"])))
    assert {each["alternative"] for each in plan["rejected"]} >= {"even split", "split by memory"}
    assert ">edge<" in picture.read_text()
    assert "20 ms" in picture.read_text() or len(plan["stages"]) == 1


def test_the_page_on_profiles_shows_a_profile_and_devices_that_are_planned(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "profiles.md").read_text()
    profile, devices = tmp_path / "profile.json", tmp_path / "devices.json"
    shown_files = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for file, text in zip((profile, devices), shown_files, strict=True):
        file.write_text(text)
    shown = shoal("plan", "--profile", profile, "--devices", devices)
    assert shown.returncode == 0, shown.stderr
    assert "conv1 to relu1" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--profile", "vgg16.json"), "--profile needs --devices FILE"),
        (("--profile", "missing.json", "--devices", "devices.json"), "No such file"),
        (("--profile", "devices.json", "--devices", "devices.json"), "'layers' is missing"),
        (("--profile", "x.json", "--devices", "devices.json", "model.onnx"), "not both"),
        (("--objective", "latency", "model.onnx"), "goes with --profile"),
        (("model.onnx", "--devices", "65"), "a number from 1 to 64"),
        (("model.onnx", "--svg", "plan.png"), "pictures are SVG; name a file in .svg"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    devices: Path, arguments: tuple[str, ...], problem: str
) -> None:
    shown = shoal("plan", *arguments, folder=devices.parent)
    assert shown.returncode == 2
    assert problem in " ".join(shown.stderr.replace("│", " ").split())


def test_a_device_whose_speed_is_unknown_is_named(devices: Path) -> None:
    devices.write_text('{"devices": [{"name": "x", "kind": "y"}]}')
    profile = PROFILES / "pipedream" / "vgg16.txt"
    shown = shoal("plan", "--profile", profile, "--devices", devices)
    assert shown.returncode == 2
    assert "was not measured on y" in " ".join(shown.stderr.replace("│", " ").split())


def test_a_model_is_no_profile_of_one(devices: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"\x08\x08\x12\x00\x89")
    refused = shoal("plan", "--profile", model, "--devices", devices)
    assert refused.returncode == 2
    words = " ".join(refused.stderr.replace("│", " ").split())
    assert "is no text, but docs/profiles.md says what is read here" in words
    assert "codec" not in words
