"""Entropy weights, EDAS, ARAS and MABAC as the papers write them: one value after the other.

Written from the formulas, without looking at the product's code, and in loops where that has
arrays, so that both would have to be wrong in the same way. `better` is 1 for a criterion of which
more is better, -1 for one of which less is.
"""

from collections.abc import Sequence
from math import log, prod

Rows = Sequence[Sequence[float]]


def entropy_weights(rows: Rows) -> list[float]:
    """Shannon, 1948; as weights: Hwang and Yoon, 1981."""
    diversities = []
    for column in zip(*rows, strict=True):
        shares = [value / sum(column) for value in column]
        entropy = -sum(share * log(share) for share in shares) / log(len(rows))
        diversities.append(1 - entropy)
    return [diversity / sum(diversities) for diversity in diversities]


def edas(rows: Rows, weights: Sequence[float], better: Sequence[float]) -> list[float]:
    """Keshavarz Ghorabaee, Zavadskas, Olfat, Turskis: Informatica 26 (2015)."""
    average = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    positive, negative = [], []
    for row in rows:
        above = below = 0.0
        for value, mean, weight, sign in zip(row, average, weights, better, strict=True):
            distance = (value - mean if sign > 0 else mean - value) / mean
            above += weight * max(0.0, distance)
            below += weight * max(0.0, -distance)
        positive.append(above)
        negative.append(below)
    return [
        (above / max(positive) + 1 - below / max(negative)) / 2
        for above, below in zip(positive, negative, strict=True)
    ]


def aras(rows: Rows, weights: Sequence[float], better: Sequence[float]) -> list[float]:
    """Zavadskas and Turskis: Technological and Economic Development of Economy 16 (2010)."""
    columns = list(zip(*rows, strict=True))
    optimal = [
        max(column) if sign > 0 else min(column)
        for column, sign in zip(columns, better, strict=True)
    ]
    sums = [0.0] * (len(rows) + 1)
    for best, column, weight, sign in zip(optimal, columns, weights, better, strict=True):
        stated = [value if sign > 0 else 1 / value for value in (best, *column)]
        for index, value in enumerate(stated):
            sums[index] += weight * value / sum(stated)
    return [value / sums[0] for value in sums[1:]]


def mabac(rows: Rows, weights: Sequence[float], better: Sequence[float]) -> list[float]:
    """Pamucar and Cirovic: Expert Systems with Applications 42 (2015)."""
    scores = [0.0] * len(rows)
    for column, weight, sign in zip(zip(*rows, strict=True), weights, better, strict=True):
        most, least = max(column), min(column)
        normalised = [
            (value - least) / (most - least) if sign > 0 else (value - most) / (least - most)
            for value in column
        ]
        weighted = [weight * value + weight for value in normalised]
        border = prod(weighted) ** (1 / len(rows))
        scores = [score + value - border for score, value in zip(scores, weighted, strict=True)]
    return scores
