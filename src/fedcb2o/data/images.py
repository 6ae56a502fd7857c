"""Images of Pillow as arrays [channels, height, width]."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedcb2o.data.input_arrays import is_dataset
from fedcb2o.errors import DataError

_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}
"""Modes whose pixels are bits or numbers of colours, and the modes that replace them."""


def has_images(values: Any) -> bool:
    """Return whether the first item of a list, an array, a column or a data set is an image."""
    if isinstance(values, str | bytes) or getattr(values, "ndim", 1) != 1:
        return False
    has_items = isinstance(values, Sequence | pd.Series | np.ndarray) or is_dataset(values)
    try:
        return has_items and len(values) > 0 and _is_image(next(iter(values)))
    except Exception:  # a user's data set fails again where it is read, with a message
        return False


def to_array(name: str, values: Any) -> tuple[NDArray[Any], str]:
    """Return images as one array [n, channels, height, width], and their mode.

    Images are upright, turned by their EXIF tag. Bytes stay bytes, images of 16 bits become numbers
    from 0 to 1, as bytes are when a network reads them. DataError is raised for several sizes or
    modes, because channels of two modes are not the same colours, and for images of several frames.
    """
    arrays = []
    modes = []
    for k, image in zip(range(len(values)), values, strict=False):
        if not _is_image(image):
            raise DataError(
                f"`{name}` has an image of Pillow in sample 0 and a {type(image).__name__} in"
                f" sample {k}: give images of Pillow alone, or arrays (numpy.asarray)"
            )
        try:
            array, mode = _read(image)
        except (OSError, SyntaxError) as error:  # a damaged or closed file
            raise DataError(f"`{name}`: image {k} cannot be read ({error})") from error
        arrays.append(array)
        modes.append(mode)

    for kind, found in (("mode", modes), ("shape", [array.shape for array in arrays])):
        other = next((k for k, value in enumerate(found) if value != found[0]), None)
        if other is not None:
            raise DataError(
                f"`{name}` has images of several {kind}s, such as {found[0]} (image 0) and"
                f" {found[other]} (image {other}): bring them to one size (`.resize`) and mode"
                " (`.convert`)"
            )
    return np.stack(arrays), modes[0]


def _read(image: Any) -> tuple[NDArray[Any], str]:
    """Return the pixels of an image [channels, height, width], and the mode that they have."""
    from PIL import ImageOps  # slow to import

    if getattr(image, "n_frames", 1) > 1:
        raise OSError(f"it has {image.n_frames} frames: give one of each as an image (`.seek`)")

    upright = ImageOps.exif_transpose(image)
    mode = _MODES.get(upright.mode, upright.mode)
    if mode != upright.mode:
        # By way of RGBA, because Pillow warns of palettes with transparency.
        steps = ("RGBA", mode) if "transparency" in upright.info else (mode,)
        for step in steps:
            upright = upright.convert(step)
    array = np.asarray(upright)
    if mode.startswith("I;16"):
        array = array.astype(np.float32) / 65535
    return (array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)), mode


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # imported where there are images
    return pillow is not None and isinstance(value, pillow.Image)
