"""The readers of clips, under the name that scripts import them by."""

from hf_liere.reading.clips import FrameReader
from hf_liere.reading.files import UnreadableError


__all__ = ["FrameReader", "UnreadableError"]
