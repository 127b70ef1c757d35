"""Clips and series of slices, written for tests."""

from fractions import Fraction

import av
import numpy as np
import pytest


def write_clip(path, frames, aspect=1, times=None, codec="mpeg4"):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(aspect)
        stream.time_base = stream.codec_context.time_base = Fraction(1, 10)
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts, frame.time_base = (times or range(len(frames)))[number], Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_series(folder, volume, orientation=(1, 0, 0, 0, 1, 0), gaps=None):
    """Slices (slices, rows, columns) with 2.5 mm between them, 0.5 between rows and 0.7 between columns."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(parents=True)
    series, normal = generate_uid(), np.cross(orientation[:3], orientation[3:])
    for number, pixels in enumerate(volume):
        data = Dataset()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.SOPClassUID, data.SOPInstanceUID, data.SeriesInstanceUID = CTImageStorage, generate_uid(), series
        data.file_meta.MediaStorageSOPClassUID = CTImageStorage
        data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID
        data.Rows, data.Columns = pixels.shape
        data.ImageOrientationPatient = list(map(float, orientation))
        place = normal * (2.5 * number if gaps is None else gaps[number])
        data.ImagePositionPatient = [float(value) for value in place]
        data.PixelSpacing, data.RescaleSlope, data.RescaleIntercept = [0.5, 0.7], 2.0, -1000.0
        data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
        data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 0
        data.PixelData = pixels.astype("<u2").tobytes()
        # The names of the files are in another order than the slices.
        pydicom.dcmwrite(folder / f"{len(volume) - number}.dcm", data, enforce_file_format=True)
    (folder / "._1.dcm").write_bytes(b"left behind")
    return folder


def cut_frames(source, target):
    """A video whose index is whole but whose frames from the third on are overwritten."""
    with av.open(str(source)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data = bytearray(source.read_bytes())
    for position, size in packets[2:]:
        data[position : position + size] = bytes(size)
    target.write_bytes(data)


def numbered_frames(count: int, size: int = 16) -> np.ndarray:
    """Frame n is a plane of grey 10 n."""
    return np.repeat(np.arange(count, dtype=np.uint8) * 10, size * size * 3).reshape(count, size, size, 3)


def write_nifti(path, volume, spacing, measure="mm"):
    """(slices, height, width) with distances of slices, rows and columns, which NIfTI lists the other way round."""
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.Nifti1Image(volume.transpose(2, 1, 0), np.diag([*spacing[::-1], 1.0]))
    image.header.set_xyzt_units(measure, "sec")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.to_filename(path)
