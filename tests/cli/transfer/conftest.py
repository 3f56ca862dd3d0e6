"""Servers for the tests of this folder, each started once."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cli.transfer.servers import S3, Registry, serve_registry, serve_s3
from cli.transfer.web_server import Web, serve_web
from shoal_cli.transfer import places
from shoal_cli.transfer.addresses import Access
from shoal_coordinator.server import CoordinatorSettings, serving


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PAUSE_SECONDS", 0)


@pytest.fixture
def web() -> Iterator[Web]:
    with serve_web() as web:
        yield web


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The environment says how to reach it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with serve_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(base=tmp_path, insecure=True, volumes={"lines": tmp_path / "claim"})


def volume_settings(tmp_path: Path, port: int = 0) -> CoordinatorSettings:
    """Of a coordinator whose volume is `tmp_path/volume`."""
    return CoordinatorSettings(
        listen=f"127.0.0.1:{port}",
        store=tmp_path / "volume",
        state=tmp_path / "volume/state",
        insecure=True,
    )


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[str]:
    """The target of a coordinator with such settings."""
    async with serving(volume_settings(tmp_path)) as running:
        yield f"127.0.0.1:{running.port}"
