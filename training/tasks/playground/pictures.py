"""Pictures for the models: untrusted uploads, read within limits, and arrows puzzles."""

from pathlib import Path

from PIL import Image

from hf_liere.errors import InputError
from hf_liere.reading.pictures import GROUND, develop
from training.data.arrows import LABELS, Arrows


EXTENSIONS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".gif": "GIF"}
MAX_MEGABYTES = 10
# Decoded, an RGBA picture of this size takes 128 MB.
MAX_MEGAPIXELS = 32
PUZZLES = Arrows("test")
# What models of photographs look at until a picture is uploaded.
EXAMPLE = Path(__file__).resolve().parents[2] / "evidence" / "figures" / "rocket.jpg"


def open_picture(path: str | Path) -> tuple[Image.Image, list[str]]:
    """
    An uploaded file as an RGB picture, rotated according to its EXIF data, and notes on the changes.

    Transparent parts become white. Only the first frame of an animation, and only the decoders of `EXTENSIONS`, are
    used.

    Raises:
        InputError: naming the file, if it is not a picture in an accepted format, is damaged or exceeds the limits.
    """
    path = Path(path)
    try:
        return _read(path)
    except InputError as error:
        raise InputError(f"{path.name} cannot be used: {error}") from None


def _read(path: Path) -> tuple[Image.Image, list[str]]:
    formats = sorted(set(EXTENSIONS.values()))
    if path.suffix.lower() not in EXTENSIONS:
        raise InputError(f"the name ends in {path.suffix!r}; accepted are {', '.join(EXTENSIONS)}.")
    size = path.stat().st_size
    if size == 0:
        raise InputError("the file is empty.")
    if size > MAX_MEGABYTES * 2**20:
        raise InputError(f"it has {size / 2**20:.1f} MB; accepted are files up to {MAX_MEGABYTES} MB.")
    try:
        with Image.open(path, formats=formats) as image:
            return _decode(image)
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(f"it has far more than {MAX_MEGAPIXELS} megapixels, the limit.") from None
    except Exception as error:
        # Decoders raise errors of any class for broken files.
        raise InputError(f"it is not a {', '.join(formats)} picture, or damaged ({type(error).__name__}).") from error


def _decode(image: Image.Image) -> tuple[Image.Image, list[str]]:
    # The size is in the header, so this is checked before decoding.
    if image.width * image.height > MAX_MEGAPIXELS * 10**6:
        raise InputError(
            f"it has {image.width} × {image.height} pixels; accepted are up to {MAX_MEGAPIXELS} megapixels."
        )
    notes = []
    if getattr(image, "is_animated", False):
        notes.append(f"the first of {image.n_frames} frames")
    if image.has_transparency_data:
        notes.append(f"transparent parts on {GROUND}")
    return develop(image), notes


def draw_puzzle(number: int, image_size: int) -> tuple[Image.Image, str]:
    """
    The puzzle with this number in the arrows' test split, and its answer.

    It is drawn at `image_size`, not resized: cells keep their size, and a larger puzzle has more of them, as in LieRE's
    experiment (§5.2). The same number is therefore another scene at another size.

    Raises:
        InputError: if the number is out of range.
        ValueError: if the size does not consist of whole cells.
    """
    if number is None or not 0 <= number < len(PUZZLES):
        raise InputError(f"There is no puzzle {number}; accepted: 0 … {len(PUZZLES) - 1:,}.")
    pixels, label = Arrows(PUZZLES.split, image_size=image_size)[number]
    return Image.fromarray(pixels.squeeze(-1)).convert("RGB"), LABELS[label]
