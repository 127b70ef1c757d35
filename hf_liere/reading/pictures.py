"""Pictures through Pillow: upright, of eight bits, with transparent parts on white."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import require_libraries
from .files import HEIC_SUFFIXES, UnreadableError, has_suffix


# Modes that Pillow converts to 8-bit grey or RGB without losing range. Deeper ones do not say what is black and what is
# white: X-rays of 12 bits lie in 16, depths are in mm. Colours of 16 bits, which use their range, Pillow has scaled.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
GREY_MODES = ("1", "L", "LA")
GROUND = "white"


def read_picture(source: str | Path | IO[bytes], mode: str = "RGB") -> np.ndarray:
    """(height, width, 3 or 1) uint8 of a still picture, see [`develop`]. Raises `UnreadableError` for several pages."""
    with open_picture(source) as image:
        if (count := count_pages(image)) > 1:
            raise UnreadableError(f"{Path(image.filename).name} has {count} pages or frames; accepted: one.")
        return pixels(develop(image, mode))


def read_frames(source: str | Path | IO[bytes]) -> Iterator[Any]:
    """The frames of an animation as images, one after the other; a still picture is one frame."""
    from PIL import ImageSequence

    with open_picture(source) as image:
        yield from ImageSequence.Iterator(image)


def open_picture(source: str | Path | IO[bytes]) -> Any:
    """A picture of Pillow, whose pixels have not been read. Raises as [`register_formats`]."""
    require_libraries("Reading images", "inspect", "PIL")
    register_formats(source)
    from PIL import Image

    return Image.open(source)


def register_formats(source: object = None) -> None:
    """Teaches Pillow to read HEIC, if its extra is installed. Raises `MissingLibraryError` if a file needs it."""
    if importlib.util.find_spec("pillow_heif") is not None:
        import pillow_heif

        pillow_heif.register_heif_opener()
    elif isinstance(source, (str, Path)) and has_suffix(Path(source), HEIC_SUFFIXES):
        require_libraries(f"Reading {Path(source).name}", "heic", "pillow_heif")


def count_pages(image: Any) -> int:
    """Pages of a TIFF, or frames of an animation, of an opened picture."""
    # Those of a PSD are the layers of which the picture is made.
    return 1 if image.format == "PSD" else getattr(image, "n_frames", 1)


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
