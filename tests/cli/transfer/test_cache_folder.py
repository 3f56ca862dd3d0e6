"""Where a user's models, runs and measurements are kept."""

from pathlib import Path

import pytest

from shoal_cli.transfer.cache_folder import default_cache


def test_it_is_in_the_users_cache_unless_a_variable_names_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache({}) == tmp_path / ".cache/shoal"
    assert default_cache({"XDG_CACHE_HOME": "/fast"}) == Path("/fast/shoal")


def test_a_relative_place_is_ignored_as_the_specification_of_these_variables_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache({"XDG_CACHE_HOME": "here"}) == tmp_path / ".cache/shoal"
