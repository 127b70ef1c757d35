"""
Official checkpoints of LieRE, ComRoPE and rope-vit → ours, with the original implementation's logits.

`reading.read_checkpoint` reads a file, directory or Hub repository without executing anything in it.
`convert_state_dict` turns its tensors into a [`Conversion`]. `hf_liere.tools.convert.convert_checkpoint` (the command
`hf-liere convert`) writes a directory that `from_pretrained` reads. Weights express most differences between sources,
so few configuration fields are needed: a missing bias becomes zeros, an absent output projection the identity, another
order of axes a permutation of query and key rows, LieRE's linear patch projection a convolution, and ComRoPE's
`scale_factor` a factor of the generators; multipliers shared by heads are repeated, and a table without a class token's
row gets a row of zeros.

Models of transformers and timm are not converted: `hf_liere.patch` gives them learned rotations as what they are.

**Options** supply what the shapes do not determine; the source's `config.json` may contain them. `hf-liere convert
--help` prints them with their defaults. The kind `naver` must be given where there are no frequencies, because timm's
ViTs have the same names.

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

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers.activations import ACT2FN

from ...transformer.configuration_liere import LieREConfig
from ...transformer.modeling_liere import LieREViTForImageClassification, LieREViTModel
from ...transformer.modeling_liere_video import LieREVideoForVideoClassification, LieREVideoModel
from ...transformer.pretrained import LieREPreTrainedModel
from ...upgrades import ConversionError, refusing
from .base import Source, require_one_of
from .comrope import ComRoPESource
from .liere import LieRESource
from .naver import NaverSource
from .options import OPTIONS


CONVERTERS: dict[str, type[Source]] = {kind.kind: kind for kind in (LieRESource, ComRoPESource, NaverSource)}
SOURCES = tuple(CONVERTERS)
# By the number of axes, without and with a classifier.
MODEL_CLASSES: dict[int, tuple[type[LieREPreTrainedModel], ...]] = {
    2: (LieREViTModel, LieREViTForImageClassification),
    3: (LieREVideoModel, LieREVideoForVideoClassification),
}
# Kinds that `hf_liere.patch` fine-tunes: the model, `position_encoding` and `rotary_init` of a patch, and the page.
PATCHED = {
    "vit": ("a ViT, DeiT or DINOv2 of transformers", "comrope_ld", "zeros", "docs/pretrained.md"),
    "clip": ("a CLIP or SigLIP of transformers", "comrope_ld", "zeros", "docs/pretrained.md"),
    "dinov3": ("a DINOv3 of transformers", "rope_mixed", "pretrained", "docs/pretrained.md"),
    "timm": ("a ViT of timm, or of rope-vit without source='naver'", "comrope_ld", "zeros", "docs/timm.md"),
}
# The name of a tensor tells the kind; the first that is there counts.
TELLING_NAMES = {
    r"(vision_model\.)?embeddings\.position_embedding\.weight": "clip",
    r"(vision_model\.)?embeddings\.class_embedding": "comrope",
    r"to_patch_embedding\.1\.weight": "liere",
    r"freqs": "naver",
    r"patch_embed\.proj\.weight": "timm",
    r"(.*\.)?embeddings\.patch_embeddings\.projection\.weight": "vit",
    r"embeddings\.patch_embeddings\.weight": "dinov3",
}


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
        options: Those of `hf-liere convert`; they override `source_config`.

    Raises:
        ConversionError: for unknown or missing tensors, contradictory shapes, values that are not finite, and bad
            options, and for the kinds of models that `hf_liere.patch` fine-tunes.
    """
    tensors = _unwrap(tensors)
    source = source or detect_source(tensors)
    require_source(source)
    try:
        stated = CONVERTERS[source].stated_options(source_config or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"config.json beside the checkpoint cannot be interpreted: {error}") from error
    options = stated | {name: value for name, value in options.items() if value is not None}
    require_options(source, options)
    defaults = {name: option.default for name, option in OPTIONS[source].items()}
    found = CONVERTERS[source](tensors, SimpleNamespace(**defaults | options))
    found.read()
    model_class = MODEL_CLASSES[len(found.patch)]["num_labels" in found.fields]
    with refusing("No model can have the checkpoint's properties"), torch.device("meta"):
        model = model_class(model_class.config_class(**found.fields))
    return Conversion(source, model.config, found.weights(model), model_class, sorted(found.ignored))


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
    """The kind of a checkpoint, from its tensor names: one of [`SOURCES`] or [`PATCHED`]."""
    keys = set(keys)
    for pattern, source in TELLING_NAMES.items():
        if any(re.fullmatch(pattern, key) for key in keys):
            return source
    raise ConversionError(
        f"The tensor names, such as {', '.join(sorted(keys)[:5]) or 'none at all'}, match none of {', '.join(SOURCES)}."
    )


def require_source(source: str) -> None:
    """Raise [`ConversionError`] for a kind that is not converted, with what to do instead."""
    if source in PATCHED:
        model, encoding, start, page = PATCHED[source]
        raise ConversionError(
            f"Kind {source!r}, {model}, is not converted but patched: load the model as usual and call hf_liere.patch("
            f"model, hf_liere.RotaryPatchConfig(position_encoding={encoding!r}, rotary_init={start!r})), see {page}."
        )
    require_one_of("source", source, SOURCES)


def require_options(source: str, options: Mapping) -> None:
    """Raise [`ConversionError`] for options that the kind of source does not have, or values of another type."""
    if unknown := sorted(set(options) - set(OPTIONS[source])):
        raise ConversionError(
            f"Unknown options {', '.join(unknown)} for a source of kind {source!r}; it takes "
            f"{', '.join(OPTIONS[source])}."
        )
    for name, value in options.items():
        types, accepted = OPTIONS[source][name][:2]
        # Python counts truth values as whole numbers, and names as lists.
        kinds = (*types, int) if float in types else types
        if not (type(value) in types if isinstance(value, (bool, str)) else isinstance(value, kinds)):
            raise ConversionError(f"{name}={value!r}: accepted is {accepted}.")
    if "hidden_act" in options:
        require_one_of("hidden_act", options["hidden_act"], ACT2FN)
