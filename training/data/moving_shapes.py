"""Moving shapes: generated videos whose class is a direction of motion, written as mp4 files.

Two shapes lie on a noisy ground. One moves up, right, down or left and re-enters on the opposite side. A single frame
carries no information about the class. Unordered frames reveal only the axis of the motion, because both directions are
equally likely, so half of the answers are right.
"""

from pathlib import Path

import av
import numpy as np
from tqdm.auto import tqdm

from hf_liere.storage.targets import new_file
from training.data.arrows import LABELS, STEPS


NUM_FRAMES = 16
SPLITS = ("train", "validation")
DEFAULT_SIZES = {"train": 2000, "validation": 500}
FRAME_RATE = 8


def frames(split: str, index: int, image_size: int) -> tuple[np.ndarray, int]:
    """A video, uint8 of shape (NUM_FRAMES, image_size, image_size, 3), and its label, an index into `LABELS`."""
    rng = np.random.default_rng((SPLITS.index(split), index))
    label = int(rng.integers(len(LABELS)))
    ground = rng.integers(0, 60, (image_size, image_size, 1)) + rng.integers(0, 60, 3)
    video = np.repeat(ground[None], NUM_FRAMES, axis=0)
    speed = rng.uniform(1 / 24, 1 / 12) * image_size
    for moves in (False, True):
        start = rng.uniform(0, image_size, 2)
        mask_of, radius = SHAPES[rng.integers(len(SHAPES))], rng.uniform(0.12, 0.2) * image_size
        color = rng.integers(120, 256, 3)
        for time in range(NUM_FRAMES):
            center = start + STEPS[label] * speed * time * moves
            video[time][shape_mask(mask_of, center, radius, (image_size, image_size))] = color
    return video.astype(np.uint8), label


def shape_mask(shape, center: np.ndarray, radius: float, image_size: tuple[int, int]) -> np.ndarray:
    """Mask (height, width) of a shape on a picture with periodic borders. `center` is (row, column)."""
    axes = [
        (np.arange(size) + 0.5 - position + size / 2) % size - size / 2 for size, position in zip(image_size, center)
    ]
    rows, columns = np.meshgrid(*axes, indexing="ij")
    return shape(rows / radius, columns / radius)


# Disc, square, diamond and cross, as conditions on rows and columns in units of the radius. None has a direction.
SHAPES = (
    lambda rows, columns: rows**2 + columns**2 < 1,
    lambda rows, columns: np.maximum(abs(rows), abs(columns)) < 0.9,
    lambda rows, columns: abs(rows) + abs(columns) < 1.2,
    lambda rows, columns: np.minimum(abs(rows), abs(columns)) < 0.35 * (np.maximum(abs(rows), abs(columns)) < 1),
)


def write_video(path: Path, video: np.ndarray) -> None:
    """Writes uint8 frames (T, height, width, 3) as H.264 in mp4. Height and width must be even."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAME_RATE, options={"crf": "18", "preset": "veryfast"})
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in video:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_moving_shapes(folder: Path, sizes: dict[str, int], image_size: int) -> None:
    """
    Writes the missing files `folder/<split>/<class>/<number>.mp4`.

    Args:
        sizes: number of videos of each split.

    Raises:
        ValueError: if the size is odd.
    """
    if image_size % 2:
        raise ValueError(f"Moving shapes of {image_size} px cannot be written as video; accepted: even sizes.")
    for split, size in sizes.items():
        for label in LABELS:
            (folder / split / label).mkdir(parents=True, exist_ok=True)
        written = {path.stem for path in (folder / split).glob("*/*.mp4")}
        missing = [index for index in range(size) if f"{index:06}" not in written]
        for index in tqdm(missing, desc=f"Writing {split} videos", unit="video", leave=False, disable=None):
            video, label = frames(split, index, image_size)
            path = folder / split / LABELS[label] / f"{index:06}.mp4"
            with new_file(path) as partial:
                write_video(partial, video)
