"""
One converter per kind of source: official tensors → ours, and what configuration they need.

A converter takes every tensor it understands from a [`SourceTensors`], whose shapes are checked when they are taken,
and returns [`ModelParts`]; tensors that nobody took are an error. The options of each are listed in `conversion.py`.
"""

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from transformers.activations import ACT2FN

from .errors import InputError
from .lie_algebra import skew_entries


class ConversionError(InputError):
    """A checkpoint or an option that cannot be converted, with the reason."""


class SourceTensors:
    """A state dict that knows which of its tensors were used, and checks their shapes when they are."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.tensors = dict(tensors)
        self.taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def take(self, key: str, *shape: int | None) -> torch.Tensor:
        """The tensor under `key`; `None` in `shape` stands for any size."""
        if key not in self.tensors:
            raise ConversionError(f"The checkpoint has no tensor {key!r}.")
        tensor = self.tensors[key]
        if len(tensor.shape) != len(shape) or any(a not in (None, b) for a, b in zip(shape, tensor.shape)):
            expected = tuple("any" if size is None else size for size in shape)
            raise ConversionError(
                f"{key!r} has shape {tuple(tensor.shape)}, which contradicts the other tensors or the options: "
                f"expected {expected}."
            )
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ConversionError(f"{key!r} ({tensor.dtype}) must hold finite floating point numbers.")
        self.taken.add(key)
        return tensor

    def any(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, key) for key in self.tensors)

    def count(self, pattern: str) -> int:
        """Number of layers, from the first group of `pattern`."""
        matches = (re.match(pattern, key) for key in self.tensors)
        layers = {int(match[1]) for match in matches if match}
        if not layers:
            raise ConversionError(f"The checkpoint has no layers: no tensor's name begins as in {pattern!r}.")
        if layers != set(range(len(layers))):
            missing = sorted(set(range(max(layers))) - layers)
            raise ConversionError(f"The checkpoint has layers up to {max(layers)}, but none of {missing}.")
        return len(layers)

    def ignore(self, pattern: str) -> list[str]:
        ignored = [key for key in self.tensors if key not in self.taken and re.fullmatch(pattern, key)]
        self.taken.update(ignored)
        return ignored

    def finish(self) -> None:
        unknown = sorted(set(self.tensors) - self.taken)
        if unknown:
            raise ConversionError(
                f"The checkpoint holds {len(unknown)} tensors that this kind of model does not have, such as "
                f"{', '.join(unknown[:5])}."
            )


@dataclass
class ModelParts:
    """What a converter finds: extents of a patch, configuration fields, the encoder's tensors and the classifier's."""

    patch: tuple[int, ...]
    fields: dict
    encoder: dict[str, torch.Tensor] = field(default_factory=dict)
    head: dict[str, torch.Tensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def _sizes(name: str, value: int | Iterable[int], axes: int) -> tuple[int, ...]:
    sizes = (value,) * axes if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else ()
    if len(sizes) != axes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ConversionError(f"{name}={value!r} must be one positive number, or one for each of {axes} axes.")
    return sizes


def _root(name: str, number: int) -> int:
    root = math.isqrt(number)
    if root * root != number:
        raise ConversionError(f"{number} is not a square, so {name} cannot be read off the shapes: please give it.")
    return root


def _heads(hidden_size: int, given: int | None, found: int | None = None) -> int:
    if given is not None and found is not None and given != found:
        raise ConversionError(f"num_attention_heads={given} contradicts the checkpoint's {found}.")
    heads = found or given or max(1, hidden_size // 64)
    if hidden_size % heads:
        raise ConversionError(
            f"A width of {hidden_size} is not divisible into {heads} heads: please give num_attention_heads."
        )
    return heads


def require_one_of(name: str, value: str | None, accepted: Iterable[str | None]) -> None:
    accepted = list(accepted)
    if value not in accepted:
        raise ConversionError(f"{name}={value!r} must be one of {', '.join(map(repr, accepted))} for this checkpoint.")


def _shape_fields(patch: tuple[int, ...], image: tuple[int, ...]) -> dict:
    """Fields of the image or, with three axes, of the video configuration."""

    def extent(sizes):
        return sizes[0] if sizes[0] == sizes[1] else list(sizes)

    fields = {"patch_size": extent(patch[-2:]), "image_size": extent(image[-2:])}
    if len(patch) == 3:
        fields |= {"tubelet_size": patch[0], "num_frames": image[0]}
    return fields


def _axial_fields(
    parts: ModelParts,
    frequencies: torch.Tensor,
    theta: float | None,
    head_dim: int,
    scale: Iterable[float] | None = None,
) -> None:
    """
    Fixed frequencies, (q,) for every axis and axis by axis in the head: `axial_rope` with base `theta` where these are
    its frequencies, else shared generators of RoPE-Mixed.
    """
    axes = len(parts.patch)
    planes = len(frequencies)
    geometric = theta is not None and 0 < theta < math.inf and planes == head_dim // (2 * axes) and scale is None
    if geometric:
        parts.fields |= {"position_encoding": "axial_rope", "rope_theta": theta}
        return
    scaled = [frequencies * factor for factor in (scale or [1.0] * axes)]
    entries = torch.block_diag(*[row.unsqueeze(0) for row in scaled])
    entries = torch.nn.functional.pad(entries, (0, head_dim // 2 - entries.shape[1]))
    parts.fields |= {"position_encoding": "rope_mixed", "share_heads": True, "share_layers": True}
    parts.encoder["rotary_encoding.generators"] = entries.view(axes, 1, 1, -1, 1).float()


def _linear(parts: ModelParts, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    parts.encoder[f"{name}.weight"] = weight
    if bias is not None:
        parts.encoder[f"{name}.bias"] = bias


def _norm(parts: ModelParts, name: str, tensors: SourceTensors, key: str, size: int) -> None:
    _linear(parts, name, tensors.take(f"{key}.weight", size), tensors.take(f"{key}.bias", size))


def _mlp(parts: ModelParts, name: str, tensors: SourceTensors, first: str, second: str, hidden_size: int) -> None:
    weight = tensors.take(f"{first}.weight", None, hidden_size)
    width = weight.shape[0]
    if parts.fields.setdefault("intermediate_size", width) != width:
        raise ConversionError(f"{first!r} is {width} wide, earlier layers {parts.fields['intermediate_size']}.")
    _linear(parts, f"{name}.fc1", weight, tensors.take(f"{first}.bias", width))
    _linear(
        parts,
        f"{name}.fc2",
        tensors.take(f"{second}.weight", hidden_size, width),
        tensors.take(f"{second}.bias", hidden_size),
    )


def _head(parts: ModelParts, tensors: SourceTensors, key: str, hidden_size: int) -> None:
    """A linear classifier under `key`, if there is one."""
    if f"{key}.weight" in tensors:
        weight = tensors.take(f"{key}.weight", None, hidden_size)
        parts.head = {"weight": weight, "bias": tensors.take(f"{key}.bias", weight.shape[0])}


def _liere(
    tensors: SourceTensors,
    *,
    position_encoding: str | None = None,
    patch_size: int | Iterable[int] | None = None,
    image_size: int | Iterable[int] | None = None,
    num_channels: int = 3,
    num_axes: int | None = None,
    pooling: str = "cls",
    layer_generators: str = "official",
) -> ModelParts:
    require_one_of("pooling", pooling, ("cls", "mean"))
    require_one_of("layer_generators", layer_generators, ("official", "paper"))
    generators_key = "position_encoder.generator_raw_params"
    learned = generators_key in tensors
    projection = tensors.take("to_patch_embedding.1.weight", None, None)
    hidden_size, volume = projection.shape
    if learned:
        found = tensors.take(generators_key, None, None, None, None, None).shape[0]
        if num_axes not in (None, found):
            raise ConversionError(f"num_axes={num_axes} contradicts the generators of {found} axes.")
        num_axes = found
    elif num_axes is None:
        num_axes = len(list(patch_size)) if isinstance(patch_size, Iterable) else 2
    if num_axes not in (2, 3):
        raise ConversionError(f"Inputs of {num_axes} axes: accepted are 2 (images) and 3 (volumes and videos).")

    table = tensors.take("pos_embedding", 1, None, hidden_size)
    patch = _liere_patch(patch_size, num_axes, num_channels, volume)
    image = _liere_image(image_size, patch, table.shape[1] - 1, learned)
    depth = tensors.count(r"transformer\.layers\.(\d+)\.")
    rows = tensors.take("transformer.layers.0.0.fn.to_qkv.weight", None, hidden_size).shape[0]
    if rows % 192:
        raise ConversionError(f"to_qkv has {rows} rows, not a multiple of 3 · 64: LieRE's heads are 64 wide.")
    heads, head_dim = rows // 192, 64
    parts = ModelParts(
        patch,
        {
            **_shape_fields(patch, image),
            "num_channels": num_channels,
            "hidden_size": hidden_size,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "qkv_bias": False,
            "layer_norm_eps": 1e-5,
            # Hard-wired in the official code.
            "hidden_dropout_prob": 0.1,
            "pooling": "mean_all" if pooling == "mean" else "cls",
            "final_norm": "pooled",
        },
    )
    # The official linear map reads a patch pixel by pixel, channels fastest.
    kernel = projection.view(hidden_size, *patch, num_channels).movedim(-1, 1)
    bias = tensors.take("to_patch_embedding.1.bias", hidden_size)
    _linear(parts, "embeddings.patch_embeddings.projection", kernel, bias)
    parts.encoder["embeddings.cls_token"] = tensors.take("cls_token", 1, 1, hidden_size)
    _liere_layers(parts, tensors)
    _norm(parts, "layernorm", tensors, "mlp_head.0", hidden_size)
    _head(parts, tensors, "mlp_head.1", hidden_size)

    rotated = min(hidden_size // heads, head_dim)
    if learned:
        require_one_of("position_encoding", position_encoding, (None, "liere", "rope_mixed"))
        _liere_generators(parts, tensors.take(generators_key, num_axes, None, None, None, None), layer_generators)
        parts.ignored.append("pos_embedding")
        return parts
    require_one_of("position_encoding", position_encoding, (None, "absolute", "visionllama"))
    if position_encoding is None:
        position_encoding = "absolute" if table.count_nonzero() else "visionllama"
    if position_encoding == "absolute":
        parts.fields |= {"position_encoding": "absolute"}
        parts.encoder["embeddings.position_embeddings"] = table
        return parts
    planes = rotated // num_axes // 2
    exponents = torch.linspace(0, 1, planes, dtype=torch.float64)
    theta = math.exp(4 * planes / (planes - 1)) if planes > 1 else 1.0
    _axial_fields(parts, torch.exp(-4 * exponents), theta, head_dim)
    parts.fields["coordinates"] = "train_grid"
    if table.count_nonzero():
        parts.fields |= {"use_absolute_position_embeddings": True, "position_table_resize": "truncate"}
        parts.encoder["embeddings.position_embeddings"] = table
    else:
        parts.ignored.append("pos_embedding")
    return parts


def _liere_patch(
    patch_size: int | Iterable[int] | None, num_axes: int, num_channels: int, volume: int
) -> tuple[int, ...]:
    """Extents of a patch of `volume` values."""
    if patch_size is None:
        if num_axes == 3:
            raise ConversionError("The shapes of a model of volumes do not tell its patch: please give patch_size.")
        if volume % num_channels:
            raise ConversionError(f"Patches of {volume} values do not have num_channels={num_channels}.")
        patch_size = _root("patch_size", volume // num_channels)
    patch = _sizes("patch_size", patch_size, num_axes)
    if math.prod(patch) * num_channels != volume:
        raise ConversionError(
            f"Patches of {patch} with {num_channels} channels have {math.prod(patch) * num_channels} values; the "
            f"checkpoint's have {volume}."
        )
    return patch


def _liere_image(
    image_size: int | Iterable[int] | None, patch: tuple[int, ...], patches: int, learned: bool
) -> tuple[int, ...]:
    """Extents of a training input of `patches` patches."""
    if image_size is None:
        if len(patch) == 3:
            raise ConversionError("The shapes of a model of volumes do not tell its input: please give image_size.")
        image_size = tuple(_root("image_size", patches) * size for size in patch)
    image = _sizes("image_size", image_size, len(patch))
    grid = tuple(size // extent for size, extent in zip(image, patch))
    # The official code builds a square table of the last axis for every 2-D model, which learned rotations ignore.
    if patches not in (math.prod(grid), grid[-1] ** 2 if len(patch) == 2 and learned else None):
        raise ConversionError(f"image_size={image_size} has {math.prod(grid)} patches; the table has {patches}.")
    return image


def _liere_layers(parts: ModelParts, tensors: SourceTensors) -> None:
    hidden_size, heads = parts.fields["hidden_size"], parts.fields["num_attention_heads"]
    width = heads * parts.fields["head_dim"]
    projected = tensors.any(r"transformer\.layers\.\d+\.0\.fn\.to_out\..*") or heads > 1 or hidden_size != width
    for index in range(parts.fields["num_hidden_layers"]):
        official, ours = f"transformer.layers.{index}", f"layers.{index}"
        _norm(parts, f"{ours}.layernorm_before", tensors, f"{official}.0.norm", hidden_size)
        qkv = tensors.take(f"{official}.0.fn.to_qkv.weight", 3 * width, hidden_size)
        for name, weight in zip("qkv", qkv.chunk(3)):
            parts.encoder[f"{ours}.attention.{name}_proj.weight"] = weight
        weight, bias = torch.eye(width), torch.zeros(width)
        if projected:
            weight = tensors.take(f"{official}.0.fn.to_out.0.weight", hidden_size, width)
            bias = tensors.take(f"{official}.0.fn.to_out.0.bias", hidden_size)
        _linear(parts, f"{ours}.attention.o_proj", weight, bias)
        _norm(parts, f"{ours}.layernorm_after", tensors, f"{official}.1.norm", hidden_size)
        _mlp(parts, f"{ours}.mlp", tensors, f"{official}.1.fn.net.0", f"{official}.1.fn.net.3", hidden_size)


def _liere_generators(parts: ModelParts, raw: torch.Tensor, layer_generators: str) -> None:
    """From (axes, layers or 1, blocks of all heads, g, g); with U the strictly upper triangle, exp(p (U − Uᵀ)) acts."""
    fields = parts.fields
    depth, heads, head_dim = fields["num_hidden_layers"], fields["num_attention_heads"], fields["head_dim"]
    axes, layers, count, size, columns = raw.shape
    if size != columns or size < 2 or layers not in (1, depth):
        raise ConversionError(
            f"Generators of shape {tuple(raw.shape)} must be (axes, 1 or {depth} layers, blocks, b, b) with b ≥ 2."
        )
    # The official position encoder divides the model's width, the official attention takes 64 channels per head.
    per_head = fields["hidden_size"] // heads // size
    blocks = head_dim // size
    if per_head < 1 or per_head > blocks or count not in (per_head, per_head * heads):
        raise ConversionError(
            f"{count} generators of size {size} do not fit {heads} heads: expected {per_head} shared or "
            f"{per_head * heads} separate ones, and at most {blocks} in the {head_dim} channels of a head."
        )
    share_heads = heads > 1 and count == per_head
    share_layers = layers == 1 or layer_generators == "official"
    entries = -skew_entries(raw.transpose(-1, -2)).float()
    if share_layers:
        entries = entries[:, :1]
    entries = entries.unflatten(2, (1 if share_heads else heads, per_head))
    # Blocks that the official encoder does not have turn nothing.
    entries = torch.nn.functional.pad(entries, (0, 0, 0, blocks - per_head))
    fields |= {
        "position_encoding": "rope_mixed" if size == 2 else "liere",
        "block_size": size,
        "coordinates": "train_grid",
        "share_heads": share_heads,
        "share_layers": share_layers,
    }
    parts.encoder["rotary_encoding.generators"] = entries


def _clip_layers(parts: ModelParts, tensors: SourceTensors, prefix: str) -> None:
    """The transformer of CLIP's vision tower, which ComRoPE's models are made of."""
    hidden_size = parts.fields["hidden_size"]
    _norm(parts, "pre_layernorm", tensors, f"{prefix}pre_layrnorm", hidden_size)
    for index in range(parts.fields["num_hidden_layers"]):
        official, ours = f"{prefix}encoder.layers.{index}", f"layers.{index}"
        _norm(parts, f"{ours}.layernorm_before", tensors, f"{official}.layer_norm1", hidden_size)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            key = f"{official}.self_attn.{name}"
            _linear(
                parts,
                f"{ours}.attention.{name.replace('out', 'o')}",
                tensors.take(f"{key}.weight", hidden_size, hidden_size),
                tensors.take(f"{key}.bias", hidden_size),
            )
        _norm(parts, f"{ours}.layernorm_after", tensors, f"{official}.layer_norm2", hidden_size)
        _mlp(parts, f"{ours}.mlp", tensors, f"{official}.mlp.fc1", f"{official}.mlp.fc2", hidden_size)


def _clip_parts(
    tensors: SourceTensors, prefix: str, heads: int, hidden_act: str, layer_norm_eps: float, axes: int = 2
) -> ModelParts:
    """Fields and embeddings without positions."""
    weight = tensors.take(f"{prefix}embeddings.patch_embedding.weight", None, None, None, None)
    hidden_size, channels, *patch = weight.shape
    if axes == 3:
        weight, patch = weight.unsqueeze(2), [1, *patch]
    parts = ModelParts(
        tuple(patch),
        {
            "num_channels": channels,
            "hidden_size": hidden_size,
            "num_hidden_layers": tensors.count(re.escape(prefix) + r"encoder\.layers\.(\d+)\."),
            "num_attention_heads": heads,
            "hidden_act": hidden_act,
            "layer_norm_eps": layer_norm_eps,
            "use_pre_layernorm": True,
            "final_norm": "pooled",
            "pooling": "cls",
        },
    )
    _linear(parts, "embeddings.patch_embeddings.projection", weight, torch.zeros(hidden_size))
    class_token = tensors.take(f"{prefix}embeddings.class_embedding", hidden_size)
    parts.encoder["embeddings.cls_token"] = class_token.view(1, 1, -1)
    _clip_layers(parts, tensors, prefix)
    return parts


COMROPE_ENCODINGS = {
    "liere": "liere",
    "comrope-ap": "comrope_ap",
    "comrope-ld": "comrope_ld",
    "vanilla-rope": "axial_rope",
    "raw": "absolute",
    "none": "none",
}


def _comrope(
    tensors: SourceTensors,
    *,
    position_encoding: str | None = None,
    num_axes: int | None = None,
    num_attention_heads: int | None = None,
    image_size: int | None = None,
    num_frames: int | None = None,
    theta_base: float | None = None,
    scale_factor: float = 1.0,
    axis_scale: bool = True,
    cls_position: float = 0.5,
    hidden_act: str = "quick_gelu",
    layer_norm_eps: float = 1e-5,
) -> ModelParts:
    prefix = "vision_model." if "vision_model.embeddings.class_embedding" in tensors else ""
    attention = prefix + "encoder.layers.{}.self_attn.{}"
    table_key = f"{prefix}embeddings.position_embedding"
    hidden_size = tensors.take(f"{prefix}embeddings.class_embedding", None).shape[0]
    frequencies, found_heads, found_axes, encodings = None, None, None, (None, "none", "vanilla-rope")
    if attention.format(0, "freqs") in tensors:
        frequencies = tensors.take(attention.format(0, "freqs"), None, None, None, None, None)
        found_heads = frequencies.shape[0]
        encodings = (None, "comrope-ap")
        if frequencies.shape[1] > 1:
            found_axes, encodings = frequencies.shape[1], (None, "liere")
        if attention.format(0, "multiplier") in tensors:
            found_axes = tensors.take(attention.format(0, "multiplier"), 1, None, None, 1, 1).shape[1]
            encodings = (None, "comrope-ld")
    table = None
    if table_key in tensors:
        table = tensors.take(table_key, None, None, None, hidden_size)
        found_axes = found_axes or (3 if table.shape[0] > 1 else None)
        if frequencies is None:
            encodings = (None, "raw", "none", "vanilla-rope")
    if None not in (found_axes, num_axes) and found_axes != num_axes:
        raise ConversionError(f"num_axes={num_axes} contradicts the checkpoint's {found_axes} axes.")
    axes = found_axes or num_axes or 2
    if axes not in (2, 3):
        raise ConversionError(f"Inputs of {axes} axes: accepted are 2 (images) and 3 (videos).")
    require_one_of("position_encoding", position_encoding, encodings)
    encoding = COMROPE_ENCODINGS[position_encoding or encodings[1]]
    if encoding in ("none", "absolute"):
        encoding = "none" if table is None else "absolute"

    heads = _heads(hidden_size, num_attention_heads, found_heads)
    head_dim = hidden_size // heads
    parts = _clip_parts(tensors, prefix, heads, hidden_act, layer_norm_eps, axes)
    fields = parts.fields
    patch = parts.patch
    if table is not None:
        if image_size not in (None, table.shape[1] * patch[-1]) or table.shape[1] != table.shape[2]:
            raise ConversionError(
                f"A table of {tuple(table.shape)} does not fit image_size={image_size} in patches of {patch[-2:]}."
            )
        image_size = table.shape[1] * patch[-1]
        num_frames = table.shape[0] if axes == 3 else num_frames
    image_size = image_size or 14 * patch[-1]
    fields |= _shape_fields(patch, ((num_frames or 8,) if axes == 3 else ()) + (image_size, image_size))
    coordinates = ("unit_width" if axes == 3 else "unit") if axis_scale else "index"
    if encoding not in ("none", "absolute"):
        fields |= {"coordinates": coordinates, "rotate_prefix": True, "prefix_coordinate": cls_position}
    if table is not None:
        table = _comrope_table(table, axes)
        fields |= {
            "use_absolute_position_embeddings": True,
            "position_table_size": list(table.shape[:-1]),
            "coordinates": coordinates,
            "prefix_coordinate": cls_position,
        }
        parts.encoder["embeddings.position_embeddings"] = table.reshape(1, -1, hidden_size)
    _norm(parts, "layernorm", tensors, f"{prefix}post_layernorm", hidden_size)
    if "classification_head.0.weight" in tensors:
        first = tensors.take("classification_head.0.weight", None, hidden_size)
        second = tensors.take("classification_head.2.weight", None, first.shape[0])
        fields["classifier_hidden_size"] = first.shape[0]
        parts.head = {
            "0.weight": first,
            "0.bias": tensors.take("classification_head.0.bias", first.shape[0]),
            "2.weight": second,
            "2.bias": tensors.take("classification_head.2.bias", second.shape[0]),
        }
    else:
        _head(parts, tensors, "classification_head", hidden_size)
    fields["position_encoding"] = encoding
    if encoding == "axial_rope":
        _comrope_vanilla(parts, head_dim, theta_base)
    elif frequencies is not None:
        _comrope_generators(parts, tensors, attention, frequencies.shape[-1], scale_factor)
    return parts


def _comrope_table(table: torch.Tensor, axes: int) -> torch.Tensor:
    """(frames or 1, rows, columns, D) → (rows, 1, D), or (columns, rows, frames, D) read at (frame, row, column)."""
    # The official lookup hands (frame or the centre, row, column) to a sampler that takes the last axis first.
    table = table.permute(2, 1, 0, 3)
    if axes == 3:
        return table
    centre = (table.shape[0] - 1) / 2
    return (table[math.floor(centre)] + table[math.ceil(centre)]) / 2


def _comrope_vanilla(parts: ModelParts, head_dim: int, theta_base: float | None) -> None:
    """Frequencies theta_base^j, j = 0, 1, …, axis by axis."""
    axes = len(parts.patch)
    if head_dim % (2 * axes):
        raise ConversionError(f"A head of {head_dim} channels is not divisible into planes of {axes} axes.")
    planes = head_dim // axes // 2
    base = 10000.0 ** (-1 / planes) if theta_base is None else theta_base
    if not base > 0:
        raise ConversionError(f"theta_base={theta_base} must be positive.")
    # Beyond these powers the base of the spectrum is no number, though its frequencies are.
    exponent = -planes * math.log(base)
    theta = math.exp(exponent) if abs(exponent) < 700 else None
    _axial_fields(parts, base ** torch.arange(planes, dtype=torch.float64), theta, head_dim)


def _comrope_generators(
    parts: ModelParts, tensors: SourceTensors, attention: str, size: int, scale_factor: float
) -> None:
    """F − Fᵀ of all layers, and multipliers; `attention` is the official name of a layer's parameter."""
    fields, axes = parts.fields, len(parts.patch)
    depth, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    blocks, encoding = fields["hidden_size"] // heads // size, fields["position_encoding"]
    fields["block_size"] = size
    shape = (heads, axes if encoding == "liere" else 1, blocks, size, size)
    matrices = torch.stack([tensors.take(attention.format(index, "freqs"), *shape) for index in range(depth)]).float()
    entries = skew_entries(matrices - matrices.transpose(-1, -2))
    # (layers, heads, axes or 1, blocks, entries)
    entries = entries.movedim(2, 0) / scale_factor if encoding == "liere" else entries.squeeze(2)
    parts.encoder["rotary_encoding.generators"] = entries
    if encoding == "comrope_ld":
        shape = (1, axes, blocks, 1, 1)
        factors = [tensors.take(attention.format(index, "multiplier"), *shape) for index in range(depth)]
        factors = torch.stack(factors).view(depth, 1, axes, blocks).float().movedim(2, 0)
        parts.encoder["rotary_encoding.multipliers"] = factors.repeat(1, 1, heads, 1)


