"""Pools from start to end, and what cannot be loaded."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import shoal
from python.pools import SHAPES, batch, check, processes
from shoal.processes import settings

pytestmark = pytest.mark.real

OTHER_PROGRAM = """
import sys, shoal
pool = shoal.pool(devices=2, budget="4Mi")
model = pool.load(sys.argv[1], shapes={"x": (4, 256)})
print("ready", flush=True)
sys.stdin.read()
"""


FORKED_PROGRAM = """
import os, sys, numpy, shoal
from pathlib import Path

item, path, done = {"x": numpy.ones((2, 256), numpy.float32)}, sys.argv[1], Path(sys.argv[2])
pool = shoal.pool(devices=1, budget="8Mi")
model = pool.load(path, shapes={"x": (4, 256)})
begun = model.map([item] * 4, look_ahead=2)
next(begun)
forbidden = [
    lambda: model.run(item),
    lambda: next(begun),
    lambda: next(model.map([item])),
    lambda: pool.load(path),
    lambda: shoal.pool(devices=1, budget="8Mi"),
]
if not (child := os.fork()):
    for call in forbidden:
        try:
            call()
        except shoal.PoolFailed as error:
            assert "spawn" in error.what, error
        else:
            raise AssertionError("a call in a forked process has a result")
    pool.close()
    done.touch()
    sys.exit()
