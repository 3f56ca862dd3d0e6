"""What a model takes in memory and time in less than it needs, against ONNX Runtime and others.

    python bench/memory.py [--model NAME] [--part PART] [--quick] [--json FILE] [--pictures FOLDER]

Each model is one fragment, as `shoal run MODEL --devices 1 --budget BUDGET` makes it, run by the
agent's own runtime. The parts, each in a module `memory_PART`:

curve    memory and time within several grants, beside those of ONNX Runtime, ncnn and OpenVINO;
changes  what it takes to prepare a fragment and to adopt another grant; budgets that change and
         models that alternate hundreds of times;
limits   a memory cgroup of floor + budget, where a default load is killed;
agents   three real agents with a fifth of what their fragments need.

ncnn and OpenVINO come as requirements/bench.txt; without them there are no figures of theirs.
"""

from argparse import Namespace
from collections.abc import Callable

from measurement import Report, argument_parser, existing_folder, shared
from memory_agents import agents
from memory_changes import changes
from memory_curve import curve
from memory_items import SUBJECTS
from memory_limits import limits

PARTS: dict[str, Callable[[Report, Namespace], None]] = {
    "curve": curve,
    "changes": changes,
    "limits": limits,
    "agents": agents,
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", action="append", choices=[*SUBJECTS], help="only these models")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="only these parts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--pictures", type=existing_folder, metavar="FOLDER", help="draw each model's curve"
    )
    options = parser.parse_args()
    report = Report(shared(options))
    for part in options.part or (["curve"] if options.quick else PARTS):
        PARTS[part](report, options)
    report.finish()


if __name__ == "__main__":
    main()
