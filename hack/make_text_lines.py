"""Draws the text lines of examples/ocr: sentences in many hands, as a camera might catch them.

They are set in free fonts and then treated like photographs: a textured ground, uneven light, a
small turn and tilt, a soft focus, sensor noise, JPEG. The same versions of Pillow and of the fonts
draw the same pictures again; the pictures are committed, so nobody needs to call this.

Needs the Debian packages fonts-dejavu-core, fonts-liberation2, fonts-freefont-ttf, fonts-lato,
fonts-ebgaramond, fonts-courier-prime, fonts-crosextra-caladea, fonts-comic-neue, fonts-open-sans,
fonts-linuxlibertine and fonts-roboto-unhinted.

    .venv/bin/python hack/make_text_lines.py examples/ocr/images
"""

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Colour = tuple[int, int, int]
Pixels = npt.NDArray[np.float32]

MARGIN_PIXELS = (12, 7)
"""Left and right, above and below: as tight as a text detector cuts lines out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One picture: what it says, how it is set, and what the camera did to it."""

    text: str
    font: str  # a fontconfig pattern
    size: int = 36
    ink: Colour = (28, 28, 32)
    ground: Colour = (232, 226, 212)
    texture: str = "paper"  # paper, wood, metal, cloth
    turn_degrees: float = 0.0
    tilt: float = 0.0  # how much smaller the right end is than the left
    blur: float = 0.4
    noise: float = 4.0
    light: float = 0.15  # how much darker the right end is than the left
    jpeg_quality: int = 85


LINES = (
    Line(text="A shoal is many small fish", font="EB Garamond:medium", size=42, turn_degrees=0.6),
    Line(
        text="that move as one.",
        font="Lato:bold",
        size=44,
        ink=(240, 240, 235),
        ground=(38, 70, 92),
        texture="cloth",
        turn_degrees=-0.8,
    ),
    Line(text="None of them is large,", font="Liberation Serif", size=30, blur=0.8, noise=7.0),
    Line(
        text="none knows the way.",
        font="Courier Prime",
        size=32,
        ink=(60, 45, 40),
        ground=(222, 205, 170),
        turn_degrees=-0.5,
        light=0.3,
    ),
    Line(
        text="Each one keeps its distance",
        font="Open Sans:semibold",
        size=34,
        ink=(250, 214, 90),
        ground=(30, 32, 36),
        texture="metal",
        tilt=0.08,
    ),
    Line(
        text="from its neighbours,",
        font="Comic Neue:bold",
        size=40,
        ink=(25, 60, 140),
        ground=(244, 244, 240),
        turn_degrees=1.4,
    ),
    Line(text="turns when they turn,", font="Linux Libertine O:italic", size=40, noise=6.0),
    Line(
        text="and passes on",
        font="DejaVu Sans Mono",
        size=30,
        ink=(150, 235, 160),
        ground=(16, 24, 18),
        texture="metal",
        blur=0.6,
    ),
    Line(
        text="what it has learnt.",
        font="DejaVu Sans Mono",
        size=30,
        ink=(150, 235, 160),
        ground=(16, 24, 18),
        texture="metal",
        turn_degrees=0.5,
    ),
    Line(
        text="If one is lost,",
        font="Caladea",
        size=40,
        texture="wood",
        ground=(196, 152, 104),
        ink=(40, 22, 10),
        turn_degrees=0.4,
    ),
    Line(
        text="the others close the gap",
        font="Caladea",
        size=38,
        texture="wood",
        ground=(196, 152, 104),
        ink=(40, 22, 10),
        light=0.3,
    ),
    Line(
        text="and the shoal swims on.",
        font="Roboto Condensed:bold",
        size=42,
        ink=(250, 250, 250),
        ground=(176, 42, 38),
        tilt=-0.07,
        light=0.25,
    ),
    Line(
        text="Buoy 17, depth 128 m",
        font="Caladea:bold",
        size=36,
        ink=(20, 20, 20),
        ground=(250, 196, 40),
        texture="metal",
        turn_degrees=-1.1,
        noise=8.0,
    ),
    Line(text="Light wind and calm sea,", font="DejaVu Sans", size=32, noise=6.0, jpeg_quality=60),
    Line(text="water at 12 degrees.", font="DejaVu Sans", size=32, blur=0.8, jpeg_quality=60),
    Line(
        text="NO FISHING",
        font="Liberation Sans:bold",
        size=46,
        ink=(252, 252, 252),
        ground=(24, 96, 64),
        texture="metal",
        tilt=0.06,
    ),
    Line(
        text="WITHIN 200 METRES",
        font="Liberation Sans:bold",
        size=42,
        ink=(252, 252, 252),
        ground=(24, 96, 64),
        texture="metal",
        tilt=0.06,
    ),
    Line(
        text="Harbour office open",
        font="DejaVu Serif",
        size=34,
        texture="wood",
        ground=(214, 190, 150),
        light=0.35,
    ),
    Line(
        text="from 08:30 to 16:45",
        font="DejaVu Serif",
        size=34,
        texture="wood",
        ground=(214, 190, 150),
        turn_degrees=-0.6,
    ),
    Line(
        text="Lot 3906: 24 crates,",
        font="FreeMono:bold",
        size=32,
        ground=(236, 236, 240),
        noise=9.0,
        blur=0.7,
        jpeg_quality=60,
    ),
    Line(text="288.50 kg", font="FreeMono:bold", size=36, ground=(236, 236, 240), noise=9.0),
    Line(
        text="Handle with care!",
        font="Open Sans:bold",
        size=40,
        ink=(190, 30, 30),
        ground=(205, 170, 125),
        texture="cloth",
        turn_degrees=1.0,
    ),
    Line(
        text="Thank you for reading",
        font="EB Garamond:italic",
        size=44,
        ink=(70, 30, 80),
        ground=(240, 232, 238),
        texture="cloth",
        turn_degrees=0.9,
    ),
    Line(
        text="to the very end.",
        font="EB Garamond:italic",
        size=44,
        ink=(70, 30, 80),
        ground=(240, 232, 238),
        texture="cloth",
        turn_degrees=-0.7,
    ),
)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    labels = []
    for index, line in enumerate(LINES, start=1):
        name = f"line-{index:02}.png"
        picture(line, np.random.default_rng(index)).save(folder / name, optimize=True)
        labels.append(f"{name}\t{line.text}\n")
    (folder / "labels.tsv").write_text("".join(labels))


