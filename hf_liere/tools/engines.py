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
# Metadata that change nothing with these values, or where they are absent.
NEUTRAL = {
    "split.count": 1,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scale_linear": 1.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.finetuned": False,
}
# Rows of quantized matrices that are compared.
SAMPLES = 256
# Accepted error of a row in units of 2^(−bits per weight); rounding of normal weights causes 1.8, whatever the bits.
QUANTIZATION = 4.0


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
    _check_metadata(reader, gguf, tower.config, parameters["rope_theta"], len(factors))
    _check_tensors(reader, gguf, model, tower)
    kept = [tensor for tensor in reader.tensors if tensor.name != FACTORS]
    reader.tensors = [*kept, kept[0]._replace(name=FACTORS, tensor_type=GGMLQuantizationType.F32, data=factors)]
    with new_file(output) as partial:
        writer = GGUFWriter(partial, "llama", endianess=reader.endianess)
        writer.data_alignment = reader.alignment
        copy_with_new_metadata(reader, writer, {}, [])
    return f"{output}: {gguf} with learned frequencies ({FACTORS})"


def _check_metadata(reader: Any, gguf: str | os.PathLike, config: Any, theta: float, planes: int) -> None:
    """Raise `InputError` unless a file describes a Llama of a configuration, with frequencies θ^(−2i/D)."""
    if config.hidden_act != "silu" or getattr(config, "sliding_window", None) is not None:
        raise InputError(
            f"{type(config).__name__}: accepted is hidden_act='silu' without sliding_window, as in a Llama."
        )
    heads = config.num_attention_heads
    size, usual = getattr(config, "head_dim", None) or config.hidden_size // heads, config.hidden_size // heads
    # (what llama.cpp takes where it is absent, what the model has)
    wanted = {name: (value, value) for name, value in NEUTRAL.items()} | {
        "general.architecture": (None, "llama"),
        "llama.vocab_size": (config.vocab_size, config.vocab_size),
        "llama.block_count": (None, config.num_hidden_layers),
        "llama.embedding_length": (None, config.hidden_size),
        "llama.feed_forward_length": (None, config.intermediate_size),
        "llama.attention.head_count": (None, heads),
        "llama.attention.head_count_kv": (heads, config.num_key_value_heads),
        "llama.attention.key_length": (usual, size),
        "llama.attention.value_length": (usual, size),
        "llama.attention.layer_norm_rms_epsilon": (None, float(np.float32(config.rms_norm_eps))),
        "llama.rope.dimension_count": (size, 2 * planes),
        "llama.rope.freq_base": (10000.0, float(np.float32(theta))),
    }
    values = {name: field.contents() for name, field in reader.fields.items()}
    for name, (absent, value) in wanted.items():
        found = values.get(name, absent)
        if found != value:
            raise InputError(f"{gguf} has {name}={found!r}; accepted: {value!r}, a file of the plain model.")
    for name in values:
        if name.startswith("llama.") and name not in (*wanted, "llama.context_length"):
            raise InputError(f"{gguf} has {name}={values[name]!r}; accepted: files of plain models, which lack it.")


def _check_tensors(reader: Any, gguf: str | os.PathLike, model: Any, tower: nn.Module) -> None:
    """Raise `InputError` unless a file contains the weights of a model: exactly in their type, or quantized."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    config, head = tower.config, model.get_output_embeddings()
    weights = {f"model.{name}": weight for name, weight in tower.named_parameters() if "rotary_" not in name}
    if head is not None:
        weights["lm_head.weight"] = head.weight
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    wanted = {names.get_name(name, (".weight", ".bias")) or name: weight for name, weight in weights.items()}
    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name != FACTORS}
    if config.tie_word_embeddings and "output.weight" not in found:
        wanted.pop("output.weight", None)
    for name in sorted(wanted.keys() | found.keys()):
        if name not in wanted or name not in found:
            reason = "which the model lacks" if name in found else "of the model missing"
        else:
            weight = wanted[name].detach().float().cpu()  # (outputs, inputs) or (channels,)
            for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
                if f".{part}." in name:
                    # Channels i and i + D/2 of a head become neighbours.
                    weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            reason = _difference(found[name], weight.numpy())
        if reason:
            raise InputError(
                f"{gguf} contains other weights than the model ({name}, {reason}): convert the model itself, with "
                "adapters merged, after unpatch(model) and save_pretrained."
            )


def _difference(tensor: Any, weight: np.ndarray) -> str | None:
    """How a tensor of a file differs from a weight, (rows, inputs) or (channels,), by more than its type rounds."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

    kind, data = tensor.tensor_type, tensor.data
    if tuple(tensor.shape)[::-1] != weight.shape:
        return f"of shape {tuple(tensor.shape)[::-1]} instead of {weight.shape}"
    if kind.name in ("F32", "F16", "BF16"):
        values, exact = dequantize(data, kind), dequantize(quantize(weight, kind), kind)
        return None if np.array_equal(values, exact) else f"off by up to {np.abs(values - exact).max():.1e}"
    rows = np.unique(np.linspace(0, len(weight) - 1, SAMPLES).round().astype(int))
    try:
        values = dequantize(data[rows], kind)  # (samples, inputs)
    except NotImplementedError:
        return f"whose type {GGMLQuantizationType(kind).name} is unknown"
    block, size = GGML_QUANT_SIZES[kind]
    spread = np.sqrt(np.square(weight[rows]).mean(1))  # (samples,)
    error = np.sqrt(np.square(values - weight[rows]).mean(1)) / np.maximum(spread, 1e-3 * spread.max() + 1e-30)
    # A row of zeros is off by 1, one of other weights by 1.4.
    tolerance = min(QUANTIZATION * 2 ** (-8 * size / block), 0.75)
    return None if (error <= tolerance).all() else f"rows off by up to {error.max():.0%} in type {kind.name}"
