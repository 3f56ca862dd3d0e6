"""Makes what the job reads: the recogniser's file and one tensor for each text line.

The model is the PP-OCRv4 recogniser that the package rapidocr-onnxruntime carries. It takes
x: float32 [1, 3, 48, width], blue, green, red, from -1 to 1; the width follows the picture.
"""

import importlib.metadata
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

HERE = Path(__file__).resolve().parent
IMAGES = HERE / "images"
INPUTS, OUTPUTS = HERE / "lines" / "in", HERE / "lines" / "out"
MODEL = HERE / "models" / "rec.onnx"

HEIGHT_PIXELS = 48
WIDTH_STEP_PIXELS = 32
"""Widths are padded to a multiple of this, so that few different shapes occur."""


def main() -> None:
    MODEL.parent.mkdir(exist_ok=True)
    shutil.copyfile(packaged_model(), MODEL)
    for folder in (INPUTS, OUTPUTS):  # a job continues where results exist: begin with none
        shutil.rmtree(folder, ignore_errors=True)
    INPUTS.mkdir(parents=True)
    pictures = sorted(IMAGES.glob("*.png"))
    for picture in pictures:
        np.savez(INPUTS / f"{picture.stem}.npz", x=as_input(Image.open(picture)))
    print(f"prepared {len(pictures)} text lines in {INPUTS.relative_to(HERE.parents[1])}")


def packaged_model() -> Path:
    """The recogniser inside the installed package, which need not be importable for it."""
    for file in importlib.metadata.files("rapidocr-onnxruntime") or []:
        if file.match("models/ch_PP-OCRv4_rec_infer.onnx"):
            return Path(str(file.locate()))
    raise SystemExit(
        "rapidocr-onnxruntime is installed without its recogniser: run `make clean run`"
    )


def as_input(picture: Image.Image) -> npt.NDArray[np.float32]:
    """A picture of one line as the recogniser wants it: [1, 3, 48, width]."""
    width = max(1, round(picture.width * HEIGHT_PIXELS / picture.height))
    scaled = picture.convert("RGB").resize((width, HEIGHT_PIXELS), Image.Resampling.BILINEAR)
    pixels = np.asarray(scaled, np.float32)[:, :, ::-1].transpose(2, 0, 1)
    padded_width = -(-width // WIDTH_STEP_PIXELS) * WIDTH_STEP_PIXELS
    tensor = np.zeros((1, 3, HEIGHT_PIXELS, padded_width), np.float32)
    tensor[0, :, :, :width] = pixels / 127.5 - 1
    return tensor


if __name__ == "__main__":
    main()
