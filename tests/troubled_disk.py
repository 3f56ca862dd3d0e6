"""Disks that are slow, and processes out of file descriptors: seams under disk work."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

HANGS_SECONDS = 20.0


@dataclass
class SlowDisk:
    """`entered` is set when somebody syncs; nobody returns from that before `released` is."""

    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    """Every `fsync` waits until the context ends; a test that hangs on it continues after a while,
    and finds `released` set."""
    disk = SlowDisk()

    def wait(descriptor: int) -> None:
        disk.entered.set()
        disk.released.wait()

    monkeypatch.setattr(os, "fsync", wait)
    give_up = threading.Timer(HANGS_SECONDS, disk.released.set)
    give_up.start()
    try:
        yield disk
    finally:
        give_up.cancel()
        disk.released.set()
        monkeypatch.undo()


@contextlib.contextmanager
def failing_disk(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """No data reaches the disk: `fdatasync` fails with this `errno`."""

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        yield


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Whatever would open a file is told that too many are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
