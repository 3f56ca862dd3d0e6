"""An operator that signs for devices, served for a test."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pki.operators import Operator
from shoal_protocol.pki.authority import DEVICE_LIFETIME, Authority


@pytest.fixture
async def operator(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Operator]:
    """Its certificates last for the parameter, if there is one."""
    operator = Operator(tmp_path, lifetime=getattr(request, "param", DEVICE_LIFETIME))
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    operator.grant("token-of-pi-4", "pi-4")
    async with operator.serving():
        yield operator
