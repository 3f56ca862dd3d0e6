"""What the limit of an agent leaves for its own heap, beside the idle process and its budget."""

from typing import Final

HEAP_RESERVE_BYTES: Final = 3 << 20
"""What stays after fragments have come and gone: between what is freed lies what is not, tables of
the interpreter grow. It was 2 to 2.5 MiB after fifty fragments, half of a budget of 5 MiB, and did
not grow further."""
