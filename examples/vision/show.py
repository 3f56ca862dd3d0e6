"""Prints what the job computed. The weights are random: the numbers differ by picture, no more."""

from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE / "pictures" / "out"


def main() -> None:
    logits = []
    for path in sorted(OUTPUTS.glob("*.npz")):
        with np.load(path) as result:
            logits.append(result["logits"][0])
    stacked = np.stack(logits)  # [pictures, 1000]
    print(f"\n{len(stacked)} pictures, {stacked.shape[1]} logits each.")
    print(
        f"Spread over classes {stacked.std():.3f}, over pictures {stacked.std(axis=0).mean():.3f}."
    )
    print("The weights are random, so this names no object; it is the work of a real ResNet-50.")


if __name__ == "__main__":
    main()
