"""A model that needs more memory than any plan can know."""

from pathlib import Path

import numpy as np

from made_models import Made, Tensors, weight

LAYERS = 12
HIDDEN = 3_600_000


def underestimated() -> Made:
    """Layers of 1 MiB each, which come with the item, so that nothing can let go of them while it
    runs; the first node makes 14 MB out of a number that only an input has.

    With 16 MiB for a device it takes a finer cut than the plan's.
    """
    layers = range(1, LAYERS + 1)
    inputs = ", ".join(f"float[512, 512] W{layer}" for layer in layers)
    return Made(
        text=f"agraph (float[1, 512] x, int64[1] n, {inputs}) => (float[1, 512] y) {{\n"
        "  x1 = ReduceMax <keepdims = 0> (x)\n"
        "  many = Expand (x1, n)\n"
        "  one = ReduceMax <keepdims = 0> (many)\n"
        "  t0 = Add (x, one)\n"
        + "\n".join(
            f"  {'y' if layer == LAYERS else f't{layer}'} = MatMul (t{layer - 1}, W{layer})"
            for layer in layers
        )
        + "\n}",
    )


def write_inputs(folder: Path, items: int, first: int = HIDDEN) -> list[Tensors]:
    """Inputs in files of one item each; also as arrays. `first`: the number in the first one."""
    folder.mkdir(parents=True)
    layers = {f"W{layer}": weight(512, 512, seed=layer) for layer in range(1, LAYERS + 1)}
    made: list[Tensors] = []
    for item in range(items):
        x = np.random.default_rng(item).random((1, 512), np.float32)
        number = np.array([HIDDEN if item else first])
        made.append({"x": x, "n": number, **layers})
        np.savez(folder / f"{item}.npz", allow_pickle=False, x=x, n=number, **layers)
    return made


def spoken(layers: int = 16, rows: int = 8) -> Made:
    """Layers of 1 MiB each; from that of number `rows` on they have as many rows as an input says.
    What a fragment there takes shows how many those are."""
    lines, last = ["width = Constant <value_ints = [512]> ()"], "x"
    for layer in range(layers):
        if layer == rows:
            lines += ["both = Concat <axis = 0> (n, width)", f"many = Expand ({last}, both)"]
            last = "many"
        lines.append(f"t{layer} = MatMul ({last}, W{layer})")
        last = f"t{layer}"
    body = "\n  ".join([*lines, f"y = ReduceMax <axes = [0], keepdims = 1> ({last})"])
    return Made(
        text=f"agraph (float[1, 512] x, int64[1] n) => (float[1, 512] y) {{\n  {body}\n}}",
        weights={f"W{layer}": weight(512, 512, seed=layer) for layer in range(layers)},
    )


def write_spoken(folder: Path, *rows: int) -> None:
    """Inputs of `spoken` in files of one item each, of so many rows."""
    folder.mkdir(parents=True)
    for item, many in enumerate(rows):
        x = np.random.default_rng(item).random((1, 512), np.float32)
        np.savez(folder / f"{item}.npz", allow_pickle=False, x=x, n=np.array([many]))
