"""The lock files pin what pyproject.toml asks for, and name no address."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements"
IMAGES = ("operator", "coordinator", "worker", "agent")


def asked(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
    found = []
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            found += asked(*requirement.extras)
        else:
            found.append(requirement)
    return found


def group(name: str) -> list[Requirement]:
    """What a group of pyproject.toml asks for, with the groups that it includes."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    found = []
    for entry in groups[name]:
        match entry:
            case {"include-group": included}:
                found += group(included)
            case text:
                found.append(Requirement(text))
    return found


def all_extras() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def entries(lock: str) -> list[str]:
    """A lock's entries: requirement and hashes on one line."""
    text = (LOCKS / lock).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pins(lock: str) -> dict[str, str]:
    """The version of each package that this lock gives to this interpreter."""
    found: dict[str, str] = {}
    for entry in entries(lock):
        requirement = Requirement(entry.split("--hash", maxsplit=1)[0].strip())
        if requirement.marker is None or requirement.marker.evaluate():
            (pin,) = requirement.specifier
            assert pin.operator == "==", entry
            found[canonicalize_name(requirement.name)] = pin.version
    return found


def missing(requirements: list[Requirement], locked: dict[str, str]) -> list[str]:
    """The requirements that a lock does not fulfil."""
    return [
        str(requirement)
        for requirement in requirements
        if (requirement.marker is None or requirement.marker.evaluate())
        and not requirement.specifier.contains(
            locked.get(canonicalize_name(requirement.name), "0.dev0"), prereleases=False
        )
    ]


def read_in(name: str) -> list[Requirement]:
    lines = (LOCKS / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_run_lock_pins_what_a_run_asks_for() -> None:
    wanted = [*asked("examples"), *group("operator"), *read_in("build.in")]
    assert not missing(wanted, pins("run.txt")), "make lock"


def test_what_is_installed_is_what_the_processes_of_one_machine_ask_for() -> None:
    assert set(asked()) == {*group("worker"), *group("coordinator"), *group("agent")}


def test_the_dev_lock_pins_everything_that_is_asked_for() -> None:
    wanted = [*asked(*all_extras()), *group("operator"), *read_in("build.in")]
    assert not missing(wanted, pins("dev.txt")), "make lock"


def test_the_model_lock_pins_what_it_is_made_from() -> None:
    assert not missing(read_in("models.in"), pins("models.txt")), "make lock"
    assert len(read_in("models.in")) == len(entries("models.txt"))


@pytest.mark.parametrize("image", IMAGES)
def test_the_lock_of_an_image_pins_what_its_process_asks_for(image: str) -> None:
    assert not missing(group(image), pins(f"{image}.txt")), "make lock"


def test_the_lock_for_building_pins_what_builds_the_package() -> None:
    assert not missing(read_in("build.in"), pins("build.txt")), "make lock"


def test_the_lock_for_fuzzing_pins_the_fuzzer() -> None:
    assert not missing(read_in("fuzz.in"), pins("fuzz.txt")), "make lock"


def test_the_lock_for_benches_pins_what_they_compare_with() -> None:
    assert not missing(read_in("bench.in"), pins("bench.txt")), "make lock"
    assert len(read_in("bench.in")) == len(entries("bench.txt"))


def test_the_agents_image_stays_light() -> None:
    heavy = {"onnx", "kopf", "aiohttp", "kubernetes", "typer", "rich", "pyyaml", "hatchling"}
    assert not heavy & pins("agent.txt").keys()


def test_run_and_dev_agree_so_that_one_environment_serves_both() -> None:
    dev = pins("dev.txt")
    assert {name: dev.get(name) for name in pins("run.txt")} == pins("run.txt")


@pytest.mark.parametrize(
    "lock",
    [
        *("run.txt", "dev.txt", "models.txt", "operator.txt"),
        *("agent.txt", "build.txt", "fuzz.txt", "bench.txt"),
    ],
)
def test_every_pin_has_a_hash_and_no_lock_has_an_address(lock: str) -> None:
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries(lock))
    text = (LOCKS / lock).read_text()
    assert not re.findall(r"://|--(?:extra-)?index-url|--find-links|^-i ", text, re.MULTILINE)


def test_requirements_outside_the_type_stubs_have_bounds() -> None:
    free = [
        str(each)
        for each in asked(*all_extras())
        if not each.name.startswith("types-") and len(each.specifier) < 2
    ]
    assert not free, "a lower bound that was tried, and an upper one"


@pytest.mark.parametrize("lock", ["agent.txt", "coordinator.txt", "worker.txt", "run.txt"])
def test_every_pin_has_a_wheel_for_an_arm_of_64_bits(lock: str, tmp_path: Path) -> None:
    """Of one of the hashes in the lock, for glibc 2.28 and later: nothing is built on a device."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run"]
    command += ["--python-platform", "aarch64-manylinux_2_28", "--only-binary", ":all:"]
    command += ["--require-hashes", "--no-deps", "--requirement", str(LOCKS / lock)]
    command += ["--python-version", "3.11", "--target", str(tmp_path)]
    resolved = subprocess.run(command, check=False, capture_output=True, text=True)
    if "Failed to fetch" in resolved.stderr or "error sending request" in resolved.stderr:
        pytest.skip("no package index can be reached")
    assert resolved.returncode == 0, resolved.stderr
    assert f"Would install {len(pins(lock))} packages" in resolved.stderr
