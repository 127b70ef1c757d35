"""
Learned frequencies for other engines: a GGUF file of the plain model, copied with one more tensor for llama.cpp.

llama.cpp divides the frequencies θ^(−2i/D) of a Llama by the factors in `rope_freqs.weight`, (D/2,), which its
converter writes for Llama 3 alone. Converters reorder the channels of queries and keys, but not their pairs, so factor
i remains that of frequency i.
"""

import os
from typing import Any

import numpy as np
from torch import nn

from ..auto import load_checkpoint
from ..errors import InputError, require_libraries
from ..patching.apply import require_patched
from ..patching.plain_rope import PlainRope
from ..storage.targets import new_file


FACTORS = "rope_freqs.weight"
# Metadata that files may lack.
DEFAULTS = {"llama.rope.freq_base": 10000.0, "llama.rope.scaling.type": "none", "split.count": 1}
# Relative, of weights that the file may have rounded to bfloat16.
ROUNDING = 2**-8


def export_gguf(
    checkpoint: str | os.PathLike, output: str | os.PathLike, gguf: str | os.PathLike, revision: str | None = None
) -> str:
    """
    Copy the GGUF file of a plain model with the frequencies that the patched model has learned; returns a message.

    Args:
        checkpoint: A Llama, patched with `rope_mixed`, `rotary_init="pretrained"` and `share_layers=True`.
        output: File to write; it must not exist.
        gguf: The file of the same model without rotations, of any quantization, as llama.cpp's converter writes it
            after `unpatch(model)`.

    Raises:
        InputError: if the file is not that of the model, or one that llama.cpp reads no factors from.
        ValueError: if the frequencies differ by layer or head, are not positive, or belong to several axes.
        MissingLibraryError: without the library gguf.
    """
    require_libraries("A GGUF file", "export", "gguf")
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.scripts.gguf_new_metadata import copy_with_new_metadata

    model, _ = load_checkpoint(checkpoint, revision)
    (name, tower), *others = require_patched(model)
    parameters = PlainRope(name, tower).parameters
    if others or parameters.get("attention_factor") != 1:
        raise InputError(
            f"{checkpoint} has more than one set of frequencies, or multiplies cos and sin (YaRN), and llama.cpp reads "
            "only one set of factors of frequencies."
        )
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError) as error:
        raise InputError(f"{gguf} is not a GGUF file ({error}); accepted: that of the plain model.") from error
    factors = np.array(parameters["short_factor"], np.dtype("float32").newbyteorder(reader.byte_order))  # (D/2,)
    _check_source(reader, gguf, tower, parameters["rope_theta"], len(factors))
    kept = [tensor for tensor in reader.tensors if tensor.name != FACTORS]
    reader.tensors = [*kept, kept[0]._replace(name=FACTORS, tensor_type=GGMLQuantizationType.F32, data=factors)]
    with new_file(output) as partial:
        writer = GGUFWriter(partial, "llama", endianess=reader.endianess)
        writer.data_alignment = reader.alignment
        copy_with_new_metadata(reader, writer, {}, [])
    return f"{output}: {gguf} with learned frequencies ({FACTORS})"


def _check_source(reader: Any, gguf: str | os.PathLike, tower: nn.Module, theta: float, planes: int) -> None:
    """Raise `InputError` unless a file contains the weights of a tower, with frequencies θ^(−2i/D)."""
    values = DEFAULTS | {name: field.contents() for name, field in reader.fields.items()}
    wanted = {
        **DEFAULTS,
        "general.architecture": "llama",
        "llama.block_count": tower.config.num_hidden_layers,
        "llama.rope.dimension_count": 2 * planes,
        "llama.rope.freq_base": float(np.float32(theta)),
    }
    for name, value in wanted.items():
        found = values.get(name)
        if found != value:
            raise InputError(f"{gguf} has {name}={found!r}; accepted: {value!r}, a file of the plain model.")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    norm = tensors.get("output_norm.weight", np.empty(0))  # (hidden_size,)
    weight = tower.norm.weight.detach().float().cpu().numpy()  # (hidden_size,)
    if norm.shape != weight.shape or not np.allclose(norm, weight, rtol=ROUNDING, atol=0):
        raise InputError(
            f"{gguf} contains other weights than the model (output_norm.weight): convert the model itself, after "
            "unpatch(model) and save_pretrained."
        )
