"""What two processes must agree on: the messages (`v1`), their bulk encoding and the link that
carries it (`bulk`), files that one writes and another reads, certificates (`pki`), units.

Nothing here decides anything. What only one process needs belongs to that process.
"""

from typing import Final

PROTOCOL: Final = 5
"""What `Hello.protocol` says. It grows when a message's meaning changes; both sides must agree."""
