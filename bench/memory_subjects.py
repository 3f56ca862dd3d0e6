"""The models of `memory.py`: an item for each, what is aimed at, and the model as one fragment."""

import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from measurement import Report
from memory_items import SUBJECTS
from memory_ways import Task
from zoo.materialise import materialise

from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_protocol.partition import Fragment

TURNS = 25
QUICK_TURNS = 5
QUICK = ("mobilenet_v2",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One model, cut, with what measures it."""

    report: Report
    name: str
    fragment: Fragment
    task: Task
    folder: Path

    @property
    def turns(self) -> int:
        return QUICK_TURNS if self.report.quick else TURNS

    def granted(self, size_bytes: int, what: str) -> Task:
        return replace(
            self.task,
            way="granted",
            what=what,
            granted_bytes=size_bytes,
            least_bytes=self.fragment.least_bytes,
            resident_bytes=self.fragment.resident_bytes,
            turns=self.turns,
        )


@contextmanager
def opened(report: Report, name: str, options: Namespace) -> Iterator[Bench]:
    """The model in a store of its own."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-memory-"))
    try:
        path = model_of(name)
        shapes = {key: each.shape for key, each in SUBJECTS[name].inputs().items()}
        (fragment,) = cut_model(path, profile_model(path, shapes), (), folder / "store").fragments
        task = Task(
            model=str(path),
            original=str(path),
            name=name,
            cache=str(folder / "store"),
            digest=fragment.digest,
            way="default",
            threads=options.threads,
            what="peak",
        )
        yield Bench(report=report, name=name, fragment=fragment, task=task, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def model_of(name: str) -> Path:
    """Its ONNX file, made once on this machine."""
    return materialise(name, Path(tempfile.gettempdir()) / f"shoal-zoo-{os.getuid()}")


def names(report: Report, options: Namespace) -> tuple[str, ...]:
    """The models to measure."""
    return tuple(options.model or (QUICK if report.quick else SUBJECTS))
