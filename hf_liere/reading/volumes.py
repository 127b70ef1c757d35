"""
Volumes as (slices, rows, columns), or with channels last: NIfTI and Analyze through nibabel, series of DICOM slices
through pydicom, and arrays.

Scans are turned to the closest axes of RAS+, whatever axes and directions they were stored in: slices run from foot to
head, rows from back to front, columns from left to right. Arrays are taken as stored.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import require_libraries
from .files import ARRAY_SUFFIXES, DICOM_SUFFIXES, SCAN_SUFFIXES, VOLUME_SUFFIXES, UnreadableError, has_suffix, visible


ORIENTATION = "RAS"
# The array of an npz with the distances of slices, rows and columns.
SPACING = "spacing"
# Factors to mm, the default unit.
MEASURES = {"meter": 1e3, "micron": 1e-3}
# Headers that say where slices lie, and all that are equal in every slice of a series: they decide values or places. Of
# slopes only that there are some, because each slice has its own in PET.
PLACES = ("SeriesInstanceUID", "Rows", "Columns", "PixelSpacing", "ImageOrientationPatient")
SHARED = (
    *(*PLACES, "FrameOfReferenceUID", "Modality", "PhotometricInterpretation", "SamplesPerPixel", "NumberOfFrames"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PresentationLUTShape"),
    *("RescaleSlope", "RescaleType", "ModalityLUTSequence", "Units"),
)
# Largest difference of their numbers, relative to the largest: cosines have few decimals.
ROUNDED = 1e-3
# Largest difference between the distances of a series' slices, relative to their mean: positions are rounded decimals.
UNEVEN = 0.01
# Largest distance of a slice from the line on which the others lie, in pixels, and the largest tilt of that line, in
# degrees. Gantries are tilted by up to 30.
ASIDE = 0.1
MOST_TILTED = 45


def is_volume(path: Path) -> bool:
    return bool(dicom_files(path)) if path.is_dir() else has_suffix(path, VOLUME_SUFFIXES)


def is_scan(path: Path) -> bool:
    """Whether a file has an orientation, which arrays have not."""
    return is_volume(path) and not has_suffix(path, ARRAY_SUFFIXES)


def dicom_files(path: Path) -> list[Path]:
    """The DICOM files in a folder, or the one at this path."""
    return [file for file in (visible(path) if path.is_dir() else [path]) if file.is_file() and _is_dicom(file)]


def _is_dicom(file: Path) -> bool:
    if has_suffix(file, DICOM_SUFFIXES):
        return True
    # Archives and scanners write names without a suffix, such as IM0001. An index of a disc is not a slice.
    if file.suffix.lstrip(".").isalpha() or file.name == "DICOMDIR":
        return False
    with file.open("rb") as content:
        return content.read(132)[128:] == b"DICM"


def count_slices(path: Path) -> int:
    """Number of slices; of a scan without decoding it."""
    if has_suffix(path, ARRAY_SUFFIXES):
        return len(read_volume(path))
    scan = _scan(path, pixels=False)
    return int(scan.shape[_axes(scan)[0]])


def read_volume(path: Path) -> np.ndarray:
    """
    A volume (slices, rows, columns) or (slices, rows, columns, channels), in the file's dtype. Raises `UnreadableError`
    if the file contains no volume, or several. Pixels that a DICOM header calls padding are masked (`numpy.ma`).
    """
    if has_suffix(path, (".npy",)):
        volume = np.load(path, allow_pickle=False)
    elif has_suffix(path, (".npz",)):
        with np.load(path, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if name != SPACING]
            if len(names) != 1:
                raise UnreadableError(f"contains the arrays {arrays.files}; accepted: one array beside {SPACING}.")
            volume = arrays[names[0]]
    else:
        import nibabel

        scan = _scan(path)
        _axes(scan)
        volume = np.asanyarray(nibabel.as_closest_canonical(scan).dataobj).T
        if volume.dtype.names:
            volume = np.stack([volume[name] for name in volume.dtype.names], axis=-1)
        if not has_suffix(path, SCAN_SUFFIXES) and np.isnan(volume).any():
            volume = np.ma.masked_invalid(volume)
    if volume.ndim not in (3, 4):
        raise UnreadableError(f"contains an array of shape {volume.shape}; accepted: 3 or 4 axes.")
    if not volume.size or volume.dtype.kind not in "biuf":
        raise UnreadableError(f"contains {volume.dtype} of shape {volume.shape}; accepted: real numbers, at least one.")
    return volume


def volume_spacing(path: Path) -> tuple[float, float, float]:
    """Distances of slices, rows and columns, in mm for scans. Raises [`UnreadableError`] if the file lacks them."""
    if has_suffix(path, (".npz",)):
        with np.load(path, allow_pickle=False) as arrays:
            if SPACING in arrays.files:
                return check_spacing(arrays[SPACING].reshape(-1).tolist())
    if not is_scan(path):
        raise UnreadableError(f"has no voxel spacing; accepted: NIfTI, DICOM, and npz files with an array {SPACING!r}.")
    from nibabel.affines import voxel_sizes

    scan = _scan(path, pixels=False)
    measure = scan.header.get_xyzt_units()[0] if hasattr(scan.header, "get_xyzt_units") else "mm"
    return check_spacing((voxel_sizes(scan.affine)[_axes(scan)] * MEASURES.get(measure, 1.0)).tolist())


def check_spacing(values: Sequence[float]) -> tuple[float, float, float]:
    """Raises [`UnreadableError`], without the file's name, unless there are three positive, finite numbers."""
    if len(values) != 3 or not all(0 < value < np.inf for value in values):
        raise UnreadableError(
            f"has the spacing {values}; accepted: three positive numbers, of slices, rows and columns."
        )
    slices, rows, columns = map(float, values)
    return slices, rows, columns


