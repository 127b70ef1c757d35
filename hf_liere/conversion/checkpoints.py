"""
Official and pretrained checkpoints → ours, with the original implementation's logits.

`reading.read_checkpoint` reads a file, directory or Hub repository without executing anything in it.
`convert_state_dict` turns its tensors into a [`Conversion`]. `hf_liere.convert.convert_checkpoint` (the command
`hf-liere convert`) writes a directory that `from_pretrained` reads. Weights express most differences between sources,
so few configuration fields are needed: a missing bias becomes zeros, an absent output projection the identity, another
order of axes or planes a permutation of query and key rows, LieRE's linear patch projection a convolution, and
ComRoPE's `scale_factor` a factor of the generators; multipliers shared by heads are repeated, and a table without a
class token's row gets a row of zeros.

**Options** supply what the shapes do not determine (defaults in parentheses); the source's `config.json` may contain
them:

- `liere`: `position_encoding` (without generators `absolute`, or `visionllama` if the table is all zeros), `pooling`
  (`cls`; `mean`), `num_channels` (3), `num_axes` (from the generators, else 2), `patch_size` and `image_size` (square
  ones from the shapes for images, required for volumes), `layer_generators` (`official`; `paper`).
- `comrope`: `position_encoding` (from the shapes; without generators `raw` if there is a table, else `none`;
  `vanilla-rope` must be given), `num_axes` (from the shapes, else 2), `num_attention_heads` (from the generators, else
  heads of 64 channels), `image_size` (from the table, else 14 patches), `num_frames` (from the table, else 8),
  `theta_base` (the paper's 10000^(−2A/head_dim)), `scale_factor` (1), `axis_scale` (`True`), `cls_position` (½),
  `hidden_act` (`quick_gelu`), `layer_norm_eps` (1e-5).
- `timm` and `naver` (rope-vit), which differ in how a table is resized: `position_encoding` (`mixed` with frequencies,
  else `absolute` if the table has a row for the class token, else `axial`; `none`), `num_attention_heads` (from timm's
  frequencies, else heads of 64 channels), `axis_order` (`columns_first`; `rows_first` without a class token),
  `rope_theta` (100; 10000 for `rows_first`), `reference_grid` (none; 16 × 16 for `rows_first`), `image_size` (square
  from the table, else 224; 256 for `rows_first`), `pooling` (`mean` with `fc_norm`, else `cls`), `hidden_act` (`gelu`),
  `layer_norm_eps` (1e-6).
- `vit` (and DeiT), `clip`: `num_attention_heads` (heads of 64 channels), `hidden_act` (`gelu`; `quick_gelu`),
  `layer_norm_eps` (1e-12; 1e-5), `image_size` (square, from the table).
- `dinov3`: `num_attention_heads` (heads of 64 channels), `rope_theta` (100), `hidden_act` (`gelu`), `layer_norm_eps`
  (1e-5), `image_size` (224), `position_shift` (0), `position_jitter` and `position_rescale` (none).

**Known repositories** with their options are in `known.py`, printed by `hf-liere convert --list`.

**LieRE's layers.** The paper describes separate generators for every layer, and the official checkpoints contain one
set per layer. The official forward pass, however, uses the first set in every layer; the other sets receive no gradient
and keep their random initial values. `layer_generators="official"` (the default) reproduces the official logits: all
layers share the first set (`share_layers=True`). `layer_generators="paper"` keeps each set for its own layer: this is
the model of the paper, but not the model whose accuracy the official code measures.

**Deviations from official code.** rope-vit uses the positions and table of the training grid for every input with the
same number of patches, whatever its shape; here they are always those of the input's grid. ComRoPE's code clamps random
displacements of half the paper's width and does not displace frames; `position_perturbation` is the paper's eq. (11).
Displacements occur only in training.
"""

