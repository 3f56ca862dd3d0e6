"""What seems to be a worker's answer, and was written by whoever may write to the namespace."""

import base64
import gzip
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from shoal_operator.controller.pods import last_answer
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.planned_cuts import read_table


def lists() -> bytes:
    """12 MB, of which reading makes 300; packed they are 12 KB."""
    return b"[" + b",".join([b"[]"] * 4_000_000) + b"]"


def texts() -> bytes:
    """The same of short texts."""
    return b"[" + b",".join([b'"ab"'] * 3_000_000) + b"]"


def kept(key: str, content: bytes) -> dict[str, Any]:
    """A ConfigMap as ours would be, with that in it."""
    annotations = {"shoal.dev/recipe": "r", "shoal.dev/arguments": "[]"}
    data = {key: base64.b64encode(gzip.compress(content)).decode()}
    return {"metadata": {"annotations": annotations}, "binaryData": data}


@pytest.mark.parametrize(
    ("read", "key", "hostile"),
    [
        (read_document, "partition.json.gz", lists),
        (read_table, "cuts.json.gz", lists),
        (last_answer, None, lists),
        (read_table, "cuts.json.gz", texts),
        (last_answer, None, texts),
    ],
    ids=["document", "table", "log", "table of texts", "log of texts"],
)
def test_it_does_not_fill_the_memory_of_the_operator_of_all_namespaces(
    read: Callable[[Any], object], key: str | None, hostile: Callable[[], bytes]
) -> None:
    given = hostile() if key is None else kept(key, hostile())
    tracemalloc.start()
    try:
        assert read(given) is None
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 72 << 20, f"{most} bytes"


def test_the_last_line_that_is_json_is_what_a_worker_says() -> None:
    assert last_answer(b'{"a": 1}\nnoise\n{"b": 2}\nmore noise\n') == b'{"b": 2}'
    assert last_answer(b"noise\n") is None