assert os.waitpid(child, 0) == (child, 0)
assert len(list(begun)) == 3
"""


def started(folder: Path) -> "subprocess.Popen[str]":
    """Another program that has a pool."""
    command = [sys.executable, "-c", OTHER_PROGRAM, str(folder / "model.onnx")]
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program


def until_gone(found: list[int]) -> None:
    while any(Path(f"/proc/{process}/cmdline").exists() for process in found):
        time.sleep(0.05)


def test_nothing_is_left_of_a_pool_that_was_closed(folder: Path) -> None:
    before = processes()
    with shoal.pool(devices=1, budget="8Mi") as pool:
        model = pool.load(folder / "model.onnx", shapes=SHAPES)
        assert len(processes()) == len(before) + 2
    assert processes() == before
    with pytest.raises(shoal.PoolClosed):
        model.run({"x": batch(0)})
    with pytest.raises(shoal.PoolClosed):
        pool.load(folder / "model.onnx")
    pool.close()
    assert not list((folder / "cache" / "shoal" / "runs").iterdir())


def test_a_pool_ends_with_its_program_even_if_it_is_killed(folder: Path) -> None:
    program = started(folder)
    found = processes(parent=program.pid)
    assert len(found) == 3
    program.kill()
    until_gone(found)
    program.communicate()


@pytest.mark.minutes
def test_a_pool_that_was_not_closed_ends_with_its_program(folder: Path) -> None:
    program = started(folder)
    found = processes(parent=program.pid)
    program.communicate("")
    assert program.returncode == 0
    until_gone(found)


def test_a_forked_process_is_told_that_it_can_use_no_pool_and_ends_in_order(folder: Path) -> None:
    done = folder / "done"
    command = [sys.executable, "-W", "error", "-c", FORKED_PROGRAM]
    subprocess.run([*command, str(folder / "model.onnx"), str(done)], check=True, timeout=120)
    assert done.exists()


@pytest.mark.minutes
def test_pools_side_by_side_do_not_disturb_each_other(
    folder: Path, whole: onnxruntime.InferenceSession
) -> None:
    path, x = folder / "model.onnx", batch(3)
    with shoal.pool(devices=1, budget="8Mi") as one, shoal.pool(budget=["4Mi", "4Mi"]) as two:
        for pool in (one, two):
            check(whole, x, pool.load(path, shapes=SHAPES).run({"x": x}))


def test_a_work_folder_serves_one_pool_at_a_time(folder: Path) -> None:
    work = folder / "kept"
    with shoal.pool(devices=1, budget="8Mi", work=work) as pool:
        pool.load(folder / "model.onnx", shapes=SHAPES)
        with pytest.raises(shoal.PoolFailed, match="is used by another run"):
            shoal.pool(devices=1, budget="8Mi", work=work)
    assert (work / "store" / "partitions" / "model").is_dir()


def test_a_fragment_that_fits_no_device_is_refused_with_need_and_have(folder: Path) -> None:
    with shoal.pool(budget=["1Mi", "1536Ki"]) as pool:
        with pytest.raises(shoal.ModelFailed, match="fragment 0 of model needs") as caught:
            pool.load(folder / "model.onnx", shapes=SHAPES, fragments=1)
        error = caught.value
        assert (error.have, error.device) == (1536 << 10, "device-2")
        assert error.need is not None
        assert error.need > 1536 << 10
        with pytest.raises(shoal.ModelFailed, match="there is no file") as caught:
            pool.load(folder / "missing.onnx")
        assert (caught.value.need, caught.value.have, caught.value.device) == (None, None, None)


def test_a_model_that_cannot_be_cut_for_the_devices_is_refused_with_need_and_have(
    folder: Path,
) -> None:
    with shoal.pool(budget=["1Mi", "1040Ki"]) as pool:
        with pytest.raises(shoal.ModelFailed, match="the smallest limit that some cut") as caught:
            pool.load(folder / "model.onnx", shapes=SHAPES)
        error = caught.value
        assert (error.have, error.device) == (1040 << 10, "device-2")
        assert error.need is not None
        assert error.need > 1040 << 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": "24MB"}, "24MB"),
        ({"budget": ["4Mi", "4Mi"], "devices": 3}, "3 devices, but 2 budgets"),
        ({"devices": 0}, "0 devices; one machine pretends to be 1 to 64"),
        ({"devices": 65}, "65 devices; one machine pretends to be 1 to 64"),
        ({"budget": ["24Mi"] * 65}, "65 devices; one machine pretends to be 1 to 64"),
        ({"devices": 10**12}, "1000000000000 devices; one machine"),
        ({"devices": "3"}, "devices='3' is no number"),
        ({"devices": 3.0}, "devices=3.0 is no number"),
        ({"work": __file__}, "is no folder"),
        ({"budget": []}, "no budgets"),
        ({"enforce": "maybe"}, "maybe"),
        ({"budget": 64}, r"budget=64: a device has from 1Mi to 16Ti \(did you mean 64Mi\?\)"),
        ({"budget": 2.5}, "budget=2.5 is no size"),
        ({"budget": [2.5]}, "budget=2.5 is no size"),
        ({"budget": True}, "budget=True is no size"),
        ({"budget": "64MB"}, r"'64MB' is no size such as 64Mi, .* \(did you mean 64Mi\?\)"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shoal.pool(**wrong)  # type: ignore[arg-type]


def test_a_program_may_change_its_folder_while_it_has_a_pool(
    folder: Path, whole: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    with shoal.pool(devices=1, budget="8Mi", work="here") as pool:
        monkeypatch.chdir(folder / "elsewhere")
        model = pool.load("../model.onnx", shapes=SHAPES)
        check(whole, batch(0), model.run({"x": batch(0)}))
    assert not list((folder / "elsewhere").iterdir())


def test_numbers_of_numpy_are_numbers_of_devices_and_bytes() -> None:
    eight = np.int64(8 << 20)
    assert settings(np.int64(2), eight, "none", None).budgets == (8 << 20, 8 << 20)  # type: ignore[arg-type]
    assert settings(None, [eight, "4Mi"], "none", None).budgets == (8 << 20, 4 << 20)  # type: ignore[list-item]


def test_a_work_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(shoal.PoolFailed, match="work='/proc/x' cannot be used: No such file"):
        shoal.pool(devices=1, budget="8Mi", work="/proc/x")


def test_a_user_whose_own_folder_cannot_be_written_is_told_to_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told = f"{tmp_path}/file/shoal/.*: Not a directory; name another folder with work="
    with pytest.raises(shoal.PoolFailed, match=told):
        shoal.pool(devices=1, budget="8Mi")
    with pytest.raises(shoal.PoolFailed, match=r"cannot be used: the path .* must be UTF-8"):
        shoal.pool(devices=1, budget="8Mi", work=tmp_path / os.fsdecode(b"lat\xe9"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fragments": 1.5}, "fragments=1.5 is no whole number from 1 on"),
        ({"fragments": "2"}, "fragments='2' is no"),
        ({"fragments": 0}, "fragments=0 is no"),
        ({"fragments": -1}, "fragments=-1 is no"),
        ({"batching": 1.5}, "batching=1.5 is no whole number from 1 to"),
        ({"batching": 0}, "batching=0 is no"),
        ({"shapes": {"x": (2.5, 1024)}}, "shapes of 'x': size=2.5 is no"),
        ({"shapes": {"x": "12"}}, "shapes of 'x': '12' is no sequence"),
        ({"shapes": [("x", 2)]}, "is no dictionary such as"),
    ],
)
async def test_arguments_that_make_no_sense_load_no_model(
    wrong: dict[str, object], message: str
) -> None:
    pool = shoal.async_pool(devices=1, budget="8Mi")
    with pytest.raises(ValueError, match=message):
        await pool.load("model.onnx", **wrong)  # type: ignore[arg-type]