def to_bytes(volume: np.ndarray, intensity_range: Sequence[float] | None) -> np.ndarray:
    """
    uint8 from intensities, of which those of the range, by default of the volume, become 0 and 255. Masked ones, which
    are no measurements, have no part in the range and become 0.
    """
    if volume.dtype == np.uint8 and intensity_range is None:
        return volume
    if np.ma.getmaskarray(volume).all():
        raise UnreadableError("contains padding alone; accepted: at least one pixel that was measured.")
    if not np.isfinite(volume).all():
        raise UnreadableError("contains intensities that are not finite.")
    low, high = intensity_range or (float(volume.min()), float(volume.max()))
    # float32 would round large whole numbers before the smallest is subtracted.
    wide = volume.astype(np.promote_types(volume.dtype, np.float32))
    scaled = (wide - low) / max(high - low, np.finfo(np.float32).tiny)
    return np.ma.filled((scaled.clip(0, 1) * 255).round(), 0).astype(np.uint8)


def _scan(path: Path, pixels: bool = True) -> Any:
    """A scan of three axes as an image of nibabel, which has not been turned yet."""
    require_libraries("Reading volumes", "video", "nibabel")
    import nibabel

    scan = nibabel.load(path) if has_suffix(path, SCAN_SUFFIXES) else _series(path, pixels)
    if len(scan.shape) < 3 or np.prod(scan.shape[3:]) != 1:
        raise UnreadableError(
            f"contains an array of shape {scan.shape}; accepted: one volume of three axes, so a file for each "
            "of several (nibabel.four_to_three)."
        )
    return nibabel.squeeze_image(scan)


def _axes(scan: Any) -> list[int]:
    """The stored axes closest to those of slices, rows and columns."""
    from nibabel.orientations import io_orientation

    order = io_orientation(scan.affine)[:, 0]
    if not np.isfinite(order).all():
        raise UnreadableError("has an affine that gives an axis no direction; accepted: three independent axes.")
    return np.argsort(order)[::-1].tolist()


