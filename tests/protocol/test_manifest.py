"""Manifests of fragments: read as they were written, refused where they are anything else."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.blocks import Block, Gathered, blocks_as_json
from shoal_protocol.digests import Digest, digest_of, from_hexadecimal, hexadecimal, is_digest
from shoal_protocol.manifest import (
    BLOCKS,
    MANIFEST,
    MODEL,
    MOST_SHARED_FILES,
    WEIGHTS,
    FileEntry,
    FragmentDamaged,
    Manifest,
    format_manifest,
    parse_manifest,
    shared_name,
)

ENTRY = FileEntry(digest=digest_of(b"model"), size_bytes=5)
ENTRIES = st.builds(
    FileEntry,
    digest=st.binary(max_size=5).map(digest_of),
    size_bytes=st.integers(0, 1 << 60),
)


@given(ENTRIES, ENTRIES | st.none(), st.lists(ENTRIES, max_size=MOST_SHARED_FILES))
def test_a_manifest_is_read_as_it_was_written(
    model: FileEntry, weights: FileEntry | None, shared: list[FileEntry]
) -> None:
    files = {MODEL: model} | ({} if weights is None else {WEIGHTS: weights})
    files |= {shared_name(number): each for number, each in enumerate(shared)}
    content = format_manifest(files, {"inputs": []})
    found = parse_manifest(content, digest_of(content))
    expected = Manifest(digest=digest_of(content), files=files, manifest_bytes=len(content))
    assert found == expected
    assert found.total_bytes == len(content) + sum(each.size_bytes for each in files.values())


BLOCK = Block(
    model_offset=0,
    model_bytes=5,
    takes=("x",),
    gives=("y",),
    held_bytes=1,
    weight_bytes=2,
    working_bytes=3,
)


def test_blocks_are_read_as_they_were_written() -> None:
    files = {MODEL: ENTRY, BLOCKS: ENTRY}
    content = format_manifest(files, {"blocks": blocks_as_json([BLOCK, BLOCK])})
    assert parse_manifest(content, digest_of(content)).blocks == (BLOCK, BLOCK)


def test_a_fragment_may_have_no_blocks() -> None:
    content = format_manifest({MODEL: ENTRY}, {})
    assert parse_manifest(content, digest_of(content)).blocks == ()


@pytest.mark.parametrize(
    ("files", "blocks", "reason"),
    [
        ({MODEL: ENTRY}, [BLOCK, BLOCK], "has only one of blocks and blocks.bin"),
        ({MODEL: ENTRY, BLOCKS: ENTRY}, None, "has only one of blocks and blocks.bin"),
        ({MODEL: ENTRY, BLOCKS: ENTRY}, [], "blocks are not a list of 1 to 256"),
        (
            {MODEL: ENTRY, BLOCKS: FileEntry(digest=ENTRY.digest, size_bytes=4)},
            [BLOCK, BLOCK],
            "block 0 is beyond the end of its file",
        ),
    ],
)
def test_blocks_that_make_no_sense_damage_a_fragment(
    files: dict[str, FileEntry], blocks: list[Block] | None, reason: str
) -> None:
    described = {} if blocks is None else {"blocks": blocks_as_json(blocks)}
    content = format_manifest(files, described)
    with pytest.raises(FragmentDamaged, match=reason):
        parse_manifest(content, digest_of(content))


def described(**change: Any) -> dict[str, Any]:
    return {"version": 1, "files": {MODEL: {"sha256": "0" * 64, "bytes": 1}}} | change


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "is not of version 1"),
        (described(version=2), "is not of version 1"),
        (described(files=[]), "is not of version 1"),
        (described(files={}), "names no model.onnx"),
        (described(files={"../x": {"sha256": "0" * 64, "bytes": 1}}), "lists the file '../x'"),
        *(
            (described(files={name: {"sha256": "0" * 64, "bytes": 1}}), "lists the file")
            for name in (
                "shared.64.bin",
                "shared.00.bin",
                "shared..bin",
                "shared.0.bin/x",
                MANIFEST,
            )
        ),
        (described(files={MODEL: {"sha256": "0" * 63, "bytes": 1}}), "lists the file"),
        (described(files={MODEL: {"sha256": "0" * 64, "bytes": -1}}), "lists the file"),
        (described(files={MODEL: {"sha256": "0" * 64}}), "lists the file"),
    ],
)
def test_what_is_no_manifest_is_refused(value: object, reason: str) -> None:
    content = json.dumps(value).encode()
    with pytest.raises(FragmentDamaged, match=reason):
        parse_manifest(content, digest_of(content))


def test_a_manifest_is_believed_by_its_digest_only() -> None:
    content = format_manifest({MODEL: ENTRY}, {})
    with pytest.raises(FragmentDamaged, match="does not match its digest"):
        parse_manifest(content, digest_of(b"another"))
    for damaged in (b"[" * 100_000, b"\xff", b"{"):
        with pytest.raises(FragmentDamaged, match="is no JSON"):
            parse_manifest(damaged, digest_of(damaged))


@given(st.binary(max_size=10))
def test_a_digest_and_its_digits_say_the_same(content: bytes) -> None:
    digest = digest_of(content)
    assert is_digest(digest)
    assert from_hexadecimal(hexadecimal(digest)) == digest


@pytest.mark.parametrize("text", ["", "sha256:", "0" * 64, "sha256:" + "G" * 64, "sha256:../" * 8])
def test_what_is_no_digest_names_nothing(text: str) -> None:
    assert not is_digest(text)
    with pytest.raises(ValueError, match="is no digest"):
        hexadecimal(Digest(text))


@pytest.mark.parametrize("gathers", [7, [7], [{"table": "t", "indices": "i"}]])
def test_rows_that_are_not_named_damage_a_fragment(gathers: object) -> None:
    described = blocks_as_json([BLOCK])
    described[0]["gathers"] = gathers
    content = format_manifest({MODEL: ENTRY, BLOCKS: ENTRY}, {"blocks": described})
    with pytest.raises(FragmentDamaged, match="gathers do not name table, indices and rows"):
        parse_manifest(content, digest_of(content))


def test_what_a_block_gathers_is_read_as_it_was_written() -> None:
    gathers = (Gathered(table="t", indices="i", rows="r"),)
    block = replace(BLOCK, gathers=gathers)
    content = format_manifest({MODEL: ENTRY, BLOCKS: ENTRY}, {"blocks": blocks_as_json([block])})
    assert parse_manifest(content, digest_of(content)).blocks == (block,)
