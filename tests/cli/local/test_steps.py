"""A step in a process of its own, with a real one."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_cli.local.steps import StepCrashed, StepRefused, run_step

MODULE = """
import os, sys, time
from shoal_cli.local.steps import serve

def work(request, progress):
    print("libraries may print what they like")
    if request["do"] == "refuse":
        raise ValueError("node conv_3: no such operator")
    if request["do"] == "crash":
        sys.exit("out of luck")
    if request["do"] == "fill":
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    if request["do"] == "die":
        os.kill(os.getpid(), 9)
    if request["do"] == "hang":
        open(request["note"], "w").write(str(os.getpid()))
        time.sleep(600)
    if request["do"] == "list the environment":
        return {"names": list(os.environ)}
    progress(1, 2)
    progress(2, 2)
    return {"echo": request["do"]}

def main():
    serve(work, (ValueError,))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "step_for_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "step_for_test"


async def test_a_step_answers_and_says_how_far_it_is(module: str) -> None:
    heard: list[tuple[int, int]] = []
    result = await run_step("s", module, {"do": "work"}, lambda *done: heard.append(done))
    assert result == {"echo": "work"}
    assert heard == [(1, 2), (2, 2)]


async def test_a_step_inherits_no_secrets(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    result = await run_step("s", module, {"do": "list the environment"}, lambda *done: None)
    names = result["names"]
    assert isinstance(names, list)
    assert "PATH" in names
    assert "AWS_SECRET_ACCESS_KEY" not in names


async def test_a_refusal_comes_over_with_its_text(module: str) -> None:
    with pytest.raises(StepRefused, match="node conv_3: no such operator") as refused:
        await run_step("s", module, {"do": "refuse"}, lambda *done: None)
    assert refused.value.kind == "ValueError"


async def test_a_crash_comes_over_with_its_last_words(module: str) -> None:
    with pytest.raises(StepCrashed, match=r"exited with 1\nlibraries.*\nout of luck"):
        await run_step("s", module, {"do": "crash"}, lambda *done: None)
    with pytest.raises(StepCrashed, match="killed by SIGKILL"):
        await run_step("s", module, {"do": "die"}, lambda *done: None)


async def test_a_full_disk_comes_over_without_a_traceback(module: str) -> None:
    with pytest.raises(StepCrashed) as crashed:
        await run_step("s", module, {"do": "fill"}, lambda *done: None)
    assert str(crashed.value).splitlines() == [
        "s exited with 1",
        "libraries may print what they like",
        "nothing more can be written: No space left on device",
    ]


async def test_a_cancelled_step_leaves_no_process(module: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    request = {"do": "hang", "note": str(note)}
    step = asyncio.create_task(run_step("s", module, request, lambda *done: None))
    async with asyncio.timeout(60):
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    assert not Path(f"/proc/{note.read_text()}").exists()


async def test_the_first_process_of_a_container_may_take_steps(module: str) -> None:
    program = (
        "import asyncio\n"
        "from shoal_cli.local.steps import run_step\n"
        f"asked = run_step('s', {module!r}, {{'do': 'work'}}, lambda *done: None)\n"
        "print(asyncio.run(asked))\n"
    )
    own = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run((*own, "true"), check=False).returncode:
        pytest.skip("no process namespace can be made here")
    process = await asyncio.create_subprocess_exec(
        *own, sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    assert said.decode().strip() == "{'echo': 'work'}"
