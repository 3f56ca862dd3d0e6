"""docs/api.md says what the declarations say."""

from pathlib import Path

from shoal_api.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_reference_in_docs_is_what_the_declarations_say() -> None:
    advice = "run: python -m shoal_api.reference > docs/api.md"
    assert DOCUMENT.read_text() == reference(), advice
