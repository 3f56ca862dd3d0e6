"""Joining a standalone coordinator over real TLS: who is believed, and who gets a certificate."""

import asyncio
import errno
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cli.standalone.conftest import Shelf
from coordinator.world import refusal
from shoal_agent.enrolment.identity import Enrolment, Identity
from shoal_cli.standalone import folders, serving
from shoal_cli.standalone.folders import AuthorityUnusable, Folder, FolderInUse
from shoal_cli.standalone.invitations import Invitation, Invitations, Kind
from shoal_cli.standalone.serving import Standalone, coordinator_process, keep_renewed, listen
from shoal_cli.transfer import joined
from shoal_cluster.ports import lasting_port
from shoal_protocol.coordinator_client import CallFailed
from shoal_protocol.identities import ENROLMENT
from shoal_protocol.join_lines import JoinLine
from shoal_protocol.pki import request
from shoal_protocol.pki.authority import Authority, is_fresh, is_issued_by, renewal_time
from shoal_protocol.pki.enrolment import USED_WITH_ANOTHER_KEY
from shoal_protocol.v1.enrolment_pb2 import EnrolRequest, EnrolResponse
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub

if TYPE_CHECKING:
    from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentAsyncStub

PATIENCE_SECONDS = 60.0
A_MOMENT_SECONDS = 30.0
PAST = datetime.now(UTC) - timedelta(days=200)


def authority_of(shelf: Shelf) -> bytes:
    return (shelf.folder.root / "authority/certificate.pem").read_bytes()


def unexpected(reason: str) -> NoReturn:
    raise AssertionError(reason)


async def joins(line: JoinLine) -> None:
    await asyncio.to_thread(joined.join, line)


def due(target: str, **times: float) -> Path:
    """Have a user's certificate be due at other times; where it is."""
    note = joined._folder(target) / "current" / "identity.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | times))
    return note.with_name("certificate.pem")


async def enrol_at(shelf: Shelf, line: JoinLine, name: str) -> EnrolResponse:
    """One call, with a key of its own."""
    shown = (shelf.folder.root / "enrolment/certificate.pem").read_bytes()
    options = [("grpc.ssl_target_name_override", ENROLMENT)]
    trust = grpc.ssl_channel_credentials(shown)
    asked = request._request(ec.generate_private_key(ec.SECP256R1()), name)
    async with grpc.aio.secure_channel(line.enrolment_target, trust, options) as channel:
        stub: EnrolmentAsyncStub = EnrolmentStub(channel)
        order = EnrolRequest(token=line.token, certificate_request=asked)
        return await stub.Enrol(order, timeout=PATIENCE_SECONDS)


async def test_a_client_gets_a_certificate_of_its_own(shelf: Shelf) -> None:
    line = shelf.line(Kind.CLIENT)
    await joins(line)
    assert joined.joined() == [line.target]
    reached = joined.reach(None)
    assert reached.target == line.target
    assert reached.credentials is not None
    authority = authority_of(shelf)
    assert reached.credentials.ca.read_bytes() == authority
    assert is_issued_by(reached.credentials.certificate.read_bytes(), authority)
    assert reached.credentials.key.stat().st_mode & 0o077 == 0


async def test_a_server_with_another_certificate_gets_no_token(shelf: Shelf) -> None:
    line = shelf.line(Kind.CLIENT)
    forged = replace(line, fingerprint="0" * 64)
    with pytest.raises(joined.JoinRefused, match="shows another certificate than the join line"):
        await joins(forged)
    assert joined.joined() == []
    await joins(line)  # the token was not spent on it


