"""Digits drawn by typefaces: synthetic data with natural owners, no download.

Each owner is one of the typefaces of Matplotlib (families DejaVu, STIX and Computer Modern) with a
random number of small images of its own digits.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.inputs import datasets
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

_OWNER_FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSans-Oblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-BoldItalic", "DejaVuSerif-Italic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta"),
    *("cmb10", "cmr10", "cmtt10"),
)
_SHARED_TEST_FACES = ("DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneralItalic", "cmss10")
_IMAGE_SIDE = 12  # pixels
_NOISE_STD = 0.15  # of a pixel in [0, 1]


def typefaces(*, fewest: int = 80, most: int = 400) -> Dataset:
    """Draw the digits of 16 typefaces, each the owner of its images.

    A quarter of an owner's images are its test images. 60 images of each of 4 further typefaces
    test every agent. Images have a random size, position and slant, with noise; they are the same
    in every run.

    Args:
        fewest: Smallest number of images of an owner, at least 20.
        most: Largest number of images of an owner.

    Returns:
        The data set; images are float32 [n, 1, 12, 12] in [0, 1].
    """
    if not 20 <= fewest <= most:
        raise ConfigError(
            "`fewest` of typefaces must be at least 20, and `most` no less,"
            f" got {fewest} and {most}"
        )
    draw = stream(0, "typefaces")
    sizes = draw.integers(fewest, most, size=len(_OWNER_FACES), endpoint=True)
    owned = {
        name: _render(name, int(count)) for name, count in zip(_OWNER_FACES, sizes, strict=True)
    }
    common = [_render(name, 60) for name in _SHARED_TEST_FACES]
    test = tuple(np.concatenate(parts) for parts in zip(*common, strict=True))
    return datasets(owned, test=test, class_names=tuple("0123456789"))


def _render(face: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return `count` images of a typeface's digits, and the digits."""
    import matplotlib as mpl  # slow to import
    from PIL import Image, ImageDraw, ImageFont

    path = Path(mpl.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    draw = stream(0, "typefaces", face)
    fonts = {points: ImageFont.truetype(str(path), 4 * points) for points in (10, 11, 12, 13)}
    y = draw.integers(10, size=count)
    x = np.empty((count, 1, _IMAGE_SIDE, _IMAGE_SIDE), np.float32)
    for image, digit in zip(x, y, strict=True):
        # Drawn four times as large, for smooth edges.
        large = Image.new("L", (4 * _IMAGE_SIDE, 4 * _IMAGE_SIDE))
        position = tuple(2 * _IMAGE_SIDE + draw.integers(-5, 6, size=2))
        font = fonts[int(draw.integers(10, 14))]
        ImageDraw.Draw(large).text(position, str(digit), fill=255, font=font, anchor="mm")
        large = large.rotate(float(draw.uniform(-12, 12)), Image.Resampling.BILINEAR)
        small = large.resize((_IMAGE_SIDE, _IMAGE_SIDE), Image.Resampling.BOX)
        image[0] = np.asarray(small, np.float32) / 255
    x += draw.normal(scale=_NOISE_STD, size=x.shape).astype(np.float32)
    return x.clip(0, 1), y