import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from ..auto import load_checkpoint
from ..models.patched.patched_configuration import TYPE_PREFIX
from ..models.transformer.configuration_liere import LieREConfig, LieREVideoConfig, LieREViTConfig
from ..models.transformer.modeling_liere import LieREViTForImageClassification, LieREViTModel
from ..models.transformer.modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from ..models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError, Source, SourceTensors, require_one_of
from .clip import CLIPSource
from .comrope import ComRoPESource
from .dinov3 import DINOv3Source
from .liere import LieRESource
from .reading import OWN_MODEL_TYPES, json_beside, locate, read_checkpoint
from .timm import NaverSource, TimmSource
from .vit import ViTSource


CONVERTERS: dict[str, type[Source]] = {
    "liere": LieRESource,
    "comrope": ComRoPESource,
    "naver": NaverSource,
    "timm": TimmSource,
    "vit": ViTSource,
    "clip": CLIPSource,
    "dinov3": DINOv3Source,
}
SOURCES = tuple(CONVERTERS)
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", Iterable[int]: "a list"}


@dataclass
class Conversion:
    """
    A converted checkpoint.

    Attributes:
        source: Kind of the checkpoint, one of [`SOURCES`].
        config: Configuration of the model.
        state_dict: All tensors of the model, as differentiable functions of the source's tensors.
        model_class: A classifier if the source has one, else the bare model.
        ignored: Keys of the source that do not affect the outputs kept here.
    """

    source: str
    config: LieREConfig
    state_dict: dict[str, torch.Tensor]
    model_class: type[LieREPreTrainedModel]
    ignored: list[str] = field(default_factory=list)

    def model(self) -> LieREPreTrainedModel:
        """The model with its weights, in evaluation mode."""
        model = self.model_class(self.config)
        model.load_state_dict(self.state_dict)
        return model.eval()


def convert_state_dict(
    tensors: Mapping[str, torch.Tensor], source: str | None = None, source_config: Mapping | None = None, **options: Any
) -> Conversion:
    """
    Convert the tensors of a source into our configuration and tensors.

    Args:
        tensors: The source's state dict, under its official names.
        source: One of [`SOURCES`]; `None` detects it from the names.
        source_config: The `config.json` beside the checkpoint, if any.
        options: See the top of this file; they override `source_config`.

    Raises:
        ConversionError: for unknown or missing tensors, contradictory shapes, values that are not finite, and bad
            options.
    """
    tensors = _unwrap(tensors)
    source = source or detect_source(tensors)
    require_one_of("source", source, SOURCES)
    from_config = options_from_config(source, source_config) if source_config else {}
    options = from_config | {name: value for name, value in options.items() if value is not None}
    require_options(source, options)
    found = CONVERTERS[source](SourceTensors(tensors), **options)
    found.convert()
    found.tensors.finish()
    fields, is_image = found.fields, len(found.patch) == 2
    if found.head:
        # The last tensor of a classifier is its output bias.
        fields |= _label_fields(len(list(found.head.values())[-1]), (source_config or {}).get("id2label") or {})
    try:
        config = LieREViTConfig(**fields) if is_image else LieREVideoConfig(**fields)
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(f"No model can have the checkpoint's properties: {error}") from error
    if found.head:
        model_class = LieREViTForImageClassification if is_image else LieREVideoForVideoClassification
        state_dict = {f"liere.{name}": tensor for name, tensor in found.encoder.items()}
        state_dict |= {f"classifier.{name}": tensor for name, tensor in found.head.items()}
    else:
        model_class, state_dict = LieREViTModel if is_image else LieREVideoModel, found.encoder
    return Conversion(source, config, state_dict, model_class, sorted(found.ignored))


def _label_fields(count: int, names: Mapping) -> dict:
    """Configuration fields of a classifier with `count` classes; names are kept if there is one for each class."""
    if not isinstance(names, Mapping) or not all(str(index).isdigit() for index in names):
        raise ConversionError(f"id2label={names!r} beside the checkpoint: accepted are names by their numbers.")
    if len(names) != count:
        return {"num_labels": count}
    named = {int(index): name for index, name in names.items()}
    return {"num_labels": count, "id2label": named, "label2id": {name: index for index, name in named.items()}}


