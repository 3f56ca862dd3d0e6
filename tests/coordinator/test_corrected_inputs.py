"""When inputs are corrected or added, only what is missing runs; no result is kept of an input that
has changed."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.scripted import connected
from coordinator.test_retries import Picky, listed, numbers
from coordinator.world import World
from shoal_coordinator.storage.inputs import InputUnsuitable, scan_inputs
from shoal_coordinator.storage.item_list import FailedItem
from shoal_coordinator.storage.job_files import finished_items, open_results
from shoal_coordinator.storage.results import OutputsRefused
from shoal_protocol.digests import Digest
from shoal_protocol.partition import PartitionDocument, TensorSpec
from shoal_protocol.v1 import coordinator_pb2 as api

WRONG = -1.0
"""What a row of it holds makes the item fail on its device."""
DOCUMENT = PartitionDocument(
    model_digest=Digest("sha256:" + "0" * 64),
    fragments=(),
    edges=(),
    inputs=(TensorSpec(name="x", dtype="float", shape=(1, "n")),),
    outputs=(TensorSpec(name="y", dtype="float", shape=(1, "n")),),
)


@dataclass(slots=True)
class Job:
    """A job in a folder, whose result of each row is its double."""

    folder: Path
    document: PartitionDocument = DOCUMENT
    lossy: bool = False
    ran: list[str] = field(default_factory=list)
    """The places of the items of the last run."""

    @property
    def inputs(self) -> Path:
        return self.folder / "in"

    @property
    def outputs(self) -> Path:
        return self.folder / "out"

    def put(self, name: str, *rows: float) -> None:
        """An input file; of several rows it is stacked."""
        self.inputs.mkdir(parents=True, exist_ok=True)
        array = np.array(rows, np.float32).reshape(-1, 1, 1)
        np.savez(self.inputs / name, x=array[0] if len(rows) == 1 else array)

    def put_unsuitable(self, name: str) -> None:
        self.inputs.mkdir(parents=True, exist_ok=True)
        np.savez(self.inputs / name, x=np.zeros((1, 1)))

    def run(self, *, most: int = 1 << 30, complete: bool = True) -> int:
        """Run the items that are missing, at most so many; how many there are in all."""
        inputs = scan_inputs(self.inputs, self.document.inputs)
        opened = open_results(self.outputs, inputs, self.document, job="job", lossy=self.lossy)
        self.ran = []
        with contextlib.closing(inputs), contextlib.closing(opened) as results:
            missing = [item for item in range(len(inputs)) if item not in results.completed()]
            for item in missing[:most]:
                self.ran.append(inputs.place(item))
                try:
                    row = inputs.read(item)["x"]
                except InputUnsuitable as error:
                    results.fail([FailedItem(item, inputs.place(item), str(error))])
                    continue
                if row[0, 0] == WRONG:
                    results.fail([FailedItem(item, inputs.place(item), "fails")])
                    continue
                results.add(item, {"y": row * 2})
                assert results.finish([item]) == {}
            if complete:
                assert results.complete() is None
        return len(inputs)

    def result(self, name: str) -> list[float]:
        with np.load(self.outputs / name) as arrays:
            return [float(value) for value in arrays["y"].ravel()]

    def state(self, name: str) -> Path:
        return self.outputs / ".shoal/job" / name


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_corrected_input_runs_alone(job: Job) -> None:
    job.put("a", 1)
    job.put_unsuitable("b")
    job.put("c", 3, 4)
    assert job.run() == 4
    assert (job.outputs / "failures.json").exists()
    job.put("b", 2, 5)
    assert job.run() == 5
    assert job.ran == ["b.npz[0]", "b.npz[1]"]
    assert [job.result(f"{name}.npz") for name in "abc"] == [[2], [4, 10], [6, 8]]
    assert not (job.outputs / "failures.json").exists()
    job.run()
    assert job.ran == []
    assert finished_items(job.inputs, job.outputs, DOCUMENT, job="job", lossy=False) == 5


def test_added_inputs_run_alone_wherever_their_names_come(job: Job) -> None:
    job.put("b", 1)
    job.put("d", 2, 3)
    job.run()
    for name, row in (("a", 5), ("c", 6), ("e", 7)):
        job.put(name, row)
    assert finished_items(job.inputs, job.outputs, DOCUMENT, job="job", lossy=False) is None
    assert job.run() == 6
    assert job.ran == ["a.npz", "c.npz", "e.npz"]
    assert [job.result(f"{name}.npz") for name in "abcde"] == [[10], [2], [12], [4, 6], [14]]


def test_the_finished_rows_of_a_file_are_kept_when_files_are_added_before_it(job: Job) -> None:
    job.put("b", 1, 2, 3)
    job.run(most=2, complete=False)
    job.put("a", 4)
    job.run()
    assert job.ran == ["a.npz", "b.npz[2]"]
    assert job.result("b.npz") == [2, 4, 6]


def test_the_failed_rows_of_a_file_are_tried_again_when_another_was_corrected(job: Job) -> None:
    job.put_unsuitable("a")
    job.put("b", 1, WRONG, 3)
    job.run()
    job.put("a", 4, 5)
    job.run()
    assert job.ran == ["a.npz[0]", "a.npz[1]", "b.npz[1]"]
    assert job.result("a.npz") == [8, 10]


@pytest.mark.parametrize("complete", [True, False])
def test_an_input_with_a_result_that_was_changed_is_refused_by_name(
    job: Job, complete: bool
) -> None:
    job.put("a", 1)
    job.put("b", 2, 3)
    job.run(most=2, complete=complete)
    kept = job.outputs / "a.npz", job.state("1.part")
    job.put("a", 10)
    job.put("b", 20, 30)
    job.put("c", 40)
    before = job.state("job.json").read_bytes()
    with pytest.raises(OutputsRefused) as refused:
        job.run()
    text = str(refused.value)
    assert "hold results of inputs that have changed since (a.npz, b.npz); put these back" in text
    assert f"delete {kept[0]}, {kept[1]}, and what these inputs hold now is computed" in text
    assert job.state("job.json").read_bytes() == before
    for path in kept:
        path.unlink()
    job.run()
    assert [job.result(f"{name}.npz") for name in "abc"] == [[20], [40, 60], [80]]


def test_an_input_with_a_result_that_is_gone_is_refused_by_name(job: Job) -> None:
    for number in range(6):
        job.put(f"{number}", number)
    job.put_unsuitable("7")
    job.run()
    for number in (0, 1, 2, 3, 4, 7):
        (job.inputs / f"{number}.npz").unlink()
    with pytest.raises(OutputsRefused) as refused:
        job.run()
    assert "that are gone (0.npz, 1.npz, 2.npz and 2 more); put these back" in str(refused.value)
    for number in range(5):
        (job.outputs / f"{number}.npz").unlink()
    assert job.run() == 1
    assert job.ran == []


def test_results_in_a_log_keep_their_inputs_from_being_changed(job: Job, tmp_path: Path) -> None:
    job.put("a", 1)
    inputs = scan_inputs(job.inputs, DOCUMENT.inputs)
    with contextlib.closing(
        open_results(job.outputs, inputs, DOCUMENT, job="job", lossy=False)
    ) as results:
        results.add(0, {"y": np.ones((1, 1), np.float32)})
        results.finish([0])
        shutil.copytree(job.outputs, tmp_path / "killed/out")
    killed = Job(tmp_path / "killed")
    killed.put("a", 2)
    with pytest.raises(OutputsRefused, match=r"changed since \(a.npz\)"):
        killed.run()
    killed.state("1.log").unlink()
    killed.run()
    assert killed.result("a.npz") == [4]


def test_what_is_left_of_a_file_is_never_taken_for_another_of_its_place(job: Job) -> None:
    job.put("a", 1)
    job.put("b", 2, 3)
    job.run(most=2, complete=False)
    left = job.state("1.part").read_bytes()
    job.state("1.part").unlink()
    (job.inputs / "b.npz").unlink()
    job.run()
    job.state("1.part").write_bytes(left)  # as if nothing had been removed before a crash
    job.put("b", 4, 5)
    job.run()
    assert job.result("b.npz") == [8, 10]


def test_another_model_is_refused_and_said_to_be_another(job: Job) -> None:
    job.put("a", 1)
    job.run()
    job.document = replace(DOCUMENT, model_digest=Digest("sha256:" + "1" * 64))
    with pytest.raises(OutputsRefused, match="results of another 'job', of another model; the inp"):
        job.run()
    job.document, job.lossy = DOCUMENT, True
    with pytest.raises(OutputsRefused, match="another 'job', with another transferPrecision;"):
        job.run()


def forget_fingerprints(job: Job) -> None:
    """Leave what a version of Shoal left that knew none."""
    facts = (DOCUMENT.model_digest, scan_inputs(job.inputs, DOCUMENT.inputs).digest, "False")
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    old = {"version": 2, "job": "job", "identity": digest}
    job.state("job.json").write_text(json.dumps(old))


def test_results_without_fingerprints_are_resumed_and_refused_as_a_whole(job: Job) -> None:
    job.put("a", 1)
    job.put_unsuitable("b")
    job.run()
    forget_fingerprints(job)
    job.put("c", 3)
    with pytest.raises(OutputsRefused, match="of another model or other inputs; choose another"):
        job.run()
    (job.inputs / "c.npz").unlink()
    job.run()
    assert job.ran == ["b.npz"]
    job.put("c", 3)
    job.run()
    assert job.ran == ["b.npz", "c.npz"]


DAMAGED = (
    b'{"version": 3, "job": "job", "lossy": false, "model": "sha256:' + b"0" * 64 + b'", '
    b'"next": %d, "numbers": %s, "names": ["a.npz"], "fingerprints": [""]}'
)


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b'{"version": 3}'),
        DAMAGED % (1, b"[1]"),
        DAMAGED % (1, b'["0"]'),
        DAMAGED % (2, b"[0, 1]"),
        DAMAGED % (1 << 40, b"[0]"),
    ],
)
def test_a_damaged_file_of_fingerprints_says_what_to_delete(job: Job, content: bytes) -> None:
    job.put("a", 1)
    job.run()
    job.state("job.json").write_bytes(content)
    with pytest.raises(OutputsRefused, match="delete"):
        job.run()
    shutil.rmtree(job.state(""))
    job.run()
    assert job.ran == ["a.npz"]


Files = dict[str, tuple[float, ...]]
FILES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.lists(st.sampled_from([WRONG, 1.0, 2.0]), min_size=1, max_size=3).map(tuple),
    min_size=1,
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(FILES, st.integers(0, 6), st.booleans()), min_size=2, max_size=5))
def test_no_result_is_ever_that_of_another_input(
    runs: Sequence[tuple[Files, int, bool]],
) -> None:
    with TemporaryDirectory() as folder:
        job = Job(Path(folder))
        for files, most, complete in runs:
            shutil.rmtree(job.inputs, ignore_errors=True)
            for name, rows in files.items():
                job.put(name, *rows)
            try:
                job.run(most=most, complete=complete)
            except OutputsRefused:
                continue
            for name, rows in files.items():
                if (job.outputs / f"{name}.npz").exists():
                    wanted = [2 * row for row in rows if row != WRONG]
                    assert job.result(f"{name}.npz") == wanted, "made, though perhaps in part"


async def test_a_retry_of_some_items_tries_all_that_are_missing_where_files_were_added(
    world: World,
) -> None:
    rows = world.inputs(1, 1, 1)
    picky = Picky(*rows[:2])
    async with connected(world.device("a", stages=picky.stages)):
        await world.submit(backoff_limit=1)
        assert (await world.ended()).failed == 2
        picky.bad.clear()
        np.savez(world.folder / "in/0.npz", x=rows[2])
        await world.stub.RetryJob(api.RetryJobRequest(name="job", items=[1]), timeout=60)
        status = await world.ended()
    assert (status.state, status.items, status.failed) == (api.JobStatus.COMPLETE, 4, 0)
    assert numbers(await listed(world.stub, api.JobItem.SUCCEEDED)) == [0, 1, 2, 3]
