"""What a thousand InferenceJobs on two hundred Devices cost the operator, on a real control plane.

The control plane is real (etcd, API server, controller-manager, scheduler), and so is the operator,
under its own account. Nodes, pods and the coordinator are simulated (`simulated_fleet`,
`simulated_coordinator`), so that the control plane's side of the work is measured. Every job
goes all the way: plan, a worker that carries inputs in, the run, a worker that carries results out.

    .venv/bin/python bench/operator_scale.py [--quick] [--json FILE] [--jobs N] [--devices N]

It is not called operator.py: a script's folder comes first on the path, and the standard library's
module of that name would be hidden from every other bench.
"""

import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from measurement import Report, argument_parser, shared

ROOT: Final = Path(__file__).resolve().parent.parent


def main() -> None:
    """Print a table."""
    # What makes clusters, and what starts operators, are not part of what is installed.
    sys.path += [str(ROOT / "hack" / "cluster"), str(ROOT / "tests")]
    from scale_story import FULL, QUICK, measure  # noqa: PLC0415 - needs the path

    from shoal_cluster import MachineLacks  # noqa: PLC0415 - needs the path

    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, metavar="N", help="so many InferenceJobs")
    parser.add_argument("--devices", type=int, metavar="N", help="so many Devices")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(size, jobs=options.jobs or size.jobs, devices=options.devices or size.devices)
    report = Report(shared(options))
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(measure(report, size, Path(folder)))
        except MachineLacks as lacking:
            report.note(f"not run: {lacking}")
            return
    report.finish()


if __name__ == "__main__":
    main()
