"""Addresses in local mode: a path on this machine, inside of its claim."""

from pathlib import Path

import pytest

from shoal_cli.transfer.addresses import AddressRefused, resolve_uri


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("pvc://models/rec.onnx", "/base/models/rec.onnx"),
        ("pvc://models", "/base/models"),
        ("pvc://lines/in/more", "/data/lines/in/more"),
        ("file:///abs/a%20b", "/abs/a b"),
        ("file:///abs/run%231", "/abs/run#1"),
        ("run#1/in?", "/base/run#1/in?"),
        ("file://localhost/abs", "/abs"),
        ("lines/in", "/base/lines/in"),
        ("../in", "/base/../in"),
        ("/abs/in", "/abs/in"),
    ],
)
def test_an_address_is_a_path(uri: str, path: str) -> None:
    assert resolve_uri(uri, Path("/base"), {"lines": Path("/data/lines")}) == Path(path)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("pvc://models/../../etc/passwd", "leaves the claim models"),
        ("pvc://models//etc/passwd", "leaves the claim models"),
        ("pvc://../x", "write pvc://CLAIM/PATH"),
        ("pvc:///x", "write pvc://CLAIM/PATH"),
        ("pvc://", "write pvc://CLAIM/PATH"),
        ("file://host/x", "write file:///ABSOLUTE/PATH"),
        ("file://x", "write file:///ABSOLUTE/PATH"),
        ("file:///data/run#1", "write %3F for . and %23 for #"),
        ("file:///data/run?", "write %3F for . and %23 for #"),
        ("s3://bucket/key", "s3:// names no file of this machine"),
        ("https://example.org/m.onnx", "https:// names no file of this machine"),
        ("a\0b", "zero byte"),
    ],
)
def test_other_addresses_are_refused_with_advice(uri: str, reason: str) -> None:
    with pytest.raises(AddressRefused, match=reason):
        resolve_uri(uri, Path("/base"), {})


def test_a_link_may_not_lead_out_of_its_claim(tmp_path: Path) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "claim" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "claim" / "in").symlink_to(tmp_path / "claim" / "real")
    with pytest.raises(AddressRefused, match="a link leads out of the claim"):
        resolve_uri("pvc://claim/out", tmp_path, {})
    assert resolve_uri("pvc://claim/in", tmp_path, {}) == tmp_path / "claim" / "in"


def test_a_claim_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "claim").symlink_to(tmp_path / "data")
    assert resolve_uri("pvc://claim/x", tmp_path, {}) == tmp_path / "claim" / "x"
