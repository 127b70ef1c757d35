"""The kinds of sources: one table of them, how a checkpoint's kind is recognised, and what options it takes."""

import typing
from collections.abc import Iterable, Mapping

from transformers.activations import ACT2FN

from .base import ConversionError, Source, require_one_of
from .clip import CLIP
from .comrope import ComRoPE
from .dinov3 import DINOv3
from .liere import LieRE
from .timm import Naver, Timm
from .vit import ViT


CONVERTERS: dict[str, type[Source]] = {
    "liere": LieRE,
    "comrope": ComRoPE,
    "naver": Naver,
    "timm": Timm,
    "vit": ViT,
    "clip": CLIP,
    "dinov3": DINOv3,
}
SOURCES = tuple(CONVERTERS)
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", Iterable[int]: "a list"}


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
    if "embeddings.patch_embeddings.weight" in keys:
        return "dinov3"
    raise ConversionError(
        f"The tensors' names, such as {', '.join(sorted(keys)[:5]) or 'none at all'}, are of no known model; known are "
        f"{', '.join(SOURCES)}."
    )


def require_options(source: str, options: Mapping) -> None:
    """Raises [`ConversionError`] if the kind of source has no such option or takes no value of that type."""
    declared = CONVERTERS[source].options()
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


def _is_of(value: object, kind: object) -> bool:
    if kind == Iterable[int]:
        return isinstance(value, Iterable) and not isinstance(value, str)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def options_from_config(source: str, source_config: Mapping) -> dict:
    """Options that the `config.json` beside a checkpoint states; the rest of it is not used."""
    try:
        # CLIP's configuration holds that of its vision tower in a part of its own.
        return CONVERTERS[source].stated_options(dict(source_config) | (source_config.get("vision_config") or {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"config.json beside the checkpoint is not understood: {error}") from error