def _series(path: Path, pixels: bool) -> Any:
    """The slices of a DICOM series with their affine; without `pixels` from their headers alone."""
    require_libraries("Reading DICOM", "dicom", "pydicom")
    from nibabel.spatialimages import SpatialImage
    from pydicom import dcmread

    slices = [dcmread(file, stop_before_pixels=not pixels) for file in dicom_files(path)]
    _require_one_series(slices)
    first = slices[0]
    if first.get("PhotometricInterpretation") != "MONOCHROME2" or int(first.get("NumberOfFrames", 1)) > 1:
        raise UnreadableError(
            f"has {first.get('NumberOfFrames', 1)} frames of {first.get('PhotometricInterpretation')} in a file; "
            "accepted: one slice of MONOCHROME2 in each."
        )
    # Directions of rising columns and of rising rows, in axes to the left, to the back and to the head.
    across, down = np.array(first.ImageOrientationPatient, float).reshape(2, 3)
    normal = np.cross(across, down)
    slices.sort(key=lambda each: float(normal @ np.array(each.ImagePositionPatient, float)))
    places = np.array([each.ImagePositionPatient for each in slices], float)
    step = normal * float(first.get("SpacingBetweenSlices") or first.get("SliceThickness") or 1)
    if len(slices) > 1:
        gaps = np.diff(places @ normal)
        if gaps.min() <= 0 or np.ptp(gaps) > UNEVEN * gaps.mean():
            raise UnreadableError(
                f"has slices at distances of {gaps.min():g} to {gaps.max():g} mm; accepted: a complete series of equal "
                "distances."
            )
        step = (places[-1] - places[0]) / (len(slices) - 1)
        line = step / np.linalg.norm(step)
        off = np.linalg.norm(places - places[0] - np.outer((places - places[0]) @ line, line), axis=1)
        tilt = np.degrees(np.arccos(min(line @ normal, 1.0)))
        if off.max() > ASIDE * min(map(float, first.PixelSpacing)) or tilt > MOST_TILTED:
            aside = int(off.argmax()) or -1
            raise UnreadableError(
                f"has slices beside one line: {_name(slices[aside])} is at {places[aside].tolist()}, {off.max():.3g} "
                f"mm from a line tilted by {tilt:.0f}° that begins at {places[0].tolist()} in {_name(slices[0])}; "
                f"accepted: slices on one line, tilted by up to {MOST_TILTED}°."
            )
    between_rows, between_columns = map(float, first.PixelSpacing)
    affine = np.eye(4)
    affine[:3] = np.column_stack([across * between_columns, down * between_rows, step, places[0]])
    shape = (len(slices), int(first.Rows), int(first.Columns))
    volume = np.broadcast_to(0.0, shape)
    if pixels:
        volume = np.stack([_measured(each) for each in slices])
    return SpatialImage(volume.T, np.diag([-1.0, -1, 1, 1]) @ affine)


def _name(header: Any) -> str:
    return Path(header.filename).name


def _require_one_series(slices: Sequence[Any]) -> None:
    """Raises [`UnreadableError`] with the name and both values of a slice whose header contradicts the first one's."""
    for each, name in product(slices, SHARED):
        found, expected = (_value(header, name) for header in (each, slices[0]))
        numeric = isinstance(found, list) and isinstance(expected, list)
        same = np.allclose(found, expected, 0, ROUNDED * max(map(abs, expected))) if numeric else found == expected
        if not same or found is None and name in PLACES:
            raise UnreadableError(
                f"{_name(each)} has {name} {found}, {_name(slices[0])} {expected}; accepted: slices of one series."
            )


def _value(header: Any, name: str) -> Any:
    """What is compared of a header: a list of several numbers, a text, or `None`."""
    value = header.get(name, 1 if name == "NumberOfFrames" else None)
    if value in (None, "") or name in ("RescaleSlope", "ModalityLUTSequence"):
        return None if value in (None, "") else "given"
    return list(map(float, value)) if name in ("PixelSpacing", "ImageOrientationPatient") else str(value)


def _measured(header: Any) -> np.ndarray:
    """(rows, columns) float64 values of a slice, in the unit that its header states; NaN where it says padding."""
    from pydicom.pixels import apply_modality_lut

    stored = header.pixel_array
    values = apply_modality_lut(stored, header).astype(np.float64)
    for kind in ("PixelPaddingValue", "FloatPixelPaddingValue", "DoubleFloatPixelPaddingValue"):
        if header.get(kind) is not None:
            given = (header.get(name) for name in (kind, kind.replace("Value", "RangeLimit")))
            # As pixels are stored: writers confuse signed and unsigned.
            limits = [np.asarray(limit).astype(stored.dtype) for limit in given if limit is not None]
            values[(stored >= min(limits)) & (stored <= max(limits))] = np.nan
    return values