def _clip(
    tensors: SourceTensors,
    *,
    num_attention_heads: int | None = None,
    hidden_act: str = "quick_gelu",
    layer_norm_eps: float = 1e-5,
    image_size: int | None = None,
) -> ModelParts:
    prefix = "vision_model." if "vision_model.embeddings.class_embedding" in tensors else ""
    hidden_size = tensors.take(f"{prefix}embeddings.class_embedding", None).shape[0]
    heads = _heads(hidden_size, num_attention_heads)
    parts = _clip_parts(tensors, prefix, heads, hidden_act, layer_norm_eps)
    table = tensors.take(f"{prefix}embeddings.position_embedding.weight", None, hidden_size)
    _square_table(parts, table.unsqueeze(0), 1, image_size)
    if "classifier.weight" in tensors:
        _head(parts, tensors, "classifier", hidden_size)
        parts.fields |= {"pooling": "mean", "final_norm": "none"}
        parts.ignored += tensors.ignore(re.escape(prefix) + r"post_layernorm\..*")
    else:
        _norm(parts, "layernorm", tensors, f"{prefix}post_layernorm", hidden_size)
    other_towers = r"text_model\..*|text_projection\..*|visual_projection\..*|logit_scale"
    parts.ignored += tensors.ignore(rf"{other_towers}|{re.escape(prefix)}embeddings\.position_ids")
    parts.fields |= {"position_encoding": "absolute"}
    return parts


