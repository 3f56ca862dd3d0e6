"""Why `shoal plan` predicts no times, and what to give so that it does."""

from pathlib import Path

import pytest

from made_models import Made
from shoal_cli.commands.app import run_app

TWO = "g (int64[batch, n] ids, int64[batch, n] mask) => (int64[batch, n] y) { y = Mul (ids, mask) }"
FOUND = "g (float[8] x, int64 k) => (int64[1, m] y) { at = NonZero (x) y = Add (at, k) }"


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        (TWO, [], "or the shapes of ids [batch, n], mask [batch, n]\n"),
        (TWO, ["--shape", "ids=1,64"], "or the shapes of mask [batch, n]\n"),
        (FOUND, [], "some sizes follow from what the inputs hold"),
    ],
)
def test_only_shapes_that_can_be_given_and_are_not_yet_are_asked_for(
    text: str, given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Made(text=text, shapes={}).save(tmp_path)
    work = ("--work", str(tmp_path / "work"))
    assert run_app(["plan", str(path), "--devices", "1", *work, *given]) == 0
    assert said in capsys.readouterr().err
