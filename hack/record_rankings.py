"""Record what the package pymcdm says of random decision matrices, as a file for the tests.

The tests check the rankings against these numbers and against the papers' formulas, so that pymcdm
(and with it pandas, scipy and matplotlib) is needed only where the numbers are made anew:

    uv run --with pymcdm==1.4.0 --with numpy hack/record_rankings.py
"""

import json
from importlib import metadata
from pathlib import Path

import numpy as np
from pymcdm import methods, weights

TARGET = Path(__file__).parents[1] / "tests/coordinator/dispatch/rankings.json"
SEED = 20_260_131
CASES = 12
TYPES = [1, -1, 1, -1, -1]
"""Of the columns: 1 for a benefit, -1 for a cost."""


def main() -> None:
    """Write the file: matrices of 2 to 13 rows, values from 0.5 to 100."""
    chance = np.random.default_rng(SEED)
    types = np.array(TYPES, dtype=np.float64)
    cases = []
    for rows in range(2, 2 + CASES):
        matrix = np.round(chance.uniform(0.5, 100, (rows, len(TYPES))), 3)
        entropy = weights.entropy_weights(matrix)
        case = {"matrix": matrix.tolist(), "weights": entropy.tolist()}
        for method in (methods.EDAS(), methods.ARAS(), methods.MABAC()):
            scores = method(matrix, entropy, types, validation=False)
            case[type(method).__name__.lower()] = scores.tolist()
        cases.append(case)
    made_by = f"pymcdm {metadata.version('pymcdm')}, seed {SEED}"
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = f'"made_by": {json.dumps(made_by)}, "types": {json.dumps(TYPES)}'
    TARGET.write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
