"""Writes the Grafana dashboards of the chart; with --check, says what is stale.

.venv/bin/python hack/dashboards/write.py [--check]
"""

import sys
from pathlib import Path
from typing import Final

from boards import BOARDS
from panels import as_json

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "helm/shoal/dashboards"


def main() -> None:
    wanted = {f"{FOLDER}/{board.name}.json": as_json(board) for board in BOARDS}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.json")}
    if "--check" not in sys.argv[1:]:
        for name in there - wanted.keys():
            (ROOT / name).unlink()
        for name, text in wanted.items():
            (ROOT / name).write_text(text)
        return
    stale = {name for name in there & wanted.keys() if (ROOT / name).read_text() != wanted[name]}
    stale |= there ^ wanted.keys()
    if stale:
        raise SystemExit(f"not current: {', '.join(sorted(stale))}; run `make generate`")


if __name__ == "__main__":
    main()
