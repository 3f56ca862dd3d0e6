"""Results on disk: complete, deterministic, resumable, and safe from `kill -9`."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal_coordinator.storage import results
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.parts import ROWS, ResultFile
from shoal_coordinator.storage.results import OutputsRefused, ResultStore

FILES = (
    ResultFile("a.npz", 0, 1),
    ResultFile("b.npz", 1, 3, stacked=True),
    ResultFile("c.npz", 4, 2, stacked=True, joined=True),
)
NAMES = ("y", "label")
Open = Callable[..., ResultStore]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Open]:
    """Opens the store of one folder, as often as wanted; the one before is closed."""
    opened: list[ResultStore] = []

    def opener(
        *,
        files: tuple[ResultFile, ...] = FILES,
        names: tuple[str, ...] = NAMES,
        job: str = "job",
        identity: str = "identity",
    ) -> ResultStore:
        if opened:
            opened.pop().close()
        opened.append(
            ResultStore(tmp_path / "out", job=job, identity=identity, files=files, names=names)
        )
        return opened[-1]

    yield opener
    if opened:
        opened.pop().close()


def result(item: int) -> dict[str, np.ndarray]:
    return {
        "y": np.full((1, 2), item, np.float32),
        "label": np.array([f"item {item}" * item], dtype=object),
    }


def put(results: ResultStore, *items: int) -> dict[int, str]:
    for item in items:
        results.add(item, result(item))
    return results.finish(items)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_come_out_as_their_inputs_were_stacked(store: Open, tmp_path: Path) -> None:
    results = store()
    assert put(results, 5, 2, 0) == {}
    assert put(results, 3, 1, 4) == {}
    assert results.complete() is None
    with np.load(tmp_path / "out" / "a.npz") as a:
        np.testing.assert_array_equal(a["y"], [[0, 0]])
        assert a.files == ["y", "label"]
    with np.load(tmp_path / "out" / "b.npz") as b:
        np.testing.assert_array_equal(b["y"], [[[1, 1]], [[2, 2]], [[3, 3]]])
        assert b["label"].tolist() == [["item 1"], ["item 2item 2"], ["item 3item 3item 3"]]
    with np.load(tmp_path / "out" / "c.npz") as c:
        np.testing.assert_array_equal(c["y"], [[4, 4], [5, 5]])
    assert names_in(tmp_path / "out") == [".shoal", "a.npz", "b.npz", "c.npz"]
    assert names_in(tmp_path / "out/.shoal/job") == ["job.json", "journal.jsonl", "lock"]


def test_a_file_appears_when_its_last_item_is_stored(store: Open, tmp_path: Path) -> None:
    results = store()
    put(results, 1, 2)
    assert not (tmp_path / "out" / "b.npz").exists()
    put(results, 3)
    assert (tmp_path / "out" / "b.npz").exists()


def test_the_same_results_give_the_same_bytes_in_any_order(store: Open, tmp_path: Path) -> None:
    put(store(), 1, 2, 3)
    first = (tmp_path / "out" / "b.npz").read_bytes()
    (tmp_path / "out" / "b.npz").unlink()
    put(store(), 3, 1, 2)
    assert (tmp_path / "out" / "b.npz").read_bytes() == first


def test_results_of_several_stages_meet_and_newer_ones_replace_older(
    store: Open, tmp_path: Path
) -> None:
    results = store()
    results.add(0, {"y": np.zeros((1, 2), np.float32)})
    assert results.finish([0]) == {
        0: f"results cannot be written to {tmp_path}/out: no label has arrived"
    }
    results.add(0, {"label": np.array(["old"], dtype=object)})
    results.add(0, {"label": np.array(["new"], dtype=object)})
    assert (results.finish([0]), results.complete()) == ({}, None)
    with np.load(tmp_path / "out" / "a.npz") as a:
        assert a["label"].tolist() == ["new"]


def test_rows_of_different_shapes_become_arrays_of_their_own(store: Open, tmp_path: Path) -> None:
    results = store(names=("y",))
    for item in (1, 2, 3):
        results.add(item, {"y": np.arange(item)})
    results.finish([1, 2, 3])
    with np.load(tmp_path / "out" / "b.npz") as b:
        assert b.files == ["y.0", "y.1", "y.2"]
        np.testing.assert_array_equal(b["y.2"], [0, 1, 2])


@pytest.mark.parametrize(
    "array",
    [
        np.float32(3.5),
        np.zeros((0, 4), np.int8),
        np.array([[True, False]]),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.array([1 + 2j], np.complex64),
        np.array(["", "ß"], dtype=object),
    ],
)
def test_any_array_comes_back_as_it_was(store: Open, tmp_path: Path, array: np.ndarray) -> None:
    array = np.asarray(array)
    results = store(names=("y",))
    for item in range(4):
        results.add(item, {"y": array})
    assert (results.finish(range(4)), results.complete()) == ({}, None)
    with np.load(tmp_path / "out" / "a.npz") as a, np.load(tmp_path / "out" / "b.npz") as b:
        np.testing.assert_array_equal(a["y"], array)
        np.testing.assert_array_equal(b["y"], np.stack([array] * 3))


def test_failed_rows_are_left_out_and_listed(store: Open, tmp_path: Path) -> None:
    results = store()
    put(results, 1, 3)
    results.fail([FailedItem(2, "b.npz[1]", "is odd"), FailedItem(0, "a.npz", "is even")])
    assert results.complete() is None
    with np.load(tmp_path / "out" / "b.npz") as b:
        np.testing.assert_array_equal(b["y"], [[[1, 1]], [[3, 3]]])
        np.testing.assert_array_equal(b[ROWS], [0, 2])
    assert json.loads((tmp_path / "out" / "failures.json").read_text()) == {
        "job": "job",
        "failed": 2,
        "failures": [
            {"item": 0, "input": "a.npz", "reason": "is even"},
            {"item": 2, "input": "b.npz[1]", "reason": "is odd"},
        ],
    }
    assert not (tmp_path / "out" / "a.npz").exists()


def test_running_again_tries_the_failed_items_only(store: Open, tmp_path: Path) -> None:
    results = store()
    put(results, 0, 1, 3, 4, 5)
    results.fail([FailedItem(2, "b.npz[1]", "the moon was full")])
    results.complete()
    results = store()
    assert results.completed() == {0, 1, 3, 4, 5}
    put(results, 2)
    assert results.complete() is None
    with np.load(tmp_path / "out" / "b.npz") as b:
        np.testing.assert_array_equal(b["y"], [[[1, 1]], [[2, 2]], [[3, 3]]])
        assert ROWS not in b.files
    assert not (tmp_path / "out" / "failures.json").exists()
    assert store().completed() == set(range(6))


def test_a_finished_job_has_nothing_left_to_do_unless_a_result_is_gone(
    store: Open, tmp_path: Path
) -> None:
    results = store()
    put(results, *range(6))
    results.complete()
    assert store().completed() == set(range(6))
    (tmp_path / "out" / "b.npz").unlink()
    assert store().completed() == {0, 4, 5}
    (tmp_path / "out" / "c.npz").write_bytes(b"")
    assert store().completed() == {0}


def test_a_torn_line_and_a_lost_part_cost_their_items_only(store: Open, tmp_path: Path) -> None:
    put(store(), 1, 2)
    put(store(), 4)
    folder = tmp_path / "out/.shoal/job"
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"item": 5, "at": 0, "en')
    assert store().completed() == {1, 2, 4}
    (folder / "2.part").unlink()
    assert store().completed() == {1, 2}
    size = (folder / "1.part").stat().st_size
    os.truncate(folder / "1.part", size - 1)
    results = store()
    assert results.completed() == {1}
    # What was lost is stored anew, and the old lines are not believed for the new bytes.
    put(results, 4)
    assert store().completed() == {1, 4}


def expected(folder: Path) -> None:
    """All files are there and hold what `result` gives."""
    for name, items in (("a", [0]), ("b", [1, 2, 3]), ("c", [4, 5])):
        with np.load(folder / f"{name}.npz") as file:
            for row, item in enumerate(items):
                want = result(item)
                np.testing.assert_array_equal(np.squeeze(file["y"])[..., 0].reshape(-1)[row], item)
                assert file["label"].reshape(-1)[row] == want["label"][0]


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(content)
    for at in random.integers(0, len(content), random.integers(1, 4)):
        changed[at] = random.integers(0, 256)
    return bytes(changed[: random.integers(0, len(content))] if random.random() < 0.1 else changed)


@pytest.mark.parametrize("name", ["1.part", "2.part", "journal.jsonl"])
def test_damage_costs_items_and_never_gives_a_wrong_result(
    store: Open, tmp_path: Path, name: str
) -> None:
    put(store(), 0, 1, 2, 4)
    store().close()
    out, folder = tmp_path / "out", tmp_path / "out/.shoal/job"
    shutil.copytree(out, tmp_path / "sound")
    random = np.random.default_rng(5)
    lost = 0
    for _ in range(60):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "sound", out)
        (folder / name).write_bytes(damaged((folder / name).read_bytes(), random))
        results = ResultStore(out, job="job", identity="identity", files=FILES, names=NAMES)
        completed = results.completed()
        assert completed <= {0, 1, 2, 4}
        lost += len(completed) < 4
        assert put(results, *(set(range(6)) - completed)) == {}
        assert results.complete() is None
        results.close()
        expected(out)
    assert lost > 20


def test_damage_that_comes_while_the_job_runs_makes_no_file(store: Open, tmp_path: Path) -> None:
    results = store()
    put(results, 1, 2)
    part = tmp_path / "out/.shoal/job/1.part"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    put(results, 3)
    assert "1.part is damaged at" in str(results.complete())
    assert not (tmp_path / "out" / "b.npz").exists()
    assert store().completed() == {1, 3}


def test_a_row_whose_older_record_is_damaged_is_computed_again(store: Open, tmp_path: Path) -> None:
    results = store()
    results.add(4, {"y": np.zeros((1, 2), np.float32)})
    results.add(5, {"y": np.zeros((1, 2), np.float32)})
    results.add(4, {"label": np.array(["a"], dtype=object)})
    results.add(5, {"label": np.array(["b"], dtype=object)})
    assert results.finish([4]) == {}
    part = tmp_path / "out/.shoal/job/2.part"
    content = part.read_bytes()
    at = content.index(bytes(8))  # the data of the first record
    part.write_bytes(content[:at] + b"\1" + content[at + 1 :])
    assert store().completed() == {5}


@pytest.mark.parametrize(
    "link",
    [
        *("failures.json", "failures.json.tmp", ".shoal-probe", "a.npz", "b.npz"),
        *(f".shoal/job/{name}" for name in ("lock", "journal.jsonl", "job.json", "job.json.tmp")),
        *(f".shoal/job/{name}" for name in ("0.part.tmp", "1.part", "1.part.tmp")),
    ],
)
def test_no_file_is_written_through_a_link(store: Open, tmp_path: Path, link: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = tmp_path / "out" / link
    planted.parent.mkdir(parents=True)
    planted.symlink_to(victim)
    with contextlib.suppress(OutputsRefused):
        results = store()
        put(results, 0, 1, 3)
        results.fail([FailedItem(2, "b.npz[1]", "is odd")])
        results.complete()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("link", [".shoal", ".shoal/job"])
def test_no_folder_is_entered_through_a_link(store: Open, tmp_path: Path, link: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    planted = tmp_path / "out" / link
    planted.parent.mkdir(parents=True)
    planted.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputsRefused, match="is a link or of the wrong kind; remove it"):
        store()
    assert not names_in(tmp_path / "elsewhere")


def test_results_of_another_job_are_not_mixed_with(store: Open, tmp_path: Path) -> None:
    put(store(), 0)
    with pytest.raises(OutputsRefused, match="another model or other inputs; choose another"):
        store(identity="other")
    with pytest.raises(OutputsRefused, match="hold results of another job, 'job'; choose another"):
        store(job="other")
    with np.load(tmp_path / "out" / "a.npz") as a:
        assert a["y"].size == 2


def test_two_processes_do_not_write_to_one_folder(store: Open, tmp_path: Path) -> None:
    store()
    with pytest.raises(OutputsRefused, match="are in use by another process"):
        ResultStore(tmp_path / "out", job="job", identity="identity", files=FILES, names=NAMES)


def test_a_folder_that_cannot_be_written_is_refused_at_once(store: Open, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputsRefused, match=r"outputs .*/out: cannot be written: "):
        store()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_fails_what_does_not_fit_and_keeps_the_rest(small_disk: Path) -> None:
    files = (*(ResultFile(f"{n}.npz", n, 1) for n in range(3)), ResultFile("r.npz", 3, 4, True))
    results = ResultStore(small_disk, job="job", identity="i", files=files, names=("y",))
    small, large = np.zeros(1024, np.uint8), np.zeros(300_000, np.uint8)
    for item, array in enumerate((small, large, small, small, large, small, small)):
        results.add(item, {"y": array})
    failures = results.finish(range(7))
    assert failures.keys() == {1, 4}
    assert "No space left on device" in failures[4]
    results.fail(FailedItem(item, "", reason) for item, reason in failures.items())
    assert results.complete() is None
    results.close()
    assert sorted(path.name for path in small_disk.glob("*.npz")) == ["0.npz", "2.npz", "r.npz"]
    again = ResultStore(small_disk, job="job", identity="i", files=files, names=("y",))
    assert again.completed() == {0, 2, 3, 5, 6}
    again.close()


CHILD = """
import sys
from pathlib import Path
import numpy as np
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore

