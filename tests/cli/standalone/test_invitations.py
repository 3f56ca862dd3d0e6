"""A token is good for one key, in time, for what it was made for; whatever restarts meanwhile."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from shoal_cli.standalone.invitations import Invitations, Kind
from shoal_protocol.identities import USER
from shoal_protocol.pki.authority import Authority, Request
from shoal_protocol.pki.enrolment import EnrolmentDenied, TokenRefused

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
AUTHORITY = Authority.make("shoal", NOW)
KEY = ec.generate_private_key(ec.SECP256R1()).public_key()


def asks(name: str, key: str = "first") -> Request:
    return Request(name, KEY, key.encode())


@pytest.fixture
def invitations(tmp_path: Path) -> Invitations:
    return Invitations(tmp_path / "invitations")


def test_a_device_gets_the_name_that_it_asks_for(invitations: Invitations) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    grant = invitations.review(token, asks("pi-4"), AUTHORITY, NOW)
    assert (grant.name, grant.authority) == ("pi-4", AUTHORITY)
    assert invitations.devices() == ["pi-4"]


def test_a_token_that_was_used_is_good_for_its_key_alone(invitations: Invitations) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    invitations.review(token, asks("pi-4"), AUTHORITY, NOW)
    restarted = Invitations(invitations.folder)
    for name in ("pi-4", "jetson"):
        with pytest.raises(EnrolmentDenied, match="was used already, with another key"):
            restarted.review(token, asks(name, "thief"), AUTHORITY, NOW)
    renewed = restarted.review(token, asks("pi-4"), AUTHORITY, NOW + timedelta(days=400))
    assert renewed.name == "pi-4"


def test_a_token_that_was_used_gives_no_other_name(invitations: Invitations) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    invitations.review(token, asks("pi-4"), AUTHORITY, NOW)
    assert invitations.review(token, asks("jetson"), AUTHORITY, NOW).name == "pi-4"


def test_a_token_expires_unless_it_was_used(invitations: Invitations) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    with pytest.raises(TokenRefused, match="has expired; `shoal invite` makes another one"):
        invitations.review(token, asks("pi-4"), AUTHORITY, NOW + HOUR)
    assert invitations.devices() == []


def test_a_token_that_nobody_made_is_refused(invitations: Invitations) -> None:
    invitations.add(Kind.DEVICE, NOW, HOUR)
    for token in ("", "no-such-token", "../../authority/key"):
        with pytest.raises(TokenRefused, match="not of this coordinator"):
            invitations.review(token, asks("pi-4"), AUTHORITY, NOW)


def test_a_name_belongs_to_the_device_that_joined_with_it(invitations: Invitations) -> None:
    first, second = (invitations.add(Kind.DEVICE, NOW, HOUR) for _ in range(2))
    invitations.review(first, asks("pi-4"), AUTHORITY, NOW)
    with pytest.raises(EnrolmentDenied, match="another device of this name has joined"):
        invitations.review(second, asks("pi-4", "second"), AUTHORITY, NOW)
    assert invitations.review(second, asks("pi-5", "second"), AUTHORITY, NOW).name == "pi-5"


@pytest.mark.parametrize("name", ["münchen", "Pi 4", "../pi-4", "-", "pi-4.", "pi\n4", ""])
def test_a_name_that_no_session_could_have_is_refused_and_the_token_stays_good(
    invitations: Invitations, name: str
) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    with pytest.raises(EnrolmentDenied, match=r"is no DNS label, such as pi-4"):
        invitations.review(token, asks(name), AUTHORITY, NOW)
    assert invitations.devices() == []
    assert invitations.review(token, asks("pi-4", "second"), AUTHORITY, NOW).name == "pi-4"


def test_a_forgotten_device_is_renewed_no_more_and_its_name_is_free(
    invitations: Invitations,
) -> None:
    first, second = (invitations.add(Kind.DEVICE, NOW, HOUR) for _ in range(2))
    invitations.review(first, asks("pi-4"), AUTHORITY, NOW)
    assert invitations.forget("pi-4")
    assert not invitations.forget("pi-4")
    with pytest.raises(TokenRefused, match="forgotten"):
        invitations.review(first, asks("pi-4"), AUTHORITY, NOW)
    assert invitations.review(second, asks("pi-4", "second"), AUTHORITY, NOW).name == "pi-4"


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (Kind.CLIENT, "pi-4", "is a client's: use it with `shoal join`"),
        (Kind.DEVICE, USER, "is a device's: use it with `shoal agent`"),
        (Kind.DEVICE, "shoal-coordinator", "kept for Shoal itself"),
        (Kind.DEVICE, "shoal-operator", "kept for Shoal itself"),
        (Kind.DEVICE, "n" * 64, "64 characters"),
    ],
)
def test_a_token_is_for_a_device_or_for_a_client(
    invitations: Invitations, kind: Kind, name: str, why: str
) -> None:
    token = invitations.add(kind, NOW, HOUR)
    with pytest.raises(EnrolmentDenied, match=why):
        invitations.review(token, asks(name), AUTHORITY, NOW)
    right = USER if kind is Kind.CLIENT else "pi-4"
    assert invitations.review(token, asks(right), AUTHORITY, NOW).name == right


def test_several_clients_have_a_key_each(invitations: Invitations) -> None:
    for key in ("laptop", "desktop"):
        token = invitations.add(Kind.CLIENT, NOW, HOUR)
        wanted = replace(asks(USER), fingerprint=key.encode())
        assert invitations.review(token, wanted, AUTHORITY, NOW).name == USER


@pytest.mark.parametrize("name", ["", USER])
def test_only_devices_are_forgotten(invitations: Invitations, name: str) -> None:
    unused = invitations.add(Kind.DEVICE, NOW, HOUR)
    client = invitations.add(Kind.CLIENT, NOW, HOUR)
    invitations.review(client, asks(USER), AUTHORITY, NOW)
    assert not invitations.forget(name)
    assert invitations.review(client, asks(USER), AUTHORITY, NOW).name == USER
    assert invitations.review(unused, asks("pi-4"), AUTHORITY, NOW).name == "pi-4"


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"[]", b"{}", b'{"kind": "king"}'])
def test_a_damaged_record_is_in_nobodys_way(invitations: Invitations, damaged: bytes) -> None:
    lost = invitations.add(Kind.DEVICE, NOW, HOUR)
    (record,) = invitations.folder.iterdir()
    record.write_bytes(damaged)
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    assert invitations.review(token, asks("pi-4"), AUTHORITY, NOW).name == "pi-4"
    assert invitations.devices() == ["pi-4"]
    assert invitations.forget("pi-4")
    with pytest.raises(TokenRefused, match="not accepted"):
        invitations.review(lost, asks("pi-4"), AUTHORITY, NOW)


def test_no_token_is_on_the_disk(invitations: Invitations) -> None:
    token = invitations.add(Kind.DEVICE, NOW, HOUR)
    invitations.review(token, asks("pi-4"), AUTHORITY, NOW)
    for path in invitations.folder.iterdir():
        assert token not in path.name
        assert token not in path.read_text()


def test_invitations_that_expired_long_ago_are_removed(invitations: Invitations) -> None:
    for day in range(0, 20, 2):
        invitations.add(Kind.DEVICE, NOW + timedelta(days=day), HOUR)
    assert len(list(invitations.folder.iterdir())) == 1