async def test_a_stolen_token_is_refused(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = shelf.line(Kind.CLIENT)
    await joins(line)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "thief"))
    with pytest.raises(joined.JoinRefused, match="was used already, with another key"):
        await joins(line)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_power_failure_costs_nobody_the_token(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """What was not synced is empty then. Of a key that is lost the token would be taken for
    stolen."""
    synced, sync, ask = set[int](), os.fsync, request._ask

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def unanswered(order: request.Order, wanted: bytes) -> NoReturn:
        ask(order, wanted)
        raise request.NoAnswer

    line = shelf.line(Kind.CLIENT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        if not answered:
            patch.setattr(request, "_ask", unanswered)
        with suppress(joined.CoordinatorAway):
            await joins(line)
    for path in joined._folder(line.target).rglob("*"):
        if path.is_file() and path.stat().st_ino not in synced:
            path.write_bytes(b"")
    await joins(line)
    assert joined.joined() == [line.target]


async def test_a_disk_that_takes_no_name_of_an_identity_costs_nobody_the_token(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(link: Path, target: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(link))

    line = shelf.line(Kind.CLIENT)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", full)
        with pytest.raises(OSError, match="No space left"):
            await joins(line)
    await joins(line)
    assert joined.joined() == [line.target]


async def test_an_expired_token_is_refused(shelf: Shelf) -> None:
    line = shelf.line(Kind.CLIENT, timedelta(seconds=-1))
    with pytest.raises(joined.JoinRefused, match="the token has expired"):
        await joins(line)


async def test_a_devices_token_makes_no_client(shelf: Shelf) -> None:
    with pytest.raises(joined.JoinRefused, match="use it with `shoal agent`"):
        await joins(shelf.line(Kind.DEVICE))


async def test_a_coordinator_that_was_not_joined_is_named_with_what_to_do(shelf: Shelf) -> None:
    with pytest.raises(joined.NotJoined, match="no coordinator was joined"):
        joined.reach(None)
    await joins(shelf.line(Kind.CLIENT))
    with pytest.raises(joined.NotJoined, match=r"10\.0\.0\.1:7400 was not joined .*but 127"):
        joined.reach("10.0.0.1:7400")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Deadline Exceeded", "^shelf:7400 does not answer in time: its machine may be suspended"),
        ("certificate has expired: OK", r"^shelf:7400: .*the clock here says \d{4}.*: is it right"),
        ("connection refused", "^shelf:7400: connection refused$"),
    ],
)
def test_a_user_is_told_what_may_keep_a_coordinator_from_answering(reason: str, said: str) -> None:
    with pytest.raises(joined.CoordinatorAway, match=said), joined.explained("shelf:7400"):
        raise CallFailed("ListJobs", grpc.StatusCode.UNAVAILABLE, reason)


async def test_where_a_machine_is_suspended_nobody_answers_who_joins(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "_CALL_SECONDS", 0.1)
    line = shelf.line(Kind.CLIENT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = replace(line, port=silent.getsockname()[1] - 1)
        with pytest.raises(joined.CoordinatorAway, match=r"^nobody answers at \S+ within \d+ s$"):
            await joins(there)


async def test_who_joins_where_another_program_listens_is_told_so(shelf: Shelf) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        there = replace(shelf.line(Kind.CLIENT), port=server.sockets[0].getsockname()[1] - 1)
        with pytest.raises(joined.CoordinatorAway, match=r"^what answers at \S+ is no coordinator"):
            await joins(there)


async def test_a_certificate_is_renewed_with_the_same_key(shelf: Shelf) -> None:
    line = shelf.line(Kind.CLIENT)
    await joins(line)
    certificate = due(line.target, renew_at=time.time() - 1)
    before, key = certificate.read_bytes(), certificate.with_name("key.pem").read_bytes()
    reached = await asyncio.to_thread(joined.reach, line.target)
    assert reached.credentials is not None
    assert reached.credentials.certificate.read_bytes() != before
    assert reached.credentials.key.read_bytes() == key


async def test_a_users_certificate_of_the_future_is_replaced(shelf: Shelf) -> None:
    """The coordinator's clock was ahead when it signed, and nobody believes that when it is set."""
    line = shelf.line(Kind.CLIENT)
    await joins(line)
    certificate = due(line.target, starts_at=time.time() + 3600)
    before = certificate.read_bytes()
    reached = await asyncio.to_thread(joined.reach, line.target)
    assert reached.credentials is not None
    assert reached.credentials.certificate.read_bytes() != before


async def test_a_certificate_that_cannot_be_renewed_serves_to_its_end(shelf: Shelf) -> None:
    line = shelf.line(Kind.CLIENT)
    await joins(line)
    for record in shelf.folder.invitations.folder.iterdir():
        record.unlink()
    due(line.target, renew_at=time.time() - 1)
    assert (await asyncio.to_thread(joined.reach, line.target)).target == line.target
    due(line.target, expires_at=time.time() - 1)
    with pytest.raises(joined.JoinRefused, match="forgotten"):
        await asyncio.to_thread(joined.reach, line.target)


def device(shelf: Shelf, line: JoinLine, name: str) -> Enrolment:
    folder = shelf.folder.root.parent / f"identity-{name}"
    return Enrolment(target=line.enrolment_target, name=name, folder=folder, join=line)


async def test_a_device_joins_and_resumes_after_a_restart(shelf: Shelf) -> None:
    line = shelf.line(Kind.DEVICE)
    enrolment = device(shelf, line, "pi-4")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Identity(enrolment).obtain()
    files = enrolment.credentials
    assert is_issued_by(files.certificate.read_bytes(), authority_of(shelf))
    shelf.folder.invitations.forget("pi-4")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Identity(enrolment).obtain()  # what it has is valid: it asks nobody


async def test_a_device_with_a_stolen_line_gets_nothing(shelf: Shelf) -> None:
    line = shelf.line(Kind.DEVICE)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Identity(device(shelf, line, "pi-4")).obtain()
    thief = Identity(device(shelf, line, "pi-5"), shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(thief.obtain())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not thief.why.startswith("PERMISSION_DENIED: the token was used already"):
            await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()


async def test_who_hangs_up_does_not_make_a_token_good_for_two_keys(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a slow disk: the first call is given up while its record is being written."""
    line, writing = shelf.line(Kind.DEVICE), Event()
    write = Invitations._write

    def slowly(self: Invitations, path: Path, record: Invitation) -> None:
        writing.set()
        time.sleep(1.0)
        write(self, path, record)

    monkeypatch.setattr(Invitations, "_write", slowly)
    first = asyncio.create_task(enrol_at(shelf, line, "pi-4"))
    assert await asyncio.to_thread(writing.wait, PATIENCE_SECONDS)
    first.cancel()
    code, text = await refusal(enrol_at(shelf, line, "pi-5"))
    assert (code, text) == (grpc.StatusCode.PERMISSION_DENIED, USED_WITH_ANOTHER_KEY)
    assert shelf.folder.invitations.devices() == ["pi-4"]


def test_the_authority_and_the_fingerprint_survive_a_restart(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    folder = Folder(tmp_path / "shelf")
    with folder.locked():
        before = folder.authority(now).certificate, folder.enrolment(now).certificate
        folder.renew(folder.authority(now), now)
    again = Folder(tmp_path / "shelf")
    with again.locked():
        assert (again.authority(now).certificate, again.enrolment(now).certificate) == before
    assert again.root.stat().st_mode & 0o077 == 0


def test_the_coordinators_certificate_is_renewed_in_time_and_with_another_authority(
    tmp_path: Path,
) -> None:
    now = datetime.now(UTC)
    folder = Folder(tmp_path / "shelf")
    with folder.locked():
        authority = folder.authority(now)
        at = folder.renew(authority, now)
        first = folder.credentials.certificate.read_bytes()
        assert renewal_time(first) == at == folder.renew(authority, now)
        assert folder.renew(authority, at) > at
        second = folder.credentials.certificate.read_bytes()
        assert second != first
        other = Authority.make("another", now)
        folder.renew(other, now)
        assert is_issued_by(folder.credentials.certificate.read_bytes(), other.certificate)


@pytest.mark.parametrize("days", [100, -1], ids=["behind", "ahead"])
async def test_a_coordinator_whose_clock_is_set_has_another_certificate_in_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """As where a clock goes on where it stopped, until the network says the time. The time of the
    loop passes at once."""
    folder, authority = Folder(tmp_path / "shelf"), Authority.make("shoal", PAST)
    at_first = datetime.now(UTC) - timedelta(days=days)
    with folder.locked():
        folder.renew(authority, at_first)
    before, waited = folder.credentials.certificate.read_bytes(), list[float]()
    pause = asyncio.sleep

    async def pass_at_once(seconds: float) -> None:
        waited.append(seconds)
        await pause(0)

    monkeypatch.setattr(asyncio, "sleep", pass_at_once)
    renewing = asyncio.create_task(keep_renewed(folder, authority, unexpected))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while folder.credentials.certificate.read_bytes() == before:
            assert sum(waited) < A_MOMENT_SECONDS
            await pause(0.01)
    renewing.cancel()
    assert is_fresh(folder.credentials.certificate.read_bytes(), datetime.now(UTC))


async def test_where_a_certificate_cannot_be_written_that_is_said_once_and_tried_again(
    tmp_path: Path,
) -> None:
    folder, said = Folder(tmp_path / "shelf"), list[str]()
    with folder.locked():
        authority = folder.authority(datetime.now(UTC))
    obstacle = folder.root / "coordinator" / "pending"
    obstacle.parent.mkdir()
    obstacle.touch()
    renewing = asyncio.create_task(keep_renewed(folder, authority, said.append, check_seconds=0.01))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not said:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        obstacle.unlink()
        while not folder.credentials.certificate.exists():
            await asyncio.sleep(0.01)
    assert not renewing.done()
    renewing.cancel()
    (reason,) = said
    assert reason.startswith("the coordinator's certificate cannot be renewed: ")


def test_a_folder_is_one_coordinators(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "shelf")
    with folder.locked(), pytest.raises(FolderInUse, match="--folder DIR"), folder.locked():
        raise AssertionError("there are two")


def test_a_coordinators_log_tells_of_jobs_and_devices_unless_it_is_told_not_to(
    tmp_path: Path,
) -> None:
    standalone = Standalone(folder=Folder(tmp_path), host="127.0.0.1", port=7400)
    assert coordinator_process(standalone).command[-2:] == ("--log-level", "info")
    quiet = replace(standalone, arguments=("--log-level", "error"))
    assert coordinator_process(quiet).command[-2:] == ("--log-level", "error")


@pytest.mark.parametrize("years", [50, -50, -3])
async def test_who_joins_with_another_clock_is_told_what_both_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """As a Pi without a battery that has no network yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    there = datetime.now(UTC) + timedelta(days=365 * years)
    monkeypatch.setattr(serving, "_now", lambda: there)
    shelf = Shelf(Folder(tmp_path / "shelf"))
    own = Authority.make("shoal", there)
    standalone = Standalone(folder=shelf.folder, host="127.0.0.1", port=lasting_port(in_a_row=2))
    with standalone.folder.locked():
        listener = await listen(standalone, own)
    shelf.folder.note_address(standalone.host, standalone.port)
    token = shelf.folder.invitations.add(Kind.CLIENT, there, timedelta(hours=1))
    here = f"{datetime.now(UTC):%Y-%m-%d}"
    said = rf"is valid from {there:%Y}-.* and the clock here says {here} \d\d:\d\d UTC: set"
    with pytest.raises(joined.JoinRefused, match=said):
        await joins(shelf.folder.line(token))
    await listener.stop(None)


async def test_a_device_that_was_off_while_its_certificate_ended_gets_another_by_its_old_line(
    shelf: Shelf,
) -> None:
    enrolment = device(shelf, shelf.line(Kind.DEVICE), "pi-4")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await Identity(enrolment).obtain()
        before = enrolment.credentials.certificate.read_bytes()
        note = enrolment.folder / "current" / "identity.json"
        note.write_text(json.dumps(json.loads(note.read_text()) | {"expires_at": time.time() - 1}))
        for record in shelf.folder.invitations.folder.iterdir():  # the line has expired as well
            ended = json.loads(record.read_text()) | {"expires_at": 0.0}
            record.write_text(json.dumps(ended))
        await Identity(enrolment).obtain()
    assert enrolment.credentials.certificate.read_bytes() != before


def test_no_authority_is_made_or_used_by_a_clock_that_is_wrong(tmp_path: Path) -> None:
    folder, now = Folder(tmp_path / "shelf"), datetime.now(UTC)
    unset = datetime.fromtimestamp(600, UTC)
    with folder.locked():
        with pytest.raises(AuthorityUnusable, match="says 1970-01-01: set it first"):
            folder.authority(unset)
        folder.authority(now)
        for other in (unset, now + timedelta(days=4000)):
            with pytest.raises(AuthorityUnusable, match="set"):
                folder.authority(other)


def test_an_authority_that_was_made_by_a_wrong_clock_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = Folder(tmp_path / "shelf"), datetime.now(UTC)
    monkeypatch.setattr(folders, "_EARLIEST", datetime.fromtimestamp(0, UTC))
    with folder.locked():
        folder.authority(datetime.fromtimestamp(600, UTC))
        with pytest.raises(
            AuthorityUnusable, match=r"valid from 1970-01-01 00:05 UTC to .* delete .*/enrol"
        ):
            folder.authority(now)
