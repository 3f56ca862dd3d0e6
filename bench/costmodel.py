"""How well the work that is reckoned for nodes and runs of nodes predicts their time.

Every model is run with ONNX Runtime's profiler, and each kernel's shortest time is given to the
nodes of the model that it computes. The estimator (`shoal_compiler.work`) learns from them; it is
judged on models that it has not seen: one family of models is left out at a time. The peer is the
roofline alone, with the constant that suits the other models best.

Whether amounts of work measured on one machine hold on another is asked of published measurements
(bench/profiles/scission): the times of a model's blocks on one machine, multiplied by a constant,
against those on another.

`--write` trains on all models, and writes what the compiler reads.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from costmodel_samples import Rates, Sample, samples_of
from measurement import VALUE, Report, argument_parser, measured, shared
from sklearn.ensemble import GradientBoostingRegressor

from shoal_compiler.work import FEATURES, Estimator

HERE = Path(__file__).parent
WORK = HERE.parent / "compiler" / "shoal_compiler" / "work.json"
FAMILIES = {
    "resnet": "resnet18 resnet50 resnet101 resnet152 fcn_resnet50",
    "bert": "minilm_l6 distilbert_sst2 bert_small",
    "mobile": "mobilenet_v1 mobilenet_v2 efficientnet_b1",
    "ppocr": "ppocr_rec ppocr_det ppocr_cls",
    "vad": "silero_vad_op15 silero_vad_openvino silero_vad_half silero_vad_sequence",
    "gpt": "gpt2",
    "vgg": "vgg19",
    "vit": "vit_base_16",
    "yolo": "yolov3",
    "squeezenet": "squeezenet1_1",
    "magika": "magika",
}
QUICK = ("resnet18", "bert_small", "mobilenet_v2", "ppocr_rec", "squeezenet1_1", "magika")
RUNS = 15
DRAWN = 40
"""Runs of consecutive nodes that are drawn of each model."""
SMALL = 100
"""One that takes less than a part in so many of the model's time is not judged."""
LARGEST_RATIO = 30.0


@dataclass(frozen=True)
class Model:
    """A model's nodes, by their features, their nominal times and their measured ones."""

    name: str
    family: str
    features: Any
    nominal: Any
    seconds: Any

    @classmethod
    def of(cls, name: str, family: str, rates: Rates, samples: Sequence[Sample]) -> "Model":
        amounts = np.array([each.amounts for each in samples], float)
        return cls(
            name,
            family,
            np.array([each.features for each in samples]),
            (amounts / np.array(rates)).sum(axis=1),
            np.array([each.seconds for each in samples]),
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="train on all, write work.json")
    options = parser.parse_args()
    report = Report(shared(options))
    models = _measured(report, QUICK if options.quick else None)
    if options.write:
        _write(_trained(models))
        report.note(f"wrote {WORK}")
    _judge(report, models)
    for name in ("mobilenet", "resnet50", "vgg16", "densenet121"):
        _transfer(report, name)
    report.finish()


def _measured(report: Report, only: Sequence[str] | None) -> list[Model]:
    """The models, by rates of this machine that are the median of those found beside each."""
    found: list[tuple[str, str, Rates, Sequence[Sample]]] = []
    for family, names in FAMILIES.items():
        for name in names.split():
            if only is None or name in only:
                rates, samples = samples_of(name, RUNS)
                seconds = sum(each.seconds for each in samples)
                report.note(f"{name}: {len(samples)} nodes, {seconds:.4f} s")
                found.append((name, family, rates, samples))
    common = tuple(median(each) for each in zip(*(rates for _, _, rates, _ in found), strict=True))
    report.note("rates: " + ", ".join(f"{each / 1e9:.1f}" for each in common) + " G/s")
    return [Model.of(name, family, common, samples) for name, family, _, samples in found]


