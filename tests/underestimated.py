"""A model that needs more memory than any plan can know."""

from pathlib import Path

import numpy as np

from made_models import Made, Tensors, weight

LAYERS = 24
HIDDEN = 2_800_000


def underestimated() -> Made:
    """Layers of 1 MiB each; the first node makes 11 MB out of a number that only an input has.

    With 16 MiB for a device it takes a finer cut than the plan's.
    """
    return Made(
        text="agraph (float[1, 512] x, int64[1] n) => (float[1, 512] y) {\n"
        "  x1 = ReduceMax <keepdims = 0> (x)\n"
        "  many = Expand (x1, n)\n"
        "  one = ReduceMax <keepdims = 0> (many)\n"
        "  t0 = Add (x, one)\n"
        + "\n".join(
            f"  {'y' if layer == LAYERS else f't{layer}'} = MatMul (t{layer - 1}, W{layer})"
            for layer in range(1, LAYERS + 1)
        )
        + "\n}",
        weights={f"W{layer}": weight(512, 512, seed=layer) for layer in range(1, LAYERS + 1)},
        shapes={"x": (1, 512)},
        feeds={"n": np.array([HIDDEN])},
    )


def write_inputs(folder: Path, items: int) -> list[Tensors]:
    """Inputs in files of one item each; also as arrays."""
    folder.mkdir(parents=True)
    made: list[Tensors] = []
    for item in range(items):
        x = np.random.default_rng(item).random((1, 512), np.float32)
        made.append({"x": x, "n": np.array([HIDDEN])})
        np.savez(folder / f"{item}.npz", x=x, n=np.array([HIDDEN]))
    return made
