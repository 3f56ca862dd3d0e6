"""Prints the text that the job read, beside the share of characters that are right."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE / "lines" / "out"
MODEL = HERE / "models" / "rec.onnx"
LABELS = HERE / "images" / "labels.tsv"


def main() -> None:
    alphabet = characters(MODEL)
    wrong = total = 0
    print("\nThe shoal read:\n")
    for row in LABELS.read_text().splitlines():
        picture, label = row.split("\t")
        with np.load(OUTPUTS / Path(picture).with_suffix(".npz")) as result:
            (probabilities,) = result.values()
        text = decode(probabilities[0], alphabet)
        errors = edit_distance(text, label)
        wrong, total = wrong + errors, total + len(label)
        print(f"  {text}" + (f"    (the picture says: {label})" if errors else ""))
    print(f"\n{total - wrong} of {total} characters are right ({1 - wrong / total:.1%}).")


def characters(model: Path) -> list[str]:
    """What each class of the model means: class 0 is the blank, the last one the space."""
    properties = onnx.load(model, load_external_data=False).metadata_props
    (listed,) = [entry.value for entry in properties if entry.key == "character"]
    return ["", *listed.splitlines(), " "]


def decode(probabilities: npt.NDArray[np.float32], alphabet: list[str]) -> str:
    """Greedy CTC decoding of [steps, classes]: the best of each step, joined, without blanks."""
    best = probabilities.argmax(axis=1)
    first = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(alphabet[index] for index in best[first]).strip()


def edit_distance(left: str, right: str) -> int:
    """How many characters must be changed, added or dropped to make one text the other."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


if __name__ == "__main__":
    main()
