"""Every seed of the fuzzer, and every input that it found a fault with, does no harm."""

import re
import resource
from pathlib import Path
from random import Random

import pytest

from fuzz.message_mutation import mutated
from fuzz.targets import FOUND, GROWTH_BYTES, TARGETS, Target, check_harmless, found

pytestmark = [pytest.mark.timeout(60)]

MAKEFILE = Path(__file__).parents[2] / "Makefile"
INPUTS = [(name, path) for name in TARGETS for path in found(name)]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        check_harmless(TARGETS[name], seed)


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=lambda value: getattr(value, "name", value))
def test_what_was_found_once_does_no_harm(name: str, path: Path) -> None:
    check_harmless(TARGETS[name], path.read_bytes())


def test_make_fuzzes_every_target() -> None:
    (names,) = re.findall(r"^FUZZED \?= (.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert names.split() == list(TARGETS)


def test_inputs_that_were_found_belong_to_a_target() -> None:
    assert {folder.name for folder in FOUND.iterdir()} <= TARGETS.keys()


def test_exceptions_and_memory_are_faults() -> None:
    def fail(_: bytes) -> None:
        raise KeyError("a foreign error")

    with pytest.raises(KeyError):
        check_harmless(Target(run=fail, seeds=list), b"")
    # More than all that the process ever held: an agent of another test may just give some back.
    size = GROWTH_BYTES + (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    taken: list[bytes] = []
    with pytest.raises(AssertionError, match="made the process grow"):
        check_harmless(Target(run=lambda _: taken.append(b"x" * size), seeds=list), b"")


@pytest.mark.parametrize("name", [name for name in TARGETS if TARGETS[name].message is not None])
def test_a_mutated_message_is_another_message(name: str) -> None:
    kind = TARGETS[name].message
    assert kind is not None
    seed = next(iter(TARGETS[name].seeds()))

    def shorter(value: bytes) -> bytes:
        return value[:-1]

    made = {mutated(seed, kind, Random(number), shorter) for number in range(100)}  # noqa: S311
    assert len(made) > 50
    for each in made:
        kind.FromString(each)
