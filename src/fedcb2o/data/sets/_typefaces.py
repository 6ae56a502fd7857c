"""Digits as typefaces draw them: data with natural owners that need no download. Synthetic, from real designs.

Each owner is one of the typefaces that come with Matplotlib (of the families DejaVu, STIX and Computer Modern), and
brings small images of its own digits, as many as chance gave it.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset
from fedcb2o.data.owner_datasets import datasets
from fedcb2o.errors import ConfigError
from fedcb2o.rng import stream

__all__ = ["typefaces"]

_OWNER_FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSans-Oblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-BoldItalic", "DejaVuSerif-Italic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta"),
    *("cmb10", "cmr10", "cmtt10"),
)
_SHARED_TEST_FACES = ("DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneralItalic", "cmss10")
_IMAGE_SIDE = 12  # pixels of an image
_NOISE_STD = 0.15  # standard deviation of a pixel, from 0 to 1


def typefaces(*, fewest: int = 80, most: int = 400) -> Dataset:
    """The digits of 16 typefaces, each an owner of `fewest` to `most` images, a quarter of which are its own test.

    Images are float32 [n, 1, 12, 12] in [0, 1], of a random size, place and slant, with noise; the same in every run.
    Those of 4 more typefaces, which nobody owns, test everybody: 60 each. Raises ConfigError for too few images.
    """
    if not 20 <= fewest <= most:
        raise ConfigError(
            f"`fewest` of typefaces must be at least 20, and `most` no less, got {fewest} and {most}"
        )
    sizes = stream(0, "typefaces").integers(fewest, most, size=len(_OWNER_FACES), endpoint=True)
    owned = {
        name: _render(name, int(count)) for name, count in zip(_OWNER_FACES, sizes, strict=True)
    }
    common = [_render(name, 60) for name in _SHARED_TEST_FACES]
    test = tuple(np.concatenate(parts) for parts in zip(*common, strict=True))
    return datasets(owned, test=test, class_names=tuple("0123456789"))


def _render(face: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """So many images of a typeface's digits, and which digits they are."""
    import matplotlib as mpl  # slow to import, and needed by nobody else here
    from PIL import Image, ImageDraw, ImageFont

    path = Path(mpl.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    draw = stream(0, "typefaces", face)
    fonts = {points: ImageFont.truetype(str(path), 4 * points) for points in (10, 11, 12, 13)}
    y = draw.integers(10, size=count)
    x = np.empty((count, 1, _IMAGE_SIDE, _IMAGE_SIDE), np.float32)
    for image, digit in zip(x, y, strict=True):
        large = Image.new(
            "L", (4 * _IMAGE_SIDE, 4 * _IMAGE_SIDE)
        )  # drawn four times as large, for smooth edges
        where = tuple(2 * _IMAGE_SIDE + draw.integers(-5, 6, size=2))
        font = fonts[int(draw.integers(10, 14))]
        ImageDraw.Draw(large).text(where, str(digit), fill=255, font=font, anchor="mm")
        large = large.rotate(float(draw.uniform(-12, 12)), Image.Resampling.BILINEAR)
        image[0] = (
            np.asarray(large.resize((_IMAGE_SIDE, _IMAGE_SIDE), Image.Resampling.BOX), np.float32)
            / 255
        )
    x += draw.normal(scale=_NOISE_STD, size=x.shape).astype(np.float32)
    return x.clip(0, 1), y