def _unwrap(tensors: Mapping) -> dict[str, torch.Tensor]:
    """Unwrap the state dict of a training checkpoint: Lightning, DeiT, DistributedDataParallel, torch.compile."""
    for wrapper in ("state_dict", "model"):
        if isinstance(tensors.get(wrapper), Mapping):
            tensors = tensors[wrapper]
    strange = {key: type(value).__name__ for key, value in tensors.items() if not isinstance(value, torch.Tensor)}
    if strange or not tensors:
        raise ConversionError(f"The checkpoint must map names to tensors, but contains {strange or 'nothing'}.")
    for prefix in ("model.", "module.", "_orig_mod.", "model."):
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return dict(tensors)


def detect_source(keys: Iterable[str]) -> str:
    """
    The kind of a checkpoint, from its tensor names. A naver checkpoint without frequencies has timm's names; the two
    kinds resize a learned table differently.

    Raises:
        ConversionError: if the names match no kind.
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
    if "embeddings.patch_embeddings.weight" in keys:
        return "dinov3"
    raise ConversionError(
        f"The tensor names, such as {', '.join(sorted(keys)[:5]) or 'none at all'}, match none of {', '.join(SOURCES)}."
    )


def require_options(source: str, options: Mapping) -> None:
    """Raise [`ConversionError`] for options that the kind of source does not have, or values of another type."""
    declared = CONVERTERS[source].options()
    if unknown := sorted(set(options) - set(declared)):
        raise ConversionError(
            f"Unknown options {', '.join(unknown)} for a source of kind {source!r}; it takes {', '.join(declared)}."
        )
    for name, value in options.items():
        accepted = typing.get_args(declared[name]) or (declared[name],)
        if not any(_has_type(value, kind) for kind in accepted):
            names = [TYPE_NAMES[kind] for kind in accepted if kind in TYPE_NAMES]
            raise ConversionError(f"{name}={value!r}: accepted is {' or '.join(names)}.")
    if "hidden_act" in options:
        require_one_of("hidden_act", options["hidden_act"], ACT2FN)


def _has_type(value: object, kind: Any) -> bool:
    if kind == Iterable[int]:
        return isinstance(value, Iterable) and not isinstance(value, str)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def options_from_config(source: str, source_config: Mapping) -> dict:
    """The options in the `config.json` beside a checkpoint; the rest of the file is not used."""
    try:
        # CLIP's configuration nests that of its vision tower.
        return CONVERTERS[source].stated_options(dict(source_config) | (source_config.get("vision_config") or {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"config.json beside the checkpoint cannot be interpreted: {error}") from error


def load_or_convert(checkpoint: str | os.PathLike, revision: str | None = None) -> LieREPreTrainedModel:
    """
    Load one of our models, or convert any checkpoint that [`convert_state_dict`] converts without options.

    Raises:
        InputError, HubError: as [`read_checkpoint`], [`convert_state_dict`] and [`load_checkpoint`].
        ConversionError: if it is a patched transformers model.
    """
    local = locate(checkpoint, revision)
    config = json_beside(local, "config.json") or {}
    kind = str(config.get("model_type"))
    if local.is_dir() and kind.startswith(TYPE_PREFIX):
        raise ConversionError(
            f"{checkpoint} is a {kind}, whose patched encoding cannot be changed; accepted are models of the classes "
            "LieREViT… and LieREVideo…, and checkpoints that hf-liere convert reads."
        )
    if local.is_dir() and kind in OWN_MODEL_TYPES:
        model, _ = load_checkpoint(checkpoint, revision)
        return model
    tensors, source_config = read_checkpoint(local)
    return convert_state_dict(tensors, source_config=source_config).model()
