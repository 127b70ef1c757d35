"""Which files are read, and the error that names one that cannot be."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError, MissingLibraryError


# What phones write, which Pillow reads with the extra `heic`.
HEIC_SUFFIXES = (".heic", ".heif", ".hif")
PICTURE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp", ".tif", ".tiff", ".avif", *HEIC_SUFFIXES)
# In a folder of frames, an animation is not a frame.
FRAME_SUFFIXES = tuple(suffix for suffix in PICTURE_SUFFIXES if suffix != ".gif")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".mpg", ".mpeg", ".m4v")
SCAN_SUFFIXES = (".nii.gz", ".nii", ".img.gz", ".img", ".hdr")
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
ARRAY_SUFFIXES = (".npz", ".npy")
VOLUME_SUFFIXES = (*SCAN_SUFFIXES, *DICOM_SUFFIXES, *ARRAY_SUFFIXES)
SUFFIXES = (*PICTURE_SUFFIXES, *VIDEO_SUFFIXES, *VOLUME_SUFFIXES)
# What systems and editors leave beside data, apart from names that begin with a dot.
LEFT_BEHIND = ("__macosx", "thumbs.db", "desktop.ini")


class UnreadableError(InputError):
    """A file cannot be read or has too few frames. The message names it."""


@contextmanager
def naming(name: str, has: str = ": ", broken: str = ": cannot be read") -> Iterator[None]:
    """Raises errors of the decoders inside as [`UnreadableError`] that begins with the name of the file."""
    try:
        yield
    except MissingLibraryError:
        raise
    except UnreadableError as error:
        raise UnreadableError(f"{name}{has}{error}") from None
    except Exception as error:
        # Decoders raise errors of any class for broken files.
        raise UnreadableError(f"{name}{broken} ({reason(error)}).") from error


def reason(error: BaseException) -> str:
    """Class and first line of another library's error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].strip() if str(error) else 'no message'}"


def is_hidden(path: Path, folder: Path) -> bool:
    """Whether a path below a folder, or a folder on the way, is hidden or left behind by systems."""
    return any(part.startswith(".") or part.lower() in LEFT_BEHIND for part in path.relative_to(folder).parts)


def visible(folder: Path) -> list[Path]:
    """The entries of a folder, sorted, without hidden ones ([`is_hidden`])."""
    return sorted(path for path in folder.iterdir() if not is_hidden(path, folder))


def unread_files(folder: Path, read: Collection[Path]) -> list[Path]:
    """The files below a folder that are neither among those that are read nor in a folder that is."""
    taken = set(read)
    found = (path for path in folder.rglob("*") if path.is_file() and not is_hidden(path, folder))
    return sorted(path for path in found if taken.isdisjoint((path, *path.parents)))


def unread(folder: Path, read: Collection[Path]) -> list[str]:
    """One sentence on the [`unread_files`] of a folder, if there are any."""
    left = unread_files(folder, read)
    return [f"{folder.name}: {numbers(left)}."] if left else []


def numbers(left: Collection[Path]) -> str:
    """How many files are not read, also by suffix."""
    counts = Counter(path.suffix.lower() or "without a suffix" for path in left)
    named = ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items()))
    return f"{len(left)} {'file is' if len(left) == 1 else 'files are'} not read: {named}"


def has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes)
