"""Images of Pillow: upright, channels first, of one mode, in every container."""

import io

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from fedcb2o import Agent, dataset, datasets
from fedcb2o.data import images
from fedcb2o.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 4, 3), dtype=np.uint8)
LABELS = [0, 1, 2] * 4
PICTURES = [Image.fromarray(pixels) for pixels in PIXELS]
GREYS = [picture.convert("L") for picture in PICTURES]
EXPECTED = torch.from_numpy(np.moveaxis(PIXELS, -1, 1).copy())


def object_array(values):
    array = np.empty(len(values), object)
    array[:] = values
    return array


class Pictures:
    """Data set whose items are images."""

    def __len__(self):
        return len(PICTURES)

    def __getitem__(self, k):
        return PICTURES[k]


@pytest.mark.parametrize(
    "arguments",
    [
        (PICTURES, LABELS),
        (tuple(PICTURES), LABELS),
        (object_array(PICTURES), LABELS),
        (pd.Series(PICTURES, index=range(5, 17)), LABELS),
        (Pictures(), LABELS),
        (list(zip(PICTURES, LABELS, strict=True)),),
        (tuple(zip(PICTURES, LABELS, strict=True)),),
        ((PICTURES, LABELS),),
    ],
)
def test_images_in_any_container_are_channels_first(arguments):
    data = dataset(*arguments)
    assert data.pool.x.dtype == torch.uint8
    assert data.pool.x.equal(dataset(EXPECTED, LABELS).pool.x)


@pytest.mark.parametrize(
    "source",
    [
        {"image": PICTURES, "label": LABELS},
        pd.DataFrame({"image": PICTURES, "label": LABELS}),
        [{"image": p, "label": y} for p, y in zip(PICTURES, LABELS, strict=True)],
    ],
)
def test_images_in_columns_are_channels_first(source):
    data = dataset(source, columns=("image", "label"))
    assert data.pool.x.equal(dataset(EXPECTED, LABELS).pool.x)
    assert datasets([source], columns=("image", "label")).pool.x.shape[1:] == (3, 6, 4)


def test_two_pairs_are_a_data_set_and_two_sequences_a_pair():
    pairs = [(PICTURES[0], 0), (PICTURES[1], 1)]
    both = dataset(pairs, x_test=[(PICTURES[2], 1), (PICTURES[3], 0)])
    assert both.pool.x.equal(EXPECTED[:2])
    two = dataset((PICTURES[:2], (0, 1)), x_test=(PICTURES[2:4], (1, 0)))
    assert two.pool.y.tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:the validation samples are bytes")
def test_an_agent_reads_images_as_data_sets_do():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    losses = {
        Agent(network, validation=validation, method="fedcbo").aggregate({}).own_loss
        for validation in ((EXPECTED, LABELS), (PICTURES, LABELS))
    }
    assert len(losses) == 1


def photo(array, orientation):
    """Write and read a photograph with an EXIF tag."""
    memory = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(array).save(memory, "PNG", exif=exif)
    return Image.open(memory)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 1), (8, 3)])
def test_photographs_are_upright(orientation, turns):
    turned = [photo(np.rot90(pixels, turns).copy(), orientation) for pixels in PIXELS]
    assert dataset(turned, LABELS).pool.x.equal(dataset(EXPECTED, LABELS).pool.x)


def with_transparency(image):
    image = image.copy()
    image.info["transparency"] = bytes([0, 128])
    return image


@pytest.mark.parametrize(
    ("pictures", "mode", "expected"),
    [
        (GREYS, "L", np.stack([np.asarray(g) for g in GREYS])[:, None]),
        ([p.convert("P") for p in PICTURES], "RGB", None),
        ([with_transparency(p.convert("P")) for p in PICTURES], "RGB", None),
        ([p.quantize(4) for p in PICTURES[:6]] + [p.quantize(4).convert("RGB") for p in PICTURES[6:]], "RGB", None),
        ([Image.fromarray(np.eye(4, dtype=bool))] * 2, "L", np.array([np.eye(4, dtype=np.uint8) * 255] * 2)[:, None]),
        ([p.convert("RGBA") for p in PICTURES], "RGBA", np.concatenate([EXPECTED, np.full((12, 1, 6, 4), 255)], 1)),
        ([p.convert("CMYK") for p in PICTURES], "CMYK", None),
    ],
)  # fmt: skip
def test_modes_and_palettes(pictures, mode, expected):
    array, found = images.to_array("x", pictures)
    assert found == mode
    assert array.dtype == np.uint8
    if expected is None:
        step = mode if mode == "CMYK" else "RGBA"
        expected = np.stack(
            [np.moveaxis(np.asarray(p.convert(step).convert(mode)), -1, 0) for p in pictures]
        )
    np.testing.assert_array_equal(array, expected)


def test_images_of_16_bits_are_numbers_from_0_to_1():
    values = np.array([[0, 65535], [1000, 32768]], np.uint16)
    array, mode = images.to_array("x", [Image.fromarray(values)])
    assert mode == "I;16"
    np.testing.assert_array_equal(array[0, 0], values.astype(np.float32) / 65535)


def several_modes(mode, at=3):
    return [p.convert(mode) if k >= at else p for k, p in enumerate(PICTURES)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataset(several_modes("YCbCr"), LABELS), r"`x` has images of several modes, such as RGB \(image 0\) and YCbCr \(image 3\): bring"),
        (lambda: dataset(several_modes("L"), LABELS), "several modes, such as RGB .* and L"),
        (lambda: dataset([p.resize((3, 3)) if k == 5 else p for k, p in enumerate(PICTURES)], LABELS), r"several shapes, such as \(3, 6, 4\) .* \(3, 3, 3\) \(image 5\)"),
        (lambda: dataset(PICTURES, LABELS, x_test=[p.convert("YCbCr") for p in PICTURES], y_test=LABELS), "`x` has images of mode RGB, and `x_test` of mode YCbCr: bring"),
        (lambda: datasets([(PICTURES, LABELS), ([p.convert("HSV") for p in PICTURES], LABELS)]), "owner '0' .train.` has images of mode RGB, and `x of owner '1' .train.` of mode HSV"),
        (lambda: dataset([*PICTURES[:11], PIXELS[11]], LABELS), "an image of Pillow in sample 0 and a ndarray in sample 11"),
        (lambda: dataset([Image.open(io.BytesIO(cut_png()))], [0]), r"`x`: image 0 cannot be read \("),
    ],
)  # fmt: skip
def test_images_that_do_not_fit_are_refused(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def cut_png():
    memory = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)).save(
        memory, "PNG"
    )
    return memory.getvalue()[:600]


def test_images_of_several_frames_are_refused():
    file = io.BytesIO()
    PICTURES[0].save(file, "TIFF", save_all=True, append_images=PICTURES[1:3])
    pictures = [*PICTURES[:11], Image.open(file)]
    with pytest.raises(DataError, match=r"image 11 cannot be read \(it has 3 frames: .*`.seek`"):
        dataset(pictures, LABELS)
