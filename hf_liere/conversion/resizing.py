"""Loading or converting any pretrained model, and changing its image size without changing its outputs."""

import os

import torch

from ..auto import load_checkpoint
from ..models.patched.patched_configuration import TYPE_PREFIX
from ..models.transformer.configuration_liere import LieREConfig, LieREViTConfig
from ..models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError, sizes
from .checkpoints import convert_state_dict
from .reading import OWN_MODEL_TYPES, json_beside, locate, read_checkpoint
from .rebuilding import change_config, find_encoder, rebuild
from .upgrades import LEARNED_ENCODINGS


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


def resize_input(model: LieREPreTrainedModel, image_size: int | list[int] | tuple[int, int]) -> LieREPreTrainedModel:
    """
    A model whose configured image size is `image_size`, and which computes the same as `model` for such images.

    A learned table is resized as the model itself resizes it. If coordinates refer to the training grid, generators are
    multiplied by the ratio of old to new coordinates.

    Args:
        model: An image model of ours; it is left as it is.
        image_size: One number, or height and width.

    Raises:
        ConversionError: if no model of that size computes the same function, with the reason.
    """
    if not isinstance(model.config, LieREViTConfig):
        raise ConversionError(f"image_size={image_size}: accepted for image models, not for {model.config.model_type}.")
    old = model.config
    height, width = sizes("image_size", tuple(image_size) if isinstance(image_size, list) else image_size, 2)
    config = change_config(old, {"image_size": height if height == width else [height, width]})
    encoder, prefix = find_encoder(model)
    try:
        table = encoder.embeddings.patch_table(config.train_grid, None)
    except ValueError as error:
        raise ConversionError(f"No such model: {error}") from error
    ratios = [_coordinate_ratio(old.coordinates, *axis) for axis in zip(config.train_grid, old.train_grid)]
    state_dict = dict(model.state_dict())
    if table is not None:
        name = f"{prefix}embeddings.position_embeddings"
        of_class_token = state_dict[name][:, : int(old.use_class_token)]
        state_dict[name] = torch.cat([of_class_token, table.detach()], dim=1)
    if set(ratios) != {1.0}:
        _check_scalable(config)
        for name, tensor in encoder.rotary_encoding.scale_generators(torch.tensor(ratios)).items():
            state_dict[f"{prefix}rotary_encoding.{name}"] = tensor
    return rebuild(model, config, state_dict)


def _coordinate_ratio(coordinates: str | None, size: int, trained: int) -> float:
    """Coordinates of `size` patches on an axis trained with `trained`, divided by those if trained with `size`."""
    factors = dict.fromkeys(("train_grid", "centred_grid"), size / trained) | {"train_index": trained / size}
    return factors.get(str(coordinates), 1.0)


def _check_scalable(config: LieREConfig) -> None:
    """Raise [`ConversionError`] if generators cannot absorb another scale of the coordinates."""
    reason = None
    if config.position_table_size is not None:
        reason = "its table is read at these coordinates"
    elif config.rotate_prefix and config.prefix[1]:
        reason = "its class token has coordinates too"
    elif config.position_encoding not in LEARNED_ENCODINGS:
        reason = f"only the generators of {', '.join(LEARNED_ENCODINGS)} can absorb another scale"
    if reason is not None:
        raise ConversionError(
            f"image_size={config.image_size} changes the coordinates {config.coordinates!r} of patches, and no "
            f"model of {config.position_encoding} computes the same, because {reason}."
        )
