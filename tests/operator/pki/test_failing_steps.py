"""A device that fails to ask for its identity, for whatever reason, asks again."""

import asyncio
import sys
from dataclasses import replace

import pytest

from pki.operators import Operator
from pki.test_enrolment import obtained
from shoal_agent.enrolment.identity import Identity


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "[Errno 2] No such file or directory"),
        ("echo nonsense", "the step answers b'nonsense"),
        ("echo '{}'", "the step answers b'{}"),
    ],
)
async def test_a_device_whose_step_cannot_run_or_fails_tries_again(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, program: str | None, why: str
) -> None:
    python = operator.folder / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o700)
    identity = Identity(operator.device("pi-4", "token-of-pi-4"), shortest_pause_seconds=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        waiting = asyncio.create_task(obtained(identity))
        while not identity.why.startswith(why):
            await asyncio.sleep(0.05)
            assert not waiting.done()
    await waiting
    assert identity.obtained


async def test_a_folder_that_cannot_be_looked_at_is_looked_at_again(operator: Operator) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    mount = operator.folder / "mount"
    mount.touch()
    identity = Identity(replace(device, folder=mount / "identity"), shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(obtained(identity))
    while "Not a directory" not in identity.why:
        await asyncio.sleep(0.05)
        assert not waiting.done()
    mount.unlink()
    mount.mkdir()
    await waiting
    assert identity.obtained
