"""
The definition of what hf_liere computes, in plain PyTorch: `encodings.py` rotates queries and keys, `model.py` has the
transformers. Tests compare the package with it, checkpoints carry it, `hf-liere bundle layer` copies its first half.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .encodings import ENCODINGS as PLAIN_ENCODINGS
from .encodings import LieRotary, grid_positions


__all__ = [
    "MARK",
    "PLAIN_ENCODINGS",
    "LieRotary",
    "grid_positions",
    "layer_code",
    "model_code",
    "plain_layer",
    "processor_code",
    "towers_code",
]

FOLDER = Path(__file__).parent
# Every file of code that a save writes begins with this.
MARK = "# Code of hf_liere "
HEAD = f"{MARK}{__version__}; `pip install .` in a clone of it adds fast kernels and folding.\n"
LAYER_HEAD = """\
# A layer of hf_liere {version} that needs torch alone. The package has it with kernels, other encodings, starts at
# any RoPE (`like`) and folding. Parameters have the same names and values there: `layer.encoding.load_state_dict`.
#
#     from {module} import {name}, grid_positions
#     rotary = {name}(num_heads=8, head_dim=64, num_axes={axes})
#     query, key = rotary(query, key, positions)  # (B, 8, N, 64) each, positions (N, {axes}) or (B, N, {axes})
"""


def layer_code(position_encoding: str, module: str) -> str:
    """
    The code of rotary layers for a file `module`.py that needs torch alone, with an example of one encoding.
    """
    kind = PLAIN_ENCODINGS[position_encoding]
    axes = 2 if any(kind.accepts(size, 24, 2) for size in range(2, 25)) else 3
    head = LAYER_HEAD.format(version=__version__, module=module, name=kind.__name__, axes=axes)
    return head + (FOLDER / "encodings.py").read_text("utf-8")


def model_code() -> str:
    """The file beside the weights of every checkpoint: `encodings.py` and `model.py` in one."""
    encodings, model = ((FOLDER / name).read_text("utf-8") for name in ("encodings.py", "model.py"))
    known = [line for line in encodings.splitlines() if line.startswith(("import ", "from "))]
    lines = [line for line in model.splitlines() if line not in known and not line.startswith("from .encodings ")]
    return HEAD + encodings + "\n\n" + "\n".join(lines).replace("\n\n\n\n", "\n\n\n") + "\n"


def towers_code() -> str:
    """The file beside patched vision towers; it imports that of models."""
    towers = (FOLDER / "towers.py").read_text("utf-8")
    return HEAD + towers.replace("from .model import", "from .modeling_liere import")


def processor_code() -> str:
    """The file beside video processors."""
    return HEAD + (FOLDER / "video_processing.py").read_text("utf-8")


@torch.no_grad()
def plain_layer(config: Any, num_axes: int, parameters: Mapping[str, torch.Tensor], layer: int) -> LieRotary:
    """
    One layer of a rotary encoding, in float64 on the CPU.

    Args:
        config: Configuration of the encoding.
        parameters: Its parameters by name, of all layers.
    """
    kind = PLAIN_ENCODINGS[config.position_encoding]
    plain = kind(
        config.num_attention_heads,
        config.head_dim,
        num_axes,
        config.block_size,
        share_heads=config.share_heads,
        rotary_init="zeros" if kind.starts else None,
        rotary_init_scale=config.rotary_init_scale,
        rope_theta=config.rope_theta,
        **{name: getattr(config, name) for name in kind.fields},
    ).double()
    for name, parameter in plain.named_parameters():
        values = parameters[name].detach()
        for axis, (size, needed) in enumerate(zip(values.shape, parameter.shape, strict=True)):
            if size != needed:
                # The axis of layers.
                values = values.narrow(axis, layer, 1)
        parameter.copy_(values)
    return plain
