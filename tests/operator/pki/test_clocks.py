"""A device's clock may be wrong: what it was given is renewed by the time that passes."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pki.operators import Operator
from shoal_agent.enrolment import identity as module
from shoal_agent.enrolment.identity import Identity


@pytest.mark.parametrize("hours", [-48, 0, 17, 48])
async def test_a_clock_that_is_wrong_renews_nothing_before_its_time(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    elapsed = 1000.0
    wrong = {"time": lambda: time.time() + hours * 3600, "monotonic": time.monotonic}
    steady = {"clock_gettime": lambda _: elapsed, "CLOCK_BOOTTIME": time.CLOCK_BOOTTIME}
    monkeypatch.setattr(module, "time", SimpleNamespace(**wrong, **steady))
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.01)
    identity = Identity(operator.device("pi-4", "token-of-pi-4"))
    await identity.obtain()
    renewing = asyncio.ensure_future(anext(identity.renewals()))
    elapsed += 15 * 3600
    await asyncio.sleep(0.1)
    assert not renewing.done(), "two thirds of a day have not passed"
    elapsed += 2 * 3600
    await renewing
