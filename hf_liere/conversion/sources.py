"""The kinds of sources: their table, how to detect a checkpoint's kind, and the options of each."""

import typing
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.activations import ACT2FN

from .base import ConversionError, Source, require_one_of
from .clip import CLIPSource
from .comrope import ComRoPESource
from .dinov3 import DINOv3Source
from .liere import LieRESource
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
