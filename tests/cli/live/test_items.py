"""`shoal items` and `shoal retry`, at a coordinator and on a cluster."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from cli.live.test_cluster import FakeKubectl
from cli.live.test_cluster import kubectl as kubectl  # noqa: PLC0414 - a fixture
from cli.local.workbench import Ran, command
from coordinator.conftest import world as world  # noqa: PLC0414 - a fixture
from coordinator.scripted import connected
from coordinator.test_following import drop, frame, spoil
from coordinator.test_retries import Picky
from coordinator.world import World
from shoal_cli.commands.items import item_lines
from shoal_coordinator.server import followed_runs
from shoal_protocol.v1 import coordinator_pb2 as api


async def answer(world: World, *arguments: str) -> Ran:
    """A command about this coordinator."""
    here = ("--coordinator", world.target)
    return await asyncio.to_thread(command, *arguments, *here)


async def test_failed_items_are_listed_and_retried(world: World) -> None:
    rows = world.inputs(3, 1)
    picky = Picky(rows[1], rows[3])
    async with connected(world.device("a", stages=picky.stages)):
        await world.submit(backoff_limit=1)
        await world.ended()
        everything = (await answer(world, "items", "job")).out.splitlines()
        assert everything[0].split() == ["item", "state", "tries", "device", "input", "reason"]
        assert everything[1].split() == ["0", "Succeeded", "1", "-", "000.npz[0]", "-"]
        assert everything[2].split()[:5] == ["1", "Failed", "2", "a", "000.npz[1]"]
        assert everything[2].endswith("does not suit")
        failed = json.loads((await answer(world, "items", "job", "--failed", "-o", "json")).out)
        assert [(each["item"], each["state"], each["tries"]) for each in failed] == [
            (1, "Failed", 2),
            (3, "Failed", 2),
        ]
        refused = await answer(world, "retry", "job", "0")
        assert refused.status == 2
        assert refused.err == (
            f"shoal: the coordinator refuses\n  {world.target}: item 0 of job job has not failed; "
            "2 of its 4 items have: `shoal items job --failed`\n"
        )
        picky.bad.clear()
        one = await answer(world, "retry", "job", "3")
        assert one.out == "job: retry 1, 1 of 4 items to do, 1 stay failed\n", one.err
        await world.ended()
        assert (await answer(world, "retry", "job")).out == "job: retry 2, 1 of 4 items to do\n"
        assert (await world.ended()).state == api.JobStatus.COMPLETE
        assert (await answer(world, "items", "job", "--failed")).out == "no items\n"
    unknown = await answer(world, "items", "none")
    assert unknown.err == "shoal: not known\n  there is no none here; jobs: job; devices: a\n"


async def test_failed_files_of_a_followed_folder_are_retried_while_the_job_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_runs, "SCAN_SECONDS", 0.05)
    drop(world.folder / "in", 0)
    spoil(world.folder / "in", "0001.npz")
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: (status.succeeded, status.failed) == (1, 1))
        lines = (await answer(world, "items", "job")).out.splitlines()
        assert [line.split()[1] for line in lines[1:]] == ["Succeeded", "Failed"]
    # No device is left that could run the item before it is counted.
    np.savez(world.folder / "in" / "0001.npz", x=frame(1))
    again = await answer(world, "retry", "job")
    assert again.out == "job: retry 1, 1 of 2 items to do\n", again.err
    async with connected(world.device("a")):
        await world.until(lambda status: status.succeeded == 2)
        nothing = await answer(world, "retry", "job")
        assert nothing.err.endswith(": no item of job job has failed\n")
        await world.submit(follow=True, end=True)
        await world.ended()


async def test_names_of_files_cannot_command_the_terminal(world: World) -> None:
    world.inputs(1, size=3)
    (world.folder / "in" / "000.npz").rename(world.folder / "in" / "a\n\x1b[2J.npz")
    await world.submit()
    await world.until(lambda status: status.items == 1)
    lines = (await answer(world, "items", "job")).out.splitlines()
    assert len(lines) == 2
    assert lines[1].split()[4] == r"a\n\x1b[2J.npz[0]"


def inference_job(type_: str, **spec: Any) -> dict[str, Any]:
    end = {"type": type_, "status": "True", "reason": "X", "message": "x"}
    status = {"conditions": [end], "retry": {"number": 2}}
    return {"kind": "InferenceJob", "metadata": {"name": "ocr"}, "spec": spec, "status": status}


def test_on_a_cluster_a_job_that_follows_is_retried_while_it_runs(kubectl: FakeKubectl) -> None:
    follows = {"uri": "pvc://lines/in", "follow": True}
    kubectl.has("inferencejob.shoal.dev-ocr", inference_job("Planned", inputs=follows))
    assert command("retry", "ocr", "--namespace", "reading").status == 0
    kubectl.has("inferencejob.shoal.dev-ocr", inference_job("Planned", inputs=follows, end=True))
    assert "has not ended" in command("retry", "ocr", "--namespace", "reading").err


def test_on_a_cluster_the_next_retry_is_written_into_the_spec(kubectl: FakeKubectl) -> None:
    kubectl.has("inferencejob.shoal.dev-ocr", inference_job("Failed", retry={"number": 2}))
    ran = command("retry", "ocr", "9", "4", "--namespace", "reading")
    assert ran.out == "ocr: retry 3 is wanted; kubectl get ij ocr shows how it goes\n", ran.err
    patch = '{"spec": {"retry": {"number": 3, "items": [4, 9]}}}'
    assert kubectl.asked[-1] == (
        f"patch inferencejob.shoal.dev ocr --type=merge --patch={patch} --namespace=reading"
    )


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("Complete", "InferenceJob ocr is complete: no item of it has failed"),
        ("Planned", "InferenceJob ocr has not ended; what failed can be tried again when it has"),
    ],
)
def test_a_job_that_has_not_failed_is_not_retried(
    kubectl: FakeKubectl, condition: str, text: str
) -> None:
    kubectl.has("inferencejob.shoal.dev-ocr", inference_job(condition))
    ran = command("retry", "ocr", "--namespace", "reading")
    assert (ran.status, ran.err) == (2, f"shoal: the cluster refuses\n  {text}\n")
    assert not any(line.startswith("patch") for line in kubectl.asked)


def test_columns_are_aligned_where_letters_are_two_cells_wide() -> None:
    found = [
        api.JobItem(item=0, state=api.JobItem.FAILED, tries=1, input=name, reason="wrong shape")
        for name in ("日本語.npy", "zeile-äöü.npy", "a.npy")
    ]
    heading, *lines = item_lines(found)
    ends = {cell_len(line[: line.index("wrong shape")]) for line in lines}
    assert ends == {heading.index("reason")}
