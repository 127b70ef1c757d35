"""
The options of `hf-liere convert` by kind of checkpoint: what the converters take, and what `--help` prints of them.

The command reads this file without importing the package, so it imports only the standard library.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """
    Attributes:
        types: The types that it accepts.
        accepted: The same in words.
        default: What holds without it; `None` if that depends on the checkpoint, as `otherwise` says.
    """

    types: tuple[type, ...]
    accepted: str
    default: Any = None
    otherwise: str = ""

    def __str__(self) -> str:
        return f"{self.accepted} ({self.otherwise or str(self.default).lower()})"


SIZES = (int, Iterable)
PER_AXIS = "a number, or a list of one for each axis"
ACTIVATION, HEADS = "an activation of transformers", "a number that divides the width"
NUM_AXES = Option((int,), "2 for images, 3 for volumes and videos", otherwise="from the shapes, else 2")
LIERE = "liere, rope_mixed, absolute or visionllama"
COMROPE = "liere, comrope-ap, comrope-ld, vanilla-rope, raw or none"
OPTIONS = {
    "liere": {
        "position_encoding": Option((str,), LIERE, otherwise="from the generators and the table"),
        "patch_size": Option(SIZES, PER_AXIS, otherwise="a square, required for volumes"),
        "image_size": Option(SIZES, PER_AXIS, otherwise="a square that fits the table, required for volumes"),
        "num_channels": Option((int,), "a number", 3),
        "num_axes": NUM_AXES,
        "pooling": Option((str,), "cls or mean", "cls"),
        "layer_generators": Option((str,), "official or paper", "official"),
    },
    "comrope": {
        "position_encoding": Option((str,), COMROPE, otherwise="from the shapes, else raw or none"),
        "num_axes": NUM_AXES,
        "num_attention_heads": Option((int,), HEADS, otherwise="from the generators, else heads of 64 channels"),
        "image_size": Option((int,), "a number", otherwise="from the table, else 14 patches"),
        "num_frames": Option((int,), "a number", otherwise="from the table, else 8"),
        "theta_base": Option((float,), "a positive number", otherwise="that of the paper, 10000^(-2A/head_dim)"),
        "scale_factor": Option((float,), "a number", 1.0),
        "axis_scale": Option((bool,), "true or false", True),
        "cls_position": Option((float,), "a number", 0.5),
        "hidden_act": Option((str,), ACTIVATION, "quick_gelu"),
        "layer_norm_eps": Option((float,), "a positive number", 1e-5),
    },
    "naver": {
        "position_encoding": Option((str,), "mixed, axial or absolute", otherwise="mixed with frequencies, else axial"),
        "num_attention_heads": Option((int,), HEADS, otherwise="heads of 64 channels"),
        "rope_theta": Option((float,), "a positive number", 100.0),
        "image_size": Option(
            SIZES, "a number, or height and width", otherwise="a square that fits the table, else 224"
        ),
        "hidden_act": Option((str,), ACTIVATION, "gelu"),
        "layer_norm_eps": Option((float,), "a positive number", 1e-6),
    },
}
