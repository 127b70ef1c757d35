"""Pictures through Pillow: upright, of eight bits, with transparent parts on white."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import require_libraries
from .files import UnreadableError


# Modes that Pillow converts to 8-bit grey or RGB without losing range. Deeper ones do not say what is black and what is
# white: X-rays of 12 bits lie in 16, depths are in mm. Colours of 16 bits, which use their range, Pillow has scaled.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
GREY_MODES = ("1", "L", "LA")
GROUND = "white"


def read_picture(source: str | Path | IO[bytes], mode: str = "RGB") -> np.ndarray:
    """(height, width, 3 or 1) uint8 of a file's first frame, see [`develop`]."""
    return next(pixels(develop(frame, mode)) for frame in read_frames(source))


def read_frames(source: str | Path | IO[bytes]) -> Iterator[Any]:
    """The frames of an animation as images, one after the other; a still picture is one frame."""
    require_libraries("Reading images", "inspect", "PIL")
    from PIL import Image, ImageSequence

    with Image.open(source) as image:
        yield from ImageSequence.Iterator(image)


def develop(image: Any, mode: str = "RGB", turn: bool = True) -> Any:
    """
    The current frame of an opened picture in the mode `L` or `RGB`: turned as its metadata say (with `turn`), and laid
    on white, so that colours of transparent pixels, which nobody sees, have no effect. Raises `UnreadableError` if the
    picture has more than eight bits per channel.
    """
    from PIL import Image, ImageOps

    if image.mode not in EIGHT_BIT_MODES:
        raise UnreadableError(
            f"mode {image.mode}; accepted are 8-bit images, modes {', '.join(EIGHT_BIT_MODES)}: scale deeper ones from "
            "the values that are black and white to 0 … 255."
        )
    upright = ImageOps.exif_transpose(image) if turn else image
    if upright.has_transparency_data:
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, GROUND), upright.convert("RGBA"))
    return upright.convert(mode)


def pixels(image: Any) -> np.ndarray:
    """(height, width, channels)."""
    array = np.asarray(image)
    return array.reshape(*array.shape[:2], -1)
