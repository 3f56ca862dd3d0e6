"""A trial that the kernel has ended an agent in does not end the next one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.in_process import MIB
from shoal_agent.runtime import trial_marks
from shoal_agent.runtime.trial_marks import MarkedTrial, TrialMarks

PARENT = 17
A = MarkedTrial("sha256:a", as_cut=False, granted_bytes=24 * MIB, budget_bytes=64 * MIB)
B = A._replace(digest="sha256:b")
PROBE = Path(__file__).with_name("ended_trial_probe.py")
Marks = Callable[[Path], TrialMarks]


def next_process(path: Path) -> TrialMarks:
    return TrialMarks(path, PARENT)


def end_in_a_trial(
    path: Path, trial: MarkedTrial, marks: Marks = next_process, *, as_work: bool = False
) -> None:
    """A process that is ended so."""
    child = os.fork()
    if not child:
        with marks(path).running(trial) as goes_on:
            if as_work:
                goes_on()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_process_after_the_one_that_was_ended_knows_of_it(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    assert not next_process(path).ended_its_process(A)
    end_in_a_trial(path, A)
    marks = next_process(path)
    assert marks.ended_its_process(A)
    assert not marks.ended_its_process(B)
    with marks.running(B):
        pass
    assert marks.ended_its_process(A), "it would be tried again"
    assert not next_process(path).ended_its_process(A)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "ended"),
    [
        (A._replace(granted_bytes=24 * MIB - 300_000, budget_bytes=64 * MIB + 300_000), True),
        (A._replace(granted_bytes=25 * MIB, budget_bytes=32 * MIB), True),
        (A._replace(granted_bytes=20 * MIB), False),
        (A._replace(budget_bytes=72 * MIB), False),
        (A._replace(as_cut=True), False),
    ],
)
def test_a_trial_is_the_same_in_a_process_that_measures_a_little_otherwise(
    tmp_path: Path, other: MarkedTrial, *, ended: bool
) -> None:
    """What is granted follows from what trials took, and in a container the budget from the floor:
    no two processes have the same."""
    end_in_a_trial(tmp_path / "trial.json", A)
    assert next_process(tmp_path / "trial.json").ended_its_process(other) is ended


def test_a_process_knows_what_ended_the_ones_before_it_one_after_the_other(tmp_path: Path) -> None:
    """As a fragment's prepared form, and then what it was cut as."""
    path = tmp_path / "trial.json"
    end_in_a_trial(path, A)
    end_in_a_trial(path, B)
    marks = next_process(path)
    assert marks.ended_its_process(A)
    assert marks.ended_its_process(B)
    assert not next_process(path).ended_its_process(A)


def test_what_has_ended_a_process_as_work_runs_may_be_tried_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    end_in_a_trial(path, A, as_work=True)
    marks = next_process(path)
    assert not marks.ended_its_process(A)
    assert marks.ended_its_process(A._replace(as_work=True))


def test_who_was_ended_together_with_its_parent_was_ended_by_that(tmp_path: Path) -> None:
    """As the agents of `shoal run`, when that is killed and run again."""
    path = tmp_path / "trial.json"
    end_in_a_trial(path, A, partial(TrialMarks, parent=PARENT + 1))
    assert not next_process(path).ended_its_process(A)


def test_who_was_ended_before_the_machine_began_again_was_switched_off(tmp_path: Path) -> None:
    """As the agent of a board whose power fails. A service, or a container, has the same parent."""
    path, boot = tmp_path / "trial.json", tmp_path / "boot_id"
    boot.write_text("one\n")
    end_in_a_trial(path, A, partial(TrialMarks, parent=PARENT, boot=boot))
    boot.write_text("other\n")
    assert not TrialMarks(path, PARENT, boot).ended_its_process(A)
    end_in_a_trial(path, A, partial(TrialMarks, parent=PARENT, boot=boot))
    assert TrialMarks(path, PARENT, boot).ended_its_process(A)


def test_who_was_ended_long_ago_may_have_been_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trial.json"
    end_in_a_trial(path, A)
    monkeypatch.setattr(trial_marks, "_LASTS_SECONDS", 0.0)
    assert not next_process(path).ended_its_process(A)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"trials": "a"}', b"\xff"])
def test_a_mark_that_is_damaged_says_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trial.json"
    path.write_bytes(content)
    assert not next_process(path).ended_its_process(A)


@pytest.mark.parametrize("blocks", [None, InBlocks(9)])
def test_what_has_ended_an_agent_in_a_trial_is_refused_or_runs_in_blocks(
    tmp_path: Path, blocks: InBlocks | None
) -> None:
    """The trial of the fragment as a whole ends each process."""
    model, largest = dense_model([512] * 17), {"x": (1, 512)}
    made = write_fragment(tmp_path, model, 20 * MIB, blocks, largest=largest)
    command = [sys.executable, str(PROBE), str(tmp_path), made.digest]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    found = subprocess.check_output(command, text=True)
    if blocks is None:
        assert found == f"needs {24 * MIB + 1}, has {24 * MIB}\n"
    else:
        _, granted = found.split()
        assert made.least_bytes <= int(granted) < 20 * MIB
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL, "for good"


def as_work_ends(folder: Path, digest: str) -> list[str]:
    return [sys.executable, str(PROBE), str(folder), digest, "as-work"]


def test_items_of_what_has_ended_an_agent_as_work_runs_are_bounded(tmp_path: Path) -> None:
    model, largest = dense_model([512] * 17), {"x": (1, 512)}
    made = write_fragment(tmp_path, model, 20 * MIB, largest=largest)
    command = as_work_ends(tmp_path, made.digest)
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert subprocess.check_output(command, text=True) == "bounded\n"
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL, "for good"


def test_what_ends_an_agent_bounded_as_well_is_refused(tmp_path: Path) -> None:
    model, largest = dense_model([512] * 17), {"x": (1, 512)}
    made = write_fragment(tmp_path, model, 20 * MIB, largest=largest)
    as_work = as_work_ends(tmp_path, made.digest)
    always = as_work[:-1]
    for command in (as_work, always):
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert subprocess.check_output(always, text=True).startswith("needs ")