def _square_table(
    parts: ModelParts, table: torch.Tensor, prefix_rows: int, image_size: int | Iterable[int] | None
) -> None:
    """A table of `prefix_rows` and the patches: the class token's row and the patches' are kept."""
    patch = parts.patch
    patches = table.shape[1] - prefix_rows
    if image_size is None:
        image_size = tuple(_root("image_size", patches) * extent for extent in patch)
    image = _sizes("image_size", image_size, 2)
    if math.prod(size // extent for size, extent in zip(image, patch)) != patches:
        raise ConversionError(f"image_size={image} in patches of {patch} does not fit a table of {patches} patches.")
    parts.fields |= _shape_fields(patch, image)
    class_row = table[:, :1] if prefix_rows else table.new_zeros(1, 1, table.shape[-1])
    rows = [class_row] if "embeddings.cls_token" in parts.encoder else []
    parts.encoder["embeddings.position_embeddings"] = torch.cat([*rows, table[:, prefix_rows:]], dim=1)


VIT_NAMES = {
    r"^(vit|deit)\.": "",
    r"^encoder\.layer\.": "layers.",
    r"\.attention\.attention\.(query|key|value)\.": lambda match: f".attention.{match[1][0]}_proj.",
    r"\.attention\.output\.dense\.": ".attention.o_proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
}


def _vit(
    tensors: SourceTensors,
    *,
    num_attention_heads: int | None = None,
    hidden_act: str = "gelu",
    layer_norm_eps: float = 1e-12,
    image_size: int | Iterable[int] | None = None,
) -> ModelParts:
    renamed = {}
    for key, tensor in tensors.tensors.items():
        for pattern, replacement in VIT_NAMES.items():
            key = re.sub(pattern, replacement, key)
        renamed[key] = tensor
    tensors.tensors = renamed
    tensors.taken.clear()
    weight = tensors.take("embeddings.patch_embeddings.projection.weight", None, None, None, None)
    hidden_size, channels, *patch = weight.shape
    distilled = "embeddings.distillation_token" in tensors
    parts = ModelParts(
        tuple(patch),
        {
            "num_channels": channels,
            "hidden_size": hidden_size,
            "num_hidden_layers": tensors.count(r"layers\.(\d+)\."),
            "num_attention_heads": _heads(hidden_size, num_attention_heads),
            "num_register_tokens": int(distilled),
            "hidden_act": hidden_act,
            "layer_norm_eps": layer_norm_eps,
            "qkv_bias": tensors.any(r"layers\.\d+\.attention\.[qkv]_proj\.bias"),
            "position_encoding": "absolute",
            "pooling": "cls",
        },
    )
    bias = tensors.take("embeddings.patch_embeddings.projection.bias", hidden_size)
    _linear(parts, "embeddings.patch_embeddings.projection", weight, bias)
    parts.encoder["embeddings.cls_token"] = tensors.take("embeddings.cls_token", 1, 1, hidden_size)
    table = tensors.take("embeddings.position_embeddings", 1, None, hidden_size)
    if distilled:
        distillation = tensors.take("embeddings.distillation_token", 1, 1, hidden_size)
        parts.encoder["embeddings.register_tokens"] = distillation + table[:, 1:2]
    _square_table(parts, table, 1 + distilled, image_size)
    for index in range(parts.fields["num_hidden_layers"]):
        name = f"layers.{index}"
        _norm(parts, f"{name}.layernorm_before", tensors, f"{name}.layernorm_before", hidden_size)
        _norm(parts, f"{name}.layernorm_after", tensors, f"{name}.layernorm_after", hidden_size)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            key = f"{name}.attention.{projection}"
            has_bias = projection == "o_proj" or parts.fields["qkv_bias"]
            _linear(
                parts,
                key,
                tensors.take(f"{key}.weight", hidden_size, hidden_size),
                tensors.take(f"{key}.bias", hidden_size) if has_bias else None,
            )
        _mlp(parts, f"{name}.mlp", tensors, f"{name}.mlp.fc1", f"{name}.mlp.fc2", hidden_size)
    _norm(parts, "layernorm", tensors, "layernorm", hidden_size)
    if "distillation_classifier.weight" in tensors:
        # The mean of two classifiers is one classifier of both tokens.
        parts.fields["pooling"] = "prefix"
        classes = tensors.take("cls_classifier.bias", None).shape[0]
        names = ("cls_classifier", "distillation_classifier")
        weights = [tensors.take(f"{name}.weight", classes, hidden_size) for name in names]
        biases = [tensors.take(f"{name}.bias", classes) for name in names]
        parts.head = {"weight": torch.cat(weights, dim=1) / 2, "bias": sum(biases) / 2}
    else:
        _head(parts, tensors, "classifier", hidden_size)
    parts.ignored += tensors.ignore(r"pooler\.dense\..*|embeddings\.mask_token|decoder\..*")
    return parts


def _naver(tensors: SourceTensors, **options) -> ModelParts:
    return _timm_parts(tensors, "interpolate", **options)


def _timm(tensors: SourceTensors, **options) -> ModelParts:
    return _timm_parts(tensors, "antialias", **options)


def _timm_parts(
    tensors: SourceTensors,
    table_resize: str,
    *,
    position_encoding: str | None = None,
    num_attention_heads: int | None = None,
    axis_order: str | None = None,
    rope_theta: float | None = None,
    reference_grid: int | Iterable[int] | None = None,
    image_size: int | Iterable[int] | None = None,
    pooling: str | None = None,
    hidden_act: str = "gelu",
    layer_norm_eps: float = 1e-6,
) -> ModelParts:
    require_one_of("axis_order", axis_order, (None, "columns_first", "rows_first"))
    require_one_of("pooling", pooling, (None, "cls", "mean"))
    weight = tensors.take("patch_embed.proj.weight", None, None, None, None)
    hidden_size, channels, *patch = weight.shape
    depth = tensors.count(r"blocks\.(\d+)\.")
    frequencies, found_heads, encodings = None, None, (None, "axial", "absolute", "none")
    if "freqs" in tensors or "rope.freqs" in tensors:
        encodings = (None, "mixed")
        if "rope.freqs" in tensors:
            frequencies = tensors.take("rope.freqs", 2, depth, None, None)
            found_heads = frequencies.shape[2]
        else:
            flat = tensors.take("freqs", 2, depth, hidden_size // 2)
            frequencies = flat.unflatten(-1, (_heads(hidden_size, num_attention_heads), -1))
    require_one_of("position_encoding", position_encoding, encodings)
    heads = _heads(hidden_size, num_attention_heads, found_heads)
    head_dim = hidden_size // heads
    has_class = "cls_token" in tensors
    pooled_norm = "fc_norm.weight" in tensors
    if not has_class and not pooled_norm and pooling is None:
        raise ConversionError(
            "The checkpoint has no tensor 'cls_token' and no 'fc_norm' of a mean: please give pooling."
        )
    axis_order = axis_order or ("columns_first" if has_class else "rows_first")
    parts = ModelParts(
        tuple(patch),
        {
            "num_channels": channels,
            "hidden_size": hidden_size,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "hidden_act": hidden_act,
            "layer_norm_eps": layer_norm_eps,
            "qkv_bias": tensors.any(r"blocks\.\d+\.attn\.(qkv\.bias|[qv]_bias)"),
            "use_class_token": has_class,
            "use_pre_layernorm": "norm_pre.weight" in tensors,
            "final_norm": "pooled" if pooled_norm else "tokens",
            "pooling": pooling or ("mean" if pooled_norm else "cls"),
        },
    )
    fields = parts.fields
    # timm leaves this bias out before a norm of the embeddings.
    bias = torch.zeros(hidden_size)
    if not fields["use_pre_layernorm"] or "patch_embed.proj.bias" in tensors:
        bias = tensors.take("patch_embed.proj.bias", hidden_size)
    _linear(parts, "embeddings.patch_embeddings.projection", weight, bias)
    default_size = 224 if axis_order == "columns_first" else 256
    prefix_rows = _timm_tokens(parts, tensors, image_size, default_size, table_resize)
    encoding = position_encoding
    if encoding is None and frequencies is None:
        if has_class and fields["num_register_tokens"] and not prefix_rows:
            raise ConversionError(
                "The names of a model with class and register tokens do not tell its rotations: please give "
                "position_encoding, one of 'axial', 'absolute' and 'none'."
            )
        # A plain ViT's table has a row for the class token, that of rope-vit has none.
        encoding = "absolute" if prefix_rows else "axial"
    elif encoding is None:
        encoding = "mixed"

    # Ours are rows first, so the half of a head that turns with columns changes places with the other.
    _timm_layers(parts, tensors, swapped=encoding == "axial" and axis_order == "columns_first")
    _norm(parts, "layernorm", tensors, "fc_norm" if pooled_norm else "norm", hidden_size)
    _head(parts, tensors, "head", hidden_size)
    parts.ignored += tensors.ignore(r"freqs_t_[xy]|rope\.(bands|t_x|t_y|pos_embed)")

    if encoding == "mixed":
        fields |= {"position_encoding": "rope_mixed", "coordinates": "index"}
        if frequencies.shape[-1] * 2 != head_dim:
            raise ConversionError(f"{frequencies.shape[-1]} frequencies per head do not fill heads of {head_dim}.")
        # (columns, rows), layers, heads, planes -> rows first
        parts.encoder["rotary_encoding.generators"] = frequencies.flip(0).unsqueeze(-1).float()
    elif encoding == "axial":
        if reference_grid is None and axis_order == "rows_first":
            reference_grid = 16
        theta = rope_theta or (100.0 if axis_order == "columns_first" else 10000.0)
        _timm_axial(parts, head_dim, theta, reference_grid)
    else:
        fields["position_encoding"] = encoding
    if encoding in ("absolute", "none") and (encoding == "absolute") != ("pos_embed" in tensors):
        raise ConversionError(f"position_encoding={encoding!r} contradicts the presence or absence of 'pos_embed'.")
    return parts


def _timm_tokens(
    parts: ModelParts,
    tensors: SourceTensors,
    image_size: int | Iterable[int] | None,
    default_size: int,
    table_resize: str,
) -> int:
    """Class and register tokens, norm and table; returns how many rows of the table are not of patches."""
    fields, hidden_size = parts.fields, parts.fields["hidden_size"]
    if fields["use_class_token"]:
        parts.encoder["embeddings.cls_token"] = tensors.take("cls_token", 1, 1, hidden_size)
    registers = tensors.take("reg_token", 1, None, hidden_size) if "reg_token" in tensors else None
    fields["num_register_tokens"] = 0 if registers is None else registers.shape[1]
    if fields["use_pre_layernorm"]:
        _norm(parts, "pre_layernorm", tensors, "norm_pre", hidden_size)

    prefix_rows = 0
    if "pos_embed" in tensors:
        table = tensors.take("pos_embed", 1, None, hidden_size)
        prefix_length = int(fields["use_class_token"]) + fields["num_register_tokens"]
        if image_size is None:
            prefix_rows = 0 if math.isqrt(table.shape[1]) ** 2 == table.shape[1] else prefix_length
        else:
            sizes = _sizes("image_size", image_size, 2)
            patches = math.prod(size // extent for size, extent in zip(sizes, parts.patch))
            prefix_rows = prefix_length if table.shape[1] == patches + prefix_length else 0
        if prefix_rows and registers is not None:
            registers = registers + table[:, int(fields["use_class_token"]) : prefix_length]
        if prefix_rows and not fields["use_class_token"]:
            _square_table(parts, table[:, prefix_rows:], 0, image_size)
        else:
            _square_table(parts, table, prefix_rows, image_size)
        fields |= {"use_absolute_position_embeddings": True, "position_table_resize": table_resize}
    else:
        fields |= _shape_fields(parts.patch, _sizes("image_size", image_size or default_size, 2))
    if registers is not None:
        parts.encoder["embeddings.register_tokens"] = registers
    return prefix_rows


def _timm_layers(parts: ModelParts, tensors: SourceTensors, swapped: bool) -> None:
    fields, hidden_size, heads = parts.fields, parts.fields["hidden_size"], parts.fields["num_attention_heads"]
    fused_bias = tensors.any(r"blocks\.\d+\.attn\.qkv\.bias")
    separate_bias = tensors.any(r"blocks\.\d+\.attn\.[qv]_bias")
    scale_name = next(
        (name for name in ("gamma_{}", "ls{}.gamma") if tensors.any(rf"blocks\.\d+\.{name.format('[12]')}")), None
    )
    if scale_name is not None:
        # timm's initial value; the learned scales are in the weights.
        fields["layerscale_value"] = 1e-5
    for index in range(fields["num_hidden_layers"]):
        official, ours = f"blocks.{index}", f"layers.{index}"
        _norm(parts, f"{ours}.layernorm_before", tensors, f"{official}.norm1", hidden_size)
        _norm(parts, f"{ours}.layernorm_after", tensors, f"{official}.norm2", hidden_size)
        _mlp(parts, f"{ours}.mlp", tensors, f"{official}.mlp.fc1", f"{official}.mlp.fc2", hidden_size)
        weights = tensors.take(f"{official}.attn.qkv.weight", 3 * hidden_size, hidden_size).chunk(3)
        biases = [None] * 3
        if fused_bias:
            biases = tensors.take(f"{official}.attn.qkv.bias", 3 * hidden_size).chunk(3)
        elif separate_bias:
            query_bias, value_bias = (tensors.take(f"{official}.attn.{name}_bias", hidden_size) for name in "qv")
            biases = [query_bias, torch.zeros_like(query_bias), value_bias]
        for name, weight, bias in zip("qkv", weights, biases):
            if swapped and name != "v":
                weight, bias = _swap_halves(weight, heads), None if bias is None else _swap_halves(bias, heads)
            _linear(parts, f"{ours}.attention.{name}_proj", weight, bias)
        _linear(
            parts,
            f"{ours}.attention.o_proj",
            tensors.take(f"{official}.attn.proj.weight", hidden_size, hidden_size),
            tensors.take(f"{official}.attn.proj.bias", hidden_size),
        )
        for number in (1, 2):
            if scale_name is not None:
                scale = tensors.take(f"{official}.{scale_name.format(number)}", hidden_size)
                parts.encoder[f"{ours}.layer_scale{number}.scale"] = scale


def _timm_axial(parts: ModelParts, head_dim: int, theta: float, reference_grid: int | Iterable[int] | None) -> None:
    """theta^(−4i/head_dim) for each half of a head, at indices or at those of a reference grid."""
    if head_dim % 4:
        raise ConversionError(f"Heads of {head_dim} channels are not divisible into planes of two axes.")
    spectrum = theta ** -(torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4))
    scale = None
    if reference_grid is not None:
        reference = _sizes("reference_grid", reference_grid, 2)
        image = _sizes("image_size", parts.fields["image_size"], 2)
        grid = tuple(size // extent for size, extent in zip(image, parts.patch))
        if grid != reference:
            scale = [size / trained for size, trained in zip(reference, grid)]
    _axial_fields(parts, spectrum, theta, head_dim, scale)
    parts.fields["coordinates"] = "index" if reference_grid is None else "train_index"


def _swap_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of query or key, (heads · head_dim, …), with the halves of every head exchanged."""
    return tensor.unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2)


CONVERTERS: dict[str, Callable[..., ModelParts]] = {
    "liere": _liere,
    "comrope": _comrope,
    "naver": _naver,
    "timm": _timm,
    "vit": _vit,
    "clip": _clip,
}
SOURCES = tuple(CONVERTERS)


def detect_source(keys: Iterable[str]) -> str:
    """
    Kind of a checkpoint from its tensors' names. A checkpoint of naver's without frequencies has the names of timm's;
    the two differ in how a learned table is resized.

    Raises:
        ConversionError: if the names are of none of the kinds.
    """
    keys = set(keys)
    for prefix in ("", "vision_model."):
        if f"{prefix}embeddings.class_embedding" in keys:
            return "clip" if f"{prefix}embeddings.position_embedding.weight" in keys else "comrope"
    if "to_patch_embedding.1.weight" in keys:
        return "liere"
    if "patch_embed.proj.weight" in keys:
        return "naver" if "freqs" in keys else "timm"
    if any(key.endswith("embeddings.patch_embeddings.projection.weight") for key in keys):
        return "vit"
    raise ConversionError(
        f"The tensors' names, such as {', '.join(sorted(keys)[:5]) or 'none at all'}, are of no known model; known are "
        f"{', '.join(SOURCES)}."
    )


def option_names(source: str) -> list[str]:
    """Names of the options of a kind of source."""
    return list(_options(source))


def _options(source: str) -> dict[str, object]:
    """Types of the options by name, as the converter declares them."""
    converter = _timm_parts if source in ("timm", "naver") else CONVERTERS[source]
    parameters = inspect.signature(converter).parameters.values()
    return {option.name: option.annotation for option in parameters if option.kind is option.KEYWORD_ONLY}


def require_options(source: str, options: Mapping) -> None:
    """
    Raises:
        ConversionError: if the kind of source has no such option, or a value is of another type than the option.
    """
    declared = _options(source)
    unknown = sorted(set(options) - set(declared))
    if unknown:
        raise ConversionError(
            f"Unknown options {', '.join(unknown)} for a source of kind {source!r}; it takes {', '.join(declared)}."
        )
    for name, value in options.items():
        accepted = typing.get_args(declared[name]) or (declared[name],)
        if not any(_is_of(value, kind) for kind in accepted):
            names = [TYPE_NAMES[kind] for kind in accepted if kind in TYPE_NAMES]
            raise ConversionError(f"{name}={value!r}: accepted is {' or '.join(names)}.")
    if "hidden_act" in options:
        require_one_of("hidden_act", options["hidden_act"], ACT2FN)


TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", Iterable[int]: "a list"}


def _is_of(value: object, kind: object) -> bool:
    if kind == Iterable[int]:
        return isinstance(value, Iterable) and not isinstance(value, str)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def options_from_config(source: str, source_config: Mapping) -> dict:
    """Options that the `config.json` beside a checkpoint states; the rest of it is not used."""
    try:
        return _stated_options(source, dict(source_config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"config.json beside the checkpoint is not understood: {error}") from error


def _stated_options(source: str, source_config: dict) -> dict:
    # The vision tower's part of CLIP's configuration.
    source_config |= source_config.get("vision_config") or {}
    names = {name: name for name in option_names(source)}
    if source == "comrope":
        names["custom_pe_type"] = "position_encoding"
    if source in ("naver", "timm"):
        return _timm_options(source_config)
    options = {ours: source_config[theirs] for theirs, ours in names.items() if source_config.get(theirs) is not None}
    if source == "comrope" and options.get("position_encoding") != "liere":
        # Present in every configuration of ComRoPE's, read for its liere alone; its default makes NaN of it.
        options.pop("scale_factor", None)
    return options


def _timm_options(source_config: Mapping) -> dict:
    """Options from timm's `config.json`: the architecture's name and the statistics of its training."""
    architecture = source_config.get("architecture", "")
    arguments = source_config.get("model_args") or {}
    options = {}
    size = (source_config.get("pretrained_cfg") or source_config).get("input_size")
    if size:
        options["image_size"] = list(size[1:])
    names = {
        "num_heads": "num_attention_heads",
        "img_size": "image_size",
        "rope_temperature": "rope_theta",
        "ref_feat_shape": "reference_grid",
    }
    options |= {ours: arguments[theirs] for theirs, ours in names.items() if theirs in arguments}
    if architecture:
        rotary = "mixed" if "rope_mixed" in architecture else "axial"
        options["position_encoding"] = rotary if "rope" in architecture else "absolute"
    return options
