"""A join line is one word that says where to join, whom to believe and who is invited."""

import shlex
from pathlib import Path

import pytest

from shoal_protocol.join_lines import JoinLine, parse_join_line, read_join_line

FINGERPRINT, TOKEN = "ab" * 32, "k2ju0diBV3TGMr20HyPPD94ALVXYFv-_"


@pytest.mark.parametrize("host", ["192.168.1.10", "shelf.local", "[fd00::10]"])
def test_a_line_is_read_as_it_was_written(host: str) -> None:
    line = JoinLine(host=host, port=7400, fingerprint=FINGERPRINT, token=TOKEN)
    assert parse_join_line(f"{line}\n") == line
    assert (line.target, line.enrolment_target) == (f"{host}:7400", f"{host}:7401")


@pytest.mark.parametrize("host", ["192.168.1.10", "shelf.local"])
def test_a_line_needs_no_quotes_in_a_shell(host: str) -> None:
    line = str(JoinLine(host=host, port=7400, fingerprint=FINGERPRINT, token=TOKEN))
    assert shlex.split(line) == [line]
    assert not set(line) & set("?*[]{}~$!&;|<>()#`'\"\\ ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "192.168.1.10:7400",
        f"shoal://192.168.1.10/{FINGERPRINT}/{TOKEN}",
        f"shoal://192.168.1.10:7400/{FINGERPRINT[1:]}/{TOKEN}",
        f"shoal://192.168.1.10:7400/{FINGERPRINT}/",
        f"shoal://a b:7400/{FINGERPRINT}/{TOKEN}",
        f"shoal://fd00::10:7400/{FINGERPRINT}/{TOKEN}",
    ],
)
def test_anything_else_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="this is no join line") as caught:
        parse_join_line(text)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "host", ["", "a b", "a/b", "fd00::10", "[shelf]", "[10.0.0.1:74]", "$(id)", "h\u00f6he"]
)
def test_a_host_that_no_line_can_name_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is no host such as"):
        JoinLine(host=host, port=7400, fingerprint=FINGERPRINT, token=TOKEN)


@pytest.mark.parametrize("port", [0, 65535, 99999])
def test_a_port_has_one_after_it(port: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 65534"):
        parse_join_line(f"shoal://shelf:{port}/{FINGERPRINT}/{TOKEN}")


def test_what_is_neither_a_line_nor_a_file_with_one_is_named(tmp_path: Path) -> None:
    line = JoinLine(host="shelf.local", port=7400, fingerprint=FINGERPRINT, token=TOKEN)
    (tmp_path / "line").write_text(f"{line}\n")
    assert read_join_line(str(tmp_path / "line")) == read_join_line(str(line)) == line
    with pytest.raises(ValueError, match="this is no join line"):
        read_join_line("")
    with pytest.raises(ValueError, match=r"hello: No such file .*; a join line begins with shoal:"):
        read_join_line("hello")
