"""JSON that anyone may have written, held against the memory that reading it takes. Pure.

Whoever may write to one namespace can write what a worker of it seems to have said, or what is kept
of that. The operator is one for all namespaces: three bytes, `[],`, become seventy when they are
read, so that 16 MiB of them would end it, again and again.
"""

from typing import Final

MOST_BYTES: Final = 16 << 20
"""Of what a worker says, which comes in a log, and so of what is kept of it."""
_MOST_CONTAINERS: Final = 1 << 19
"""Lists and objects. What a model of the most fragments and tensors gives has fewer."""
_MOST_COMMAS: Final = 1 << 21
"""And so fewer than that many other values, of some 60 bytes each."""


def is_bounded(text: bytes) -> bool:
    """Whether to read it takes little more than the text itself; what is in strings counts too."""
    containers = text.count(b"[") + text.count(b"{")
    few = containers <= _MOST_CONTAINERS and text.count(b",") <= _MOST_COMMAS
    return few and len(text) <= MOST_BYTES
