"""What a search remembers of the files of weights that it has cut a model into."""

import os
from pathlib import Path

import pytest

from made_models import deep
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_planner.segments import Layout

MADE = deep(8)
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Its weights are a file of their own."""
    return MADE.save(tmp_path, external=True)


def in_parts(source: Source) -> tuple[Source, ...]:
    """The model, and with its layers in parts, whose weights are strips of the file."""
    return source, source.sliced(3)


def cut(source: Source, step: int) -> Cut:
    profile = source.profile(MADE.shapes)
    return Cut(source, profile, Layout(profile).legal[::step])


def read_bytes() -> int:
    """What this process has read."""
    figures = Path(f"/proc/{os.getpid()}/io").read_text().split()
    return int(figures[figures.index("rchar:") + 1])


def test_a_cut_after_others_is_what_it_would_be_by_itself(path: Path) -> None:
    searched = Source.open(path)
    for sliced in in_parts(searched):
        for step in (1, 2, 7, 2, 1):
            alone = cut(Source.open(path).sliced(sliced.slicing), step)
            assert cut(sliced, step).document == alone.document


def test_a_cut_into_files_that_another_had_reads_no_weights(path: Path) -> None:
    for sliced in in_parts(Source.open(path)):
        first = cut(sliced, 2)
        before = read_bytes()
        again = cut(sliced, 2)
        assert read_bytes() - before < MIB
        assert again.document == first.document
        cut(sliced, 7)
        assert read_bytes() - before > 4 * MIB, "most of these are other files"


def test_a_model_that_has_changed_meanwhile_is_read_again(path: Path) -> None:
    source = Source.open(path)
    before = cut(source, 2).document
    with path.with_name("data.bin").open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    after = cut(source, 2).document
    changed = [
        old.index
        for old, new in zip(before.fragments, after.fragments, strict=True)
        if old.digest != new.digest
    ]
    assert len(changed) == 1
