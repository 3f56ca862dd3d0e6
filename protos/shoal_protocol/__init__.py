"""What both planes share: the messages (`v1`), their bulk encoding, units, channel settings.

Nothing here decides anything. What only one plane needs belongs to that plane.
"""

from typing import Final

PROTOCOL: Final = 5
"""What `Hello.protocol` says. It grows when a message's meaning changes; both sides must agree."""
