"""Einsum: each operand has all axes of the equation, in the order in which they are named there.

Operands whose axes are in another order are copied before anything is computed. Then two at a time
are multiplied as matrices, of which copies are made where axes change places, and of what comes of
it, too; what they came from is let go. An axis of one element counts to the second of the two.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from shoal_compiler.shaped import Shaped, Unknown
from shoal_compiler.workspaces.workspace import Rule, Workspace, numbers

_REST: Final = "..."
"""In an equation, all axes that have no label."""
_Sizes = Mapping[str, int]


def _einsum(shaped: Shaped) -> Workspace:
    terms, result = _labels(shaped)
    axes = [*dict.fromkeys("".join(terms))]
    if any(len(set(term)) < len(term) for term in terms):
        raise Unknown
    operands = [
        dict(zip(term, shaped.input(place), strict=True)) for place, term in enumerate(terms)
    ]
    copied = [
        prod(each.values())
        for term, each in zip(terms, operands, strict=True)
        if [*term] != _ordered(axes, each)
    ]
    left: _Sizes = operands[0]
    made, steps = _ordered(axes, left), [list[int]()]
    for place, right in enumerate(operands[1:], 1):
        before = [prod(left.values())] * (place > 1)
        later = set(result).union(*terms[place + 1 :])
        copies, left = _product(axes, left, right, later)
        made = [*left]
        if place < len(terms) - 1 and made != _ordered(axes, left):
            copies.append(prod(left.values()))
        steps.append([*before, *copies])
    given = prod(left[name] for name in result)
    if len(terms) == 1 and len(result) < len(made):  # what is summed up is there by itself
        steps[-1].append(given)
    if made != [*result]:
        steps[-1].append(given)
    return numbers(shaped, *copied, *max(steps, key=sum))


def _ordered(axes: Sequence[str], operand: _Sizes) -> list[str]:
    return [name for name in axes if name in operand]


def _product(
    axes: Sequence[str], left: _Sizes, right: _Sizes, later: set[str]
) -> tuple[list[int], _Sizes]:
    """What is made for a product, and its axes as they lie. Those that are not needed `later` are
    summed over."""
    copies = []
    summed = [name for name in axes if name in {*left, *right} and name not in later]
    rest = [name for name in axes if name not in summed]
    both = [name for name in rest if left.get(name, 1) > 1 and right.get(name, 1) > 1]
    one = [name for name in rest if left.get(name, 1) > 1 and name not in both]
    other = [name for name in rest if name not in (*both, *one)]
    if [*both, *one, *summed, *other] != axes:
        copies.append(prod(left.values()))
    if [*both, *summed, *other, *one] != axes:
        copies.append(prod(right.values()))
    made = {
        name: max(left.get(name, 1), right.get(name, 1))
        for name in (*both, *one, *other)
        if name in left or name in right
    }
    return [*copies, prod(made.values())], made


def _labels(shaped: Shaped) -> tuple[list[str], str]:
    """Of each operand and of the result; axes that have none are given some. What is not said of
    the result is what one operand alone has, in the order of the alphabet."""
    left, arrow, result = shaped.text("equation").replace(" ", "").partition("->")
    named = left.replace(",", "").replace(_REST, "")
    if not arrow:
        alone = sorted(each for each in set(named) if named.count(each) == 1)
        result = "".join([_REST] * (_REST in left) + alone)
    terms = left.split(",")
    rest = [
        len(shaped.input(place)) - len(term.replace(_REST, "")) if _REST in term else 0
        for place, term in enumerate(terms)
    ]
    given = "".join(chr(ord("\u0100") + number) for number in range(max(rest)))
    terms = [
        term.replace(_REST, given[len(given) - count :])
        for term, count in zip(terms, rest, strict=True)
    ]
    return terms, result.replace(_REST, given)


RULES: Final[Mapping[str, Rule]] = {"Einsum": _einsum}
