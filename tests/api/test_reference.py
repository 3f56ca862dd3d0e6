"""The reference of the kinds says what the declarations say."""

from pathlib import Path

import pytest

from kind_reference import pages
from shoal_api.kinds import KINDS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_introduction_leads_to_a_page_for_each_kind() -> None:
    introduction = pages()["api.md"]
    paths = [f"kinds/{names.singular}.md" for names in KINDS.values()]
    assert [path for path in paths if f"]({path})" not in introduction] == []
    assert pages().keys() == {"api.md", *paths}


@pytest.mark.parametrize("name", pages())
def test_a_page_in_docs_is_what_the_declarations_say(name: str) -> None:
    assert (DOCS / name).read_text() == pages()[name], "run: make generate"
