"""A Partition's document in its ConfigMap: gzip in binaryData, with what made it. Pure.

A ConfigMap holds at most 1 MiB, so a document is refused that is larger even when it is packed.
"""

import base64
import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Final

from shoal_api.kinds import Partition
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import labels_of, manifest
from shoal_operator.reconcile.names import document_name
from shoal_operator.reconcile.snapshot import StoredDocument
from shoal_protocol.partition import DocumentRefused, document_from_json, document_to_json

KEY: Final = "partition.json.gz"
RECIPE: Final = "shoal.dev/recipe"
ARGUMENTS: Final = "shoal.dev/arguments"
MAX_PACKED_BYTES: Final = 1_000_000
MAX_DOCUMENT_BYTES: Final = 64 << 20
"""Unpacked: a ConfigMap that anyone may have written must not fill the operator's memory."""


def pack(stored: StoredDocument) -> bytes:
    """The document as the ConfigMap holds it; the same bytes every time."""
    return gzip.compress(document_to_json(stored.document).encode(), mtime=0)


def config_map(partition: Partition, stored: StoredDocument, packed: bytes) -> Manifest:
    """The ConfigMap of a Partition's document."""
    annotations = {RECIPE: stored.recipe, ARGUMENTS: json.dumps(list(stored.arguments))}
    return manifest(
        partition,
        "ConfigMap",
        document_name(partition.metadata.name),
        labels_of(partition, "document"),
        {"annotations": annotations},
        binaryData={KEY: base64.b64encode(packed).decode()},
    )


def read_document(config_map: Mapping[str, object]) -> StoredDocument | None:
    """What a ConfigMap of ours holds; None where somebody has made it useless: it is made again."""
    match config_map:
        case {
            "metadata": {
                "annotations": {
                    "shoal.dev/recipe": str(recipe),
                    "shoal.dev/arguments": str(arguments),
                }
            },
            "binaryData": {"partition.json.gz": str(packed)},
        }:
            try:
                unpacker = zlib.decompressobj(wbits=31)
                text = unpacker.decompress(base64.b64decode(packed), MAX_DOCUMENT_BYTES)
                given = json.loads(arguments)
                document = document_from_json(text)
            except (ValueError, zlib.error, DocumentRefused):
                return None
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                return None
            return StoredDocument(recipe=recipe, arguments=tuple(given), document=document)
    return None