def _trained(models: Sequence[Model]) -> Estimator:
    """Each model counts alike, each of its nodes by its nominal time: what the estimate of a whole
    model errs is what its largest nodes err."""
    rows = np.concatenate([each.features for each in models])
    ratios = np.concatenate([each.seconds / np.maximum(each.nominal, 1e-12) for each in models])
    weights = np.concatenate([each.nominal / each.seconds.sum() for each in models])
    boosted = GradientBoostingRegressor(
        n_estimators=150,
        max_depth=4,
        learning_rate=0.08,
        subsample=0.7,
        min_samples_leaf=4,
        random_state=0,
    ).fit(rows, np.minimum(ratios, LARGEST_RATIO), sample_weight=weights)
    base = float(boosted.init_.constant_[0][0])
    trees = [list(_nodes(each[0].tree_, boosted.learning_rate)) for each in boosted.estimators_]
    return Estimator(base, trees)


def _nodes(tree: Any, rate: float) -> Iterator[list[float]]:
    """A tree as `Estimator` reads it."""
    for number in range(tree.node_count):
        left, right = int(tree.children_left[number]), int(tree.children_right[number])
        if left < 0:
            yield [round(rate * float(tree.value[number][0][0]), 6)]
        else:
            # What is compared is of single precision there.
            threshold = float(np.float32(tree.threshold[number]))
            yield [int(tree.feature[number]), round(threshold, 6), left, right]


def _write(estimator: Estimator) -> None:
    written = {"features": FEATURES, "base": estimator.base, "trees": estimator.trees}
    WORK.write_text(json.dumps(written, separators=(",", ":")) + "\n")


def _judge(report: Report, models: Sequence[Model]) -> None:
    """Errors on models of a family that was left out."""
    errors: Mapping[str, list[float]] = {"whole": [], "runs": []}
    peers: Mapping[str, list[float]] = {"whole": [], "runs": []}
    for family in dict.fromkeys(each.family for each in models):
        known = [each for each in models if each.family != family]
        estimator = _trained(known)
        constant = median(each.seconds.sum() / each.nominal.sum() for each in known)
        for model in models:
            if model.family == family:
                ratios = estimator.estimate(model.features)
                for found, predicted in (
                    (errors, ratios * model.nominal),
                    (peers, constant * model.nominal),
                ):
                    whole = float(predicted.sum() / model.seconds.sum() - 1)
                    found["whole"].append(abs(whole))
                    found["runs"] += [abs(each) for each in _errors_of_runs(model, predicted)]
                report.note(f"{model.name}: not seen, {errors['whole'][-1]:.0%} off")
    titles = {"whole": "whole models that were not seen", "runs": "runs of their nodes"}
    for name, title in titles.items():
        report.add(
            measured(f"{title}: error", errors[name], unit="of the time", goal=VALUE <= 0.15)
        )
        report.add(measured(f"{title}: error of a roofline", peers[name], unit="of the time"))


def _errors_of_runs(model: Model, predicted: Any) -> Iterator[float]:
    drawn = random.Random(model.name)  # noqa: S311 - no secret
    count = len(model.seconds)
    for _ in range(DRAWN):
        start = drawn.randrange(count)
        end = drawn.randrange(start, count) + 1
        taken = model.seconds[start:end].sum()
        if taken * SMALL > model.seconds.sum():
            yield float(predicted[start:end].sum() / taken - 1)


def _transfer(report: Report, name: str) -> None:
    """Blocks on one machine as work, on another as time."""
    machines = json.loads((HERE / "profiles" / "scission" / f"{name}.json").read_text())
    errors = []
    for one, other in permutations(_times(machines), 2):
        rate = sum(other) / sum(one)
        total = sum(other)
        errors += [
            abs(a * rate / b - 1) for a, b in zip(one, other, strict=True) if b * SMALL > total
        ]
    report.add(measured(f"{name}: a block's time by another machine's", errors, unit="of the time"))


def _times(machines: Mapping[str, Any]) -> list[list[float]]:
    return [
        [row[2] for row in rows] for name, rows in machines["machines"].items() if "gpu" not in name
    ]


if __name__ == "__main__":
    main()
