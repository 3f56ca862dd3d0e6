"""Holds an example to what the README says of it: its results are the whole model's to 1e-5.

python examples/check.py REPORT
"""

import json
import sys
from pathlib import Path

LARGEST_DIFFERENCE = 1e-5
"""Absolute, over every element of every output."""


def main(report: Path) -> None:
    for job in json.loads(report.read_bytes())["jobs"]:
        difference = job["max_abs_diff"]
        if difference is None or difference > LARGEST_DIFFERENCE:
            sys.exit(
                f"job {job['name']} differs by {difference} from the whole model; "
                f"at most {LARGEST_DIFFERENCE:g} is promised"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
