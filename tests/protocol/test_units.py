"""Quantities as people write them, against exact fractions."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal_protocol.units import (
    MOST_BYTES,
    QUANTITY_LENGTH,
    counted,
    format_apart,
    format_bytes,
    format_downwards,
    format_need,
    format_number,
    format_upwards,
    listed,
    parse_bytes,
    parse_quantity,
    parse_whole,
)

SCALES = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate("mun", 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}
DIGITS = st.text("0123456789", min_size=1, max_size=12)
NUMBERS = DIGITS | st.builds("{}.{}".format, DIGITS, DIGITS) | st.builds(".{}".format, DIGITS)
EXPONENTS = st.builds(
    "{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), DIGITS
)


def value(number: str, suffix: str) -> Fraction:
    if suffix[:1] in ("e", "E") and suffix not in SCALES:
        return Fraction(number + "0" * number.endswith(".")) * Fraction(10) ** int(suffix[1:])
    return Fraction(number) * SCALES[suffix]


def size_or_refusal(text: str) -> int | str:
    try:
        return parse_bytes(text)
    except ValueError as error:
        return str(error)


@given(st.integers(0, 2 * MOST_BYTES))
@example(MOST_BYTES)
@example(MOST_BYTES + 1)
def test_a_whole_number_is_read_up_to_a_limit(number: int) -> None:
    assert parse_whole(str(number)) == (number if number <= MOST_BYTES else None)
    assert parse_whole(str(number), 255) == (number if number <= 255 else None)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", " 1", "1\n", "1_0", "²", "\u0661", "1.0", "9" * 5000]
)
def test_what_is_no_whole_number_is_none(text: str) -> None:
    assert parse_whole(text) is None


@given(NUMBERS, st.sampled_from([*SCALES]) | st.integers(-99, 99).map("e{}".format))
def test_a_quantity_is_read_exactly(number: str, suffix: str) -> None:
    text = number + suffix
    assert Fraction(parse_quantity(text)) == value(number, suffix)
    if value(number, suffix) <= MOST_BYTES:
        assert parse_bytes(text) == math.ceil(value(number, suffix))
    else:
        with pytest.raises(ValueError, match="more bytes than any machine has"):
            parse_bytes(text)


@given(NUMBERS, EXPONENTS)
@example("1", "e999999999")
@example("1", "e-999999999")
@example("0", "e9999999999999999999999999")
def test_an_exponent_of_any_size_is_read_at_once_or_refused(number: str, exponent: str) -> None:
    size = size_or_refusal(number + exponent)
    if isinstance(size, str):
        assert number[:8] in size
    else:
        assert 0 <= size <= MOST_BYTES


@given(st.text(max_size=2 * QUANTITY_LENGTH))
@example("٣Mi")
@example("-1")
@example("64Mb")
@example("nan")
@example("9" * 10_000_000)
def test_any_text_is_a_quantity_or_refused_in_one_short_line(text: str) -> None:
    size = size_or_refusal(text)
    if isinstance(size, str):
        assert len(size) < 400
        assert "\n" not in size
    else:
        assert re.match(r"[0-9.]", text)
        assert 0 <= size <= MOST_BYTES


@given(st.integers(0, MOST_BYTES))
def test_bytes_are_written_to_a_twentieth_of_their_unit(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(Fraction(number) * scale - size) <= Fraction(scale, 20)


@given(st.integers(0, MOST_BYTES))
def test_bytes_written_upwards_are_at_least_as_many_by_less_than_a_tenth(size: int) -> None:
    number, unit = format_upwards(size).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert 0 <= Fraction(number) * scale - size < Fraction(scale, 10)


@given(st.integers(0, MOST_BYTES))
def test_what_there_is_written_downwards_is_less_than_what_it_lacks_a_byte_for(size: int) -> None:
    number, unit = format_downwards(size).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert 0 <= size - Fraction(number) * scale < Fraction(scale, 10)
    assert format_downwards(size) != format_upwards(size + 1)


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "item", "0 items"), (1, "item", "1 item"), (2, "retry", "2 retries"), (1, "try", "1 try")],
)
def test_a_count_and_its_noun_agree(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.05123, "0.0512"),
        (38.24, "38.2"),
        (999.6, "1000"),
        (1490.0, "1490"),
        (1.67e8, "167000000"),
    ],
)
def test_numbers_for_people_have_three_digits_and_no_exponent(value: float, written: str) -> None:
    assert format_number(value) == written


@given(st.integers(0, MOST_BYTES), st.integers(0, MOST_BYTES))
@example(20 * 1024**2, 20 * 1024**2 - 1)
@example(2**40, 2**40 + 1)
def test_two_sizes_that_differ_are_written_differently(one: int, other: int) -> None:
    texts = format_apart(one, other)
    assert (texts[0] == texts[1]) == (one == other)
    if format_bytes(one) != format_bytes(other) or one == other:
        assert texts == (format_bytes(one), format_bytes(other))


def test_a_need_is_written_as_more_than_a_budget_that_is_too_little_for_it() -> None:
    budget = 60 << 20
    assert format_bytes(budget) == "60 MiB"
    assert format_need(budget + 1, budget + 1) == "60.1 MiB resident"
    assert format_need(budget + 1, 2 * budget + 1) == (
        "at least 60.1 MiB in blocks, 120.1 MiB to be resident"
    )


def test_a_long_list_is_cut_and_says_how_much_is_left() -> None:
    names = ["pi-4", "pi-5", "jetson"]

    assert listed(names, 3) == "pi-4, pi-5, jetson"
    assert listed(names, 1, "; ") == "pi-4 and 2 more"
    assert listed([], 3) == ""
