"""Tickets: how an agent knows that the coordinator wants it to take an activation from a peer.

Any device of a pool may open a stream to any other. So an activation that comes from a peer shows a
ticket: a keyed hash of the activation's key. The hash key belongs to the receiver's session; the
coordinator computes the ticket and gives it to the device that is to send, with the route. Nobody
has to remember which tickets there are, and no ticket is good for another item, edge or session.
"""

import hashlib
import hmac
import secrets
from typing import Final

from shoal_protocol.tensors import ActivationKey
from shoal_protocol.v1 import tensors_pb2 as pb

_TICKET_BYTES: Final = 16
_KEY_BYTES: Final = 32


def new_ticket_key() -> bytes:
    """32 bytes of chance: the hash key of one session."""
    return secrets.token_bytes(_KEY_BYTES)


def make_ticket(ticket_key: bytes, key: ActivationKey | pb.ActivationKey) -> bytes:
    """The ticket for an activation to the device whose session has that key (32 bytes)."""
    text = f"{key.epoch} {key.item} {key.producer} {key.consumer} {key.job}"
    return hashlib.blake2b(text.encode(), key=ticket_key, digest_size=_TICKET_BYTES).digest()


def is_ticket(ticket: bytes, ticket_key: bytes, key: pb.ActivationKey) -> bool:
    """Whether a ticket is that of an activation. None is, where there is no key."""
    return bool(ticket_key) and hmac.compare_digest(ticket, make_ticket(ticket_key, key))
