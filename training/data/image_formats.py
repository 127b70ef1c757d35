"""Accepted image modes, and sizes. This file is copied to Spaces, so it imports no library."""

from collections.abc import Sequence


# Modes that PIL converts to 8-bit grey or RGB without losing range.
EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
GREY_MODES = ("1", "L", "LA")


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of a configured size; a single number is the side of a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
