"""A cut is the same in every process: what a worker described, another delivers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from made_models import Made, weight
from shoal_protocol.partition import document_from_json

LAYERS, SIDES, WIDTH = 24, 5, 512


def half_layers() -> Made:
    """Layers of half precision, and inputs of several sizes that are needed for some time."""
    sides = [f"side{number}" for number in range(SIDES)]
    given = ", ".join(
        f"float16[{10_000 * (3 + 2 * number)}] {each}" for number, each in enumerate(sides)
    )
    lines, value = [], "x"
    for layer in range(LAYERS):
        lines.append(f"y{layer} = MatMul({value}, W{layer})")
        value = f"y{layer}"
        if layer >= LAYERS - SIDES:
            side = sides[layer - LAYERS]
            lines.append(f"m{layer} = ReduceMax<keepdims=0>({side})")
            lines.append(f"z{layer} = Mul({value}, m{layer})")
            value = f"z{layer}"
    text = f"g (float16[4, {WIDTH}] x, {given}) => (float16[4, {WIDTH}] {value})"
    body = "\n".join(lines)
    weights = {f"W{n}": weight(WIDTH, WIDTH, seed=n).astype(np.float16) for n in range(LAYERS)}
    return Made(text=f"{text} {{\n{body}\n}}", weights=weights)


def cut_by_a_process(path: Path, seed: int) -> str:
    """The document of a cut; strings have other hashes with each seed."""
    command = [sys.executable, "-m", "shoal_cli", "partition", str(path), "--fragments", "1"]
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [*command, "--document"], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_every_process_makes_the_same_fragments_of_a_model_of_half_precision(
    tmp_path: Path,
) -> None:
    path = half_layers().save(tmp_path)
    first, *others = (cut_by_a_process(path, seed) for seed in range(4))
    (fragment,) = document_from_json(first).fragments
    assert fragment.least_bytes < fragment.resident_bytes, "it has no blocks"
    assert others == [first] * 3