def picture(line: Line, chance: np.random.Generator) -> Image.Image:
    """Set the line, lay it on its ground, then do to it what a camera does."""
    mask = set_text(line)
    ground = texture(line.texture, mask.height, mask.width, chance)
    cover = np.asarray(mask, np.float32)[..., None] / 255
    pixels = np.asarray(line.ground, np.float32) * ground[..., None]
    pixels = pixels * (1 - cover) + np.asarray(line.ink, np.float32) * cover
    pixels *= 1 - line.light * np.linspace(0, 1, mask.width, dtype=np.float32)[None, :, None]
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(line.blur))
    grain = chance.normal(0, line.noise, (image.height, image.width, 1)).astype(np.float32)
    pixels = np.clip(np.asarray(image, np.float32) + grain, 0, 255)
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=line.jpeg_quality)
    return Image.open(buffer).convert("RGB")


def set_text(line: Line) -> Image.Image:
    """The text as a mask (255 is ink), turned and tilted, with a margin all round."""
    font = ImageFont.truetype(font_file(line.font), line.size)
    left, top, right, bottom = font.getbbox(line.text)
    across, down = MARGIN_PIXELS
    size = (round(right - left) + 2 * across, round(bottom - top) + 2 * down)
    mask = Image.new("L", size)
    at = (across - left, down - top)
    ImageDraw.Draw(mask).text(at, line.text, font=font, fill=255)
    mask = mask.rotate(line.turn_degrees, Image.Resampling.BICUBIC)
    return mask.transform(
        size, Image.Transform.QUAD, tilted(size, line.tilt), Image.Resampling.BICUBIC
    )


def tilted(size: tuple[int, int], tilt: float) -> tuple[float, ...]:
    """The corners of the source when the right end (tilt > 0) or the left one is farther away."""
    width, height = size
    left, right = max(-tilt, 0.0) * height, max(tilt, 0.0) * height
    return (0, -left, 0, height + left, width, height + right, width, -right)


def texture(kind: str, height: int, width: int, chance: np.random.Generator) -> Pixels:
    """Brightness factors around 1 of a surface."""
    fine = chance.normal(0, 1, (height, width))
    match kind:
        case "wood":
            rings = np.arange(height)[:, None] + 5 * np.sin(np.arange(width) / 90)[None, :]
            surface = 0.05 * np.sin(rings / 2.3) + 0.03 * np.sin(rings / 5.1) + 0.02 * fine
        case "metal":
            surface = 0.03 * fine.mean(axis=1, keepdims=True) * np.sqrt(width) + 0.01 * fine
        case "cloth":
            weave = (
                np.sin(np.arange(height) * 1.7)[:, None] + np.sin(np.arange(width) * 1.7)[None, :]
            )
            surface = 0.03 * weave + 0.02 * fine
        case _:
            coarse = Image.fromarray(chance.normal(0, 1, (6, 24)).astype(np.float32))
            stains = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
            surface = 0.03 * stains + 0.015 * fine
    factors: Pixels = (1 + surface).astype(np.float32)
    return factors


def font_file(pattern: str) -> str:
    """The file of a font; fontconfig answers with something else when a family is not installed."""
    asked = pattern.split(":", maxsplit=1)[0]
    answer = subprocess.run(
        ["fc-match", "--format=%{family}\t%{file}", pattern],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    family, file = answer.split("\t")
    if asked not in family.split(","):
        raise SystemExit(f"font {asked} is not installed (fontconfig offers {family})")
    return file


if __name__ == "__main__":
    main()
