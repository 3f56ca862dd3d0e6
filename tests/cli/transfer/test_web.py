"""A web server is read from and written to, and not believed blindly."""

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.transfer.carrying import LARGE, Shaky, carry, fill, read
from cli.transfer.web_server import Web
from shoal_cli.transfer.addresses import Access
from shoal_cli.transfer.copying import Copied, copy
from shoal_cli.transfer.places import Entry, TransferBroken, TransferRefused
from shoal_cli.transfer.web import WebPlace, basic, open_session


def content_digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


async def test_a_file_of_the_web_is_read_on_after_a_break(web: Web, access: Access) -> None:
    content = web.files["/lines/a b.npz"] = os.urandom(5 << 20)
    web.break_after, web.breaks = 2 << 20, 2
    copied = await carry(f"{web.url}/lines/a%20b.npz?signature=1", "out", access)
    assert copied == Copied(files=1, bytes=len(content), skipped=0)
    assert read(access.base / "out") == {"a b.npz": content}
    asked, *wanted = (each for path, each in web.asked if path == "/lines/a%20b.npz?signature=1")
    assert (asked, wanted[0], len(wanted)) == ("bytes=0-0", None, 3)
    starts = [int(str(each).removeprefix("bytes=")[:-1]) for each in wanted[1:]]
    # What was on the wire when it broke may be lost; what came is not asked for again.
    assert 0 < starts[0] <= 2 << 20
    assert starts[0] < starts[1] <= 4 << 20
    assert (await carry(f"{web.url}/lines/a%20b.npz?signature=1", "out", access)).skipped == 1


async def test_a_server_without_ranges_is_read_from_its_start(web: Web, access: Access) -> None:
    content = web.files["/a.npz"] = os.urandom(3 << 20)
    web.ranges, web.break_after, web.breaks = False, 1 << 20, 2
    # The first break cuts the request that asks for the size: nothing of it is read anyway.
    await carry(f"{web.url}/a.npz", "out", access)
    assert read(access.base / "out") == {"a.npz": content}


@pytest.mark.parametrize(
    ("statuses", "error"),
    [
        ([404], TransferRefused),
        ([403], TransferRefused),
        ([503], TransferBroken),
        ([206, 410], TransferRefused),
        ([206, *[500] * 4], TransferBroken),
    ],
)
async def test_statuses_say_whether_to_try_again(
    web: Web, access: Access, statuses: list[int], error: type[Exception]
) -> None:
    web.files["/a.npz"] = b"content"
    known: list[Entry] = []

    class Known(WebPlace):
        async def entries(self) -> Sequence[Entry]:
            return known or await WebPlace.entries(self)

    source = Known("a.npz", open_session(), url=f"{web.url}/a.npz")
    try:
        if statuses[0] == 206:  # the first answer is good, it is the second that is not
            known.extend(await source.entries())
        web.statuses = [status for status in statuses if status != 206]
        with pytest.raises(error, match=f"the server answers {statuses[-1]}"):
            await copy(source, access.target("out"))
    finally:
        await source.close()


async def test_credentials_do_not_follow_to_another_host(
    web: Web, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_BEARER_TOKEN", "secret")
    web.files["/real.npz"] = b"content"
    web.redirects["/a.npz"] = web.url.replace("127.0.0.1", "localhost") + "/real.npz"
    await carry(f"{web.url}/a.npz", "out", access)
    sent = {
        (headers["Host"].partition(":")[0], headers.get("Authorization")) for headers in web.headers
    }
    assert sent == {("127.0.0.1", "Bearer secret"), ("localhost", None)}


async def test_a_redirect_into_the_clear_is_refused_before_anything_is_asked_there(
    web: Web, access: Access
) -> None:
    for location in ("http://192.0.2.1/latest/meta-data", "ftp://192.0.2.1/a.npz"):
        web.redirects["/a.npz"] = location
        with pytest.raises(TransferRefused, match=r"127\.0\.0\.1 redirects to .*192\.0\.2\.1"):
            await carry(f"{web.url}/a.npz", "out", access)


async def test_redirects_without_end_are_refused(web: Web, access: Access) -> None:
    web.redirects["/a.npz"] = f"{web.url}/a.npz"
    with pytest.raises(TransferRefused):
        await carry(f"{web.url}/a.npz", "out", access)


async def test_results_are_put_on_a_web_server(
    web: Web, access: Access, coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_USERNAME", "me")
    monkeypatch.setenv("HTTP_PASSWORD", "secret")
    files = fill(access.base / "volume/jobs/ocr/out", 0, 10, LARGE)
    web.statuses = [503]  # which goes by
    copied = await carry(f"{coordinator}/jobs/ocr/out", f"{web.url}/results/", access)
    assert copied == Copied(files=3, bytes=LARGE + 10, skipped=0)
    assert web.files == {f"/results/{name}": content for name, content in files.items()}
    assert {headers["Authorization"] for headers in web.headers} == {basic("me", "secret")}
    assert not [headers for headers in web.headers if "Transfer-Encoding" in headers]
    digests = {headers["Content-Digest"] for headers in web.headers}
    assert digests == {content_digest(content) for content in files.values()}


async def test_what_breaks_off_is_not_put_on_a_web_server(
    web: Web, access: Access, tmp_path: Path
) -> None:
    fill(tmp_path / "in", LARGE)
    source = Shaky("in", tmp_path / "in")
    source.breaks = 100
    target = access.target(web.url)
    with pytest.raises(TransferBroken, match="the line went dead"):
        await copy(source, target)
    await target.close()
    assert not web.files


@pytest.mark.parametrize(
    ("status", "error"), [(403, TransferRefused), (405, TransferRefused), (507, TransferBroken)]
)
async def test_a_web_server_that_takes_nothing_is_told_of(
    web: Web, access: Access, tmp_path: Path, status: int, error: type[Exception]
) -> None:
    fill(tmp_path / "in", 10)
    web.statuses = [status] * 4
    with pytest.raises(error, match=f"the server answers {status}"):
        await carry("in", web.url, access)
    web.statuses = []
    web.redirects["/out/000.npz"] = "https://example.com/"
    with pytest.raises(TransferRefused, match=r"redirects to https://example\.com/; write that"):
        await carry("in", f"{web.url}/out", access)
