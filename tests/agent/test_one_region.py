"""What a run takes of the arena follows from the fragment and not from the budget."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest

from agent.fragment_making import write_fragment
from agent.measured_trials import peak_of_a_trial, peaks_of_items
from agent.own_process import in_own_process
from made_models import Made, Tensors, weight
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.arena import reserved
from shoal_agent.runtime.ballast import Ballast, Peak, Room
from shoal_agent.runtime.failures import Exceeded
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_agent.runtime.recipes import AS_IT_IS
from shoal_agent.runtime.results import RunResult
from shoal_agent.runtime.sessions import open_session, options_of
from shoal_agent.transport.buffers import nothing_arrives
from shoal_protocol.units import Bytes

MIB = 1 << 20
RUN = """
import json, sys
from pathlib import Path
import numpy as np
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
tune_allocator()
meter = MemoryMeter()
runtime = Runtime(meter, threads=1, limit_bytes=int(sys.argv[2]))
runtime.rehearse()
meter.settle()
runtime.open("f", Path(sys.argv[1]))
for _ in range(3):
    runtime.run("f", {"x": np.ones((1, 262144), np.float32)}, Stopper())
print(json.dumps(meter.peak_bytes()))
"""


def holed(first: int, then: int) -> Made:
    """Of the arena it takes so many MiB, then 1 MiB behind them, and then so many again, for which
    there is room in the hole."""
    return Made(
        text=f"""g (float[1,262144] x) => (float[1,1] y) {{
            s = Constant<value = int64[2] {{{first}, 1}}>()
            many = Expand(x, s)
            one = ReduceMax<axes = [0], keepdims = 1>(many)
            t = Constant<value = int64[2] {{{then}, 1}}>()
            others = Expand(one, t)
            y = ReduceMax<axes = [0, 1], keepdims = 1>(others) }}""",
        weights={},
        shapes={"x": (1, 262144)},
    )


def peak(folder: Path, budget: int) -> int:
    command = [sys.executable, "-c", RUN, str(folder), str(budget)]
    return int(json.loads(subprocess.check_output(command, text=True)))


def test_where_little_is_left_behind_them_tensors_lie_as_where_much_is(tmp_path: Path) -> None:
    """Within 12 MiB, 5 would be left behind the first two, a better fit than the hole of 6."""
    made = write_fragment(tmp_path, onnx.load(holed(6, 4).save(tmp_path)), 24 * MIB)
    little, much = (peak(made.folder, budget) for budget in (12 * MIB, 24 * MIB))
    assert abs(much - little) < 2 * MIB, "4 MiB are taken behind them"


def test_the_region_can_be_had_as_a_whole_once_models_have_run() -> None:
    """Its pages can be given back then, and what blocks work in stays in memory."""
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=48 * MIB + 300)
    runtime.rehearse()
    with runtime._arena.ballast.hold(MIB):
        pass
    assert reserved(runtime._arena.region.size_bytes) is not None
    runtime.shrink()


def test_what_is_left_of_the_arena_is_in_one_piece(ballast: Ballast) -> None:
    with ballast.hold(ballast._arena_bytes - 8 * MIB):
        assert reserved(8 * MIB - 128 * 1024) is not None
        assert reserved(8 * MIB + 128 * 1024) is None


BRANCHES: Final = Made(
    text="""g (float[1,8,32,32] x, float[1,8,32,32] z) => (float[1,8,32,32] y) {
        a = Conv(x, W)
        b = Relu(a)
        c = Conv(b, W)
        d = Relu(c)
        e = Conv(z, W)
        f = Relu(e)
        y = Add(d, f) }""",
    weights={"W": weight(8, 8, 1, 1)},
    shapes={"x": (1, 8, 32, 32), "z": (1, 8, 32, 32)},
)


def order_of_nodes(model: Path, feed: Tensors, profiles: Path) -> list[str]:
    """What a session runs, as it says itself."""
    options = options_of(AS_IT_IS, 1, in_order=True)
    options.enable_profiling, options.profile_file_prefix = True, str(profiles)
    session = open_session(str(model), options)
    session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text())
    return [each["args"]["op_name"] for each in events if each["name"].endswith("_kernel_time")]


def test_branches_run_one_after_the_other_in_the_order_of_the_file(tmp_path: Path) -> None:
    """What is fused would come behind all other nodes."""
    Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)  # the arena, which sessions use
    model = BRANCHES.save(tmp_path)
    ran = order_of_nodes(model, BRANCHES.inputs(), tmp_path / "profile")
    assert ran == ["Conv", "Relu", "Conv", "Relu", "Conv", "Relu", "Add"]


class Trials:
    """Runs that take so many bytes, or fail where it is `beyond`, one after the other."""

    def __init__(self, ballast: Ballast, *takes: int, beyond: int = 100) -> None:
        self.takes, self.beyond = list(takes), beyond
        self.left: list[int] = []
        self.as_work: int | None = None
        self.limits: list[int] = []
        self.planned: list[int] = []
        self.ballast = ballast

    def run(self, limit_bytes: int, planned_bytes: int) -> RunResult:
        self.limits.append(limit_bytes)
        self.planned.append(planned_bytes)
        held = sum(np.prod(value.shape()) for value in self.ballast._held)
        self.left.append(int(self.ballast._arena_bytes - held))
        if (taken := self.takes.pop(0)) >= self.beyond:
            raise Exceeded("too much", taken)
        return RunResult(
            outputs={}, compute_seconds=0, processor_seconds=0, peak_bytes=taken, streamed_bytes=0
        )

    def least(self, planned: int, *, goes_on: bool = True) -> Peak:
        """Of 16 MiB 4 are in use, and 4 on their way."""
        room = Room(16 * MIB, planned, used_bytes=4 * MIB, coming_bytes=4 * MIB)
        return self.ballast.least_peak(self.run, room, self.note if goes_on else None)

    def note(self) -> None:
        """The next run is as work is."""
        self.as_work = len(self.left)


@pytest.fixture
def ballast() -> Iterator[Ballast]:
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=16 * MIB)
    yield runtime._arena.ballast
    runtime.shrink()


def test_a_trial_that_takes_half_of_what_there_is_runs_once_within_what_is_left(
    ballast: Ballast,
) -> None:
    trials = Trials(ballast, 8 * MIB, beyond=100 * MIB)
    assert trials.least(planned=8 * MIB) == Peak(8 * MIB)
    (left,) = trials.left
    assert 5 * MIB < left < 7 * MIB, "the table and what is beside the arena count too"
    assert trials.limits == [16 * MIB]
    assert not ballast.holds


@pytest.mark.parametrize(
    ("takes", "peak"),
    [
        ((9, 10), Peak(10 * MIB)),
        ((10, 9), Peak(10 * MIB)),
        ((10, 12), Peak(10 * MIB, bounded=True)),
        ((13, 12), Peak(13 * MIB, bounded=True)),
        ((13, 10), Peak(10 * MIB)),
        ((10, 100), Peak(10 * MIB, bounded=True)),
        ((13, 100), Peak(13 * MIB, bounded=True)),
    ],
)
def test_a_trial_that_takes_more_than_half_runs_once_more_as_work_does(
    ballast: Ballast, takes: tuple[int, int], peak: Peak
) -> None:
    """Where that is too much, it has run within what was left: so do items."""
    trials = Trials(ballast, *(each * MIB for each in takes), beyond=100 * MIB)
    assert trials.least(planned=11 * MIB) == peak
    assert trials.left[1] == ballast._arena_bytes, "with all of the arena"
    assert trials.as_work == 1
    assert trials.limits[1] == 11 * MIB, "a sixteenth, and what comes, is left to what a node takes"
    assert trials.planned == [11 * MIB, 11 * MIB if takes[0] < 11 else 0], "it is to leave more"


@pytest.mark.parametrize("last", [70, 120])
def test_a_trial_that_fails_may_have_asked_for_far_more_than_it_takes(
    ballast: Ballast, last: int
) -> None:
    """It has a little more then, within the limit, before it has all of the arena."""
    trials = Trials(ballast, 100, 90, last, beyond=100)
    if last == 70:
        assert trials.least(planned=50) == Peak(last)
    else:
        with pytest.raises(Exceeded):
            trials.least(planned=50)
    first, second, third = trials.left
    assert second - first > MIB // 2
    assert second < 16 * MIB - 4 * MIB - 4 * MIB
    assert third == ballast._arena_bytes
    assert trials.as_work == 2
    assert trials.planned == [50, 0, 0]


@pytest.mark.parametrize("takes", [(110, 120), (120, 110)])
def test_a_trial_that_fails_twice_says_the_most_that_it_took(
    ballast: Ballast, takes: tuple[int, int]
) -> None:
    with pytest.raises(Exceeded) as failed:
        Trials(ballast, *(each * MIB for each in takes), beyond=100 * MIB).least(planned=50 * MIB)
    assert failed.value.peak_bytes == 120 * MIB
    assert not ballast.holds


def test_a_trial_leaves_the_weights_that_it_reads_their_place(ballast: Ballast) -> None:
    trials = Trials(ballast, 100, 90, 70, beyond=100)
    room = Room(16 * MIB, 5 * MIB, used_bytes=4 * MIB, coming_bytes=0, weight_bytes=6 * MIB)
    assert ballast.least_peak(trials.run, room) == Peak(70)
    first, second, _ = trials.left
    assert 4 * MIB < first < second < 16 * MIB - 4 * MIB - 6 * MIB


@pytest.mark.parametrize("in_blocks", [False, True])
def test_what_is_planned_is_certain_but_for_blocks(ballast: Ballast, *, in_blocks: bool) -> None:
    trials = Trials(ballast, 8 * MIB, beyond=100 * MIB)
    room = Room(16 * MIB, 15 * MIB, 4 * MIB, 0, weight_bytes=6 * MIB, in_blocks=in_blocks)
    assert ballast.least_peak(trials.run, room) == Peak(8 * MIB)
    (left,) = trials.left
    assert (left == 15 * MIB - 4 * MIB - 6 * MIB) == (not in_blocks)
    assert left > 4 * MIB


def test_a_trial_whose_run_as_work_has_ended_a_process_is_bounded(ballast: Ballast) -> None:
    trials = Trials(ballast, 9 * MIB, beyond=100 * MIB)
    assert trials.least(planned=8 * MIB, goes_on=False) == Peak(9 * MIB, bounded=True)
    with pytest.raises(Exceeded):
        Trials(ballast, 100, 90).least(planned=50, goes_on=False)


def test_items_have_no_more_of_the_arena_than_there_is_where_they_would_take_it(
    tmp_path: Path,
) -> None:
    """Behind the first 43 MiB there is more room than 30 MiB in all of the arena, and less than in
    the hole, which has 42."""
    model = onnx.load(holed(42, 30).save(tmp_path))
    made = write_fragment(tmp_path, model, 60 * MIB, largest={"x": (1, 262144)})
    peaks, free = in_own_process(peaks_of_items, tmp_path, made.digest, 64 * MIB)
    assert free > 70 * MIB
    assert max(peaks) < 56 * MIB


def test_a_trial_that_takes_more_than_there_is_stays_within_it_beside_its_weights(
    tmp_path: Path,
) -> None:
    """Of 40 MiB its weights take 16, and three nodes 10 each, which no estimate knows."""
    many = f"{{{10 * MIB // 8192}, 2048}}"
    model = Made(
        text=f"""g (float[1,2048] x) => (float[2048] y) {{
            s = Constant<value = int64[2] {many}>()
            t = MatMul(x, W)
            a = Expand(t, s)
            b = Expand(x, s)
            c = Add(a, b)
            d = Sum(a, b, c)
            y = ReduceMax<axes = [0], keepdims = 0>(d) }}""",
        weights={"W": weight(2048, 2048)},
        shapes={"x": (1, 2048)},
    )
    folder = tmp_path / "fragment"
    made = write_fragment(folder, onnx.load(model.save(tmp_path)), 24 * MIB, largest=model.shapes)
    stopped, peak = in_own_process(peak_of_a_trial, made.folder, 24 * MIB, 40 * MIB)
    assert stopped
    assert peak <= 40 * MIB


def fills(*mebibytes: int) -> str:
    """A model that fills so much, one after the other, and keeps next to nothing of it."""
    last, nodes = "x", list[str]()
    for number, size in enumerate(mebibytes):
        shape, made = f"{{{size * MIB // 256}, 64}}", f"r{number}"
        nodes.append(f"s{number} = Constant<value = int64[2] {shape}>()")
        nodes.append(f"w{number} = Expand({last}, s{number})")
        nodes.append(f"{made} = ReduceMax<axes = [0]>(w{number})")
        last = made
    return f"g (float[1,64] x) => (float[1,64] {last}) {{ {' '.join(nodes)} }}"


@pytest.mark.parametrize("coming_mib", [0, 20, 28, 32])
def test_a_trial_takes_the_same_whatever_is_on_its_way(tmp_path: Path, coming_mib: int) -> None:
    """What is held back must not be of the first region: small values would then lie between the 16
    MiB and what is behind them, and there would be no room for 24."""
    holed = Made(text=fills(16, 12, 24, 13), weights={}, shapes={"x": (1, 64)})
    folder, limit = tmp_path / "fragment", 64 * MIB
    made = write_fragment(folder, onnx.load(holed.save(tmp_path)), 30 * MIB, largest={"x": (1, 64)})
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=limit)
    meter.settle(LIBRARY_RESERVE_BYTES)
    given = (made.folder, 27 * MIB, NOTHING_PREPARED, limit, coming_mib * MIB)
    _, tried = runtime.open_and_try("f", *given)
    assert tried.taken_bytes is not None
    assert 24 * MIB < tried.taken_bytes < 28 * MIB


def test_what_is_free_is_granted_to_nobody_during_a_trial() -> None:
    ledger = Ledger(budget=Bytes(100))
    ledger.request_load("a", Bytes(60))
    with nothing_arrives(ledger, ledger.free):
        assert not ledger.request_move(1)
        assert ledger.activations == 0, "nothing of it is in memory"
    assert ledger.request_move(40)
    assert ledger.activations == 40


def test_what_is_not_free_is_not_given_back_after_a_trial() -> None:
    ledger = Ledger(budget=Bytes(100))
    assert ledger.request_move(70)
    with nothing_arrives(ledger, 40):
        pass
    assert ledger.moving == 70