files = (*(ResultFile(f"s{n:03}.npz", n, 1) for n in range(200)),
         *(ResultFile(f"t{n}.npz", 200 + 100 * n, 100, stacked=True) for n in range(8)))
store = ResultStore(Path(sys.argv[1]), job="job", identity="i", files=files, names=("y",))
done = store.completed()
print("completed", *sorted(done), flush=True)
todo = [item for item in range(1000) if item not in done]
todo.sort(key=lambda item: item * 7919 % 1000)
for start in range(0, len(todo), 10):
    batch = todo[start:start + 10]
    for item in batch:
        store.add(item, {"y": np.full(1000, item, np.int32)})
    assert not store.finish(batch)
    print("stored", *batch, flush=True)
assert store.complete() is None
print("complete", flush=True)
"""


def test_killed_at_any_moment_it_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    stored: set[int] = set()
    kills = 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, tmp_path / "out"], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            ended = False
            for count, line in enumerate(child.stdout):
                word, *items = line.split()
                ended = word == "complete"
                if word == "completed":
                    assert stored <= set(map(int, items)), "a stored item was lost"
                stored |= set(map(int, items))
                if count == 3 + 4 * (kills % 5):
                    # Whatever the child does by now, it does not get to the end of it.
                    child.send_signal(signal.SIGKILL)
                    kills += 1
        if ended:
            break
    assert kills > 5
    assert len(stored) == 1000
    for number in range(8):
        with np.load(tmp_path / "out" / f"t{number}.npz") as file:
            expected = np.arange(200 + 100 * number, 300 + 100 * number)
            np.testing.assert_array_equal(file["y"], np.repeat(expected[:, None], 1000, axis=1))
    assert len(list((tmp_path / "out").glob("s*.npz"))) == 200
    assert names_in(tmp_path / "out/.shoal/job") == ["job.json", "journal.jsonl", "lock"]


def test_results_that_wait_for_their_file_hold_bounded_memory(
    store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_UNWRITTEN_BYTES", 100_000)
    files = tuple(
        ResultFile(name=f"{n:03}.npz", first=2 * n, items=2, stacked=True) for n in range(50)
    )
    opened = store(files=files, names=("y",))
    held = []
    for item in range(0, 100, 2):  # the first row of each: no file can be made
        opened.add(item, {"y": np.full((1, 1000), item, np.float32)})
        parts = (tmp_path / "out" / ".shoal" / "job").glob("*.part")
        held.append(4000 * (item // 2 + 1) - sum(part.stat().st_size for part in parts))
    assert max(held) <= 100_000 + 4000
    assert min(held[25:]) < 0, "what was written has heads beside the arrays"
    for item in range(1, 100, 2):
        opened.add(item, {"y": np.full((1, 1000), item, np.float32)})
    assert opened.finish(range(100)) == {}
    for number in range(50):
        with np.load(tmp_path / "out" / f"{number:03}.npz") as file:
            assert file["y"][:, 0, 0].tolist() == [2 * number, 2 * number + 1]
