"""Rebuilding a model with another configuration, for upgrades and for other image sizes."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from ...models.encoding.kinds import ENCODINGS, TRIPLES
from ...models.transformer.configuration_liere import LieREConfig, LieREViTConfig
from ...models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError, refusing, sizes


# Blocks of three channels cannot contain the planes of another encoding.
LEARNED_ENCODINGS = tuple(
    name for name, traits in ENCODINGS.items() if traits.learned and traits.block_sizes is not TRIPLES
)
Config = TypeVar("Config", bound=LieREConfig)


def change_config(config: Config, changes: Mapping[str, object]) -> Config:
    """
    A copy of a configuration with some fields changed. Raises [`ConversionError`] if it is invalid or that of a model
    folded for inference.
    """
    if config.folded_grids is not None:
        raise ConversionError(
            f"folded_grids={config.folded_grids}: a folded model cannot be changed; accepted is the original model."
        )
    with refusing("No such model"):
        changed = type(config).from_dict({**config.to_dict(), **changes})
    changed._attn_implementation = config._attn_implementation
    return changed


def rebuild(
    model: LieREPreTrainedModel, config: LieREConfig, changed: Mapping[str, torch.Tensor]
) -> LieREPreTrainedModel:
    """A new model of the same class and mode with copies of the weights, of its encoder's with the changed ones."""
    encoder = model.base_model
    # A model for masked image modeling has a mask token.
    arguments = {"use_mask_token": True} if encoder is model and encoder.embeddings.mask_token is not None else {}
    new = type(model)(config, **arguments)
    prefix = "" if encoder is model else f"{model.base_model_prefix}."
    weights = model.state_dict() | {f"{prefix}{name}": tensor for name, tensor in changed.items()}
    new.load_state_dict({name: weights[name].clone() for name in new.state_dict()}, assign=True)
    return new.train(model.training)


def resize_input(model: LieREPreTrainedModel, image_size: int | list[int] | tuple[int, int]) -> LieREPreTrainedModel:
    """
    A model whose configured image size is `image_size`, and which computes the same as `model` for such images.

    A learned table is resized as the model itself resizes it. If coordinates refer to the training grid, generators are
    multiplied by the ratio of old to new coordinates. Raises [`ConversionError`] with the reason if no image model of
    that size computes the same function.
    """
    if not isinstance(model.config, LieREViTConfig):
        raise ConversionError(f"image_size={image_size}: accepted for image models, not for {model.config.model_type}.")
    old = model.config
    height, width = sizes("image_size", tuple(image_size) if isinstance(image_size, list) else image_size, 2)
    config = change_config(old, {"image_size": height if height == width else [height, width]})
    encoder = model.base_model
    with refusing("No such model"):
        table = encoder.embeddings.patch_table(config.train_grid, None)
    power = {"train_grid": 1, "centred_grid": 1, "train_index": -1}.get(str(old.coordinates), 0)
    ratios = [(size / trained) ** power for size, trained in zip(config.train_grid, old.train_grid)]
    changed = {}
    if table is not None:
        of_class_token = encoder.embeddings.position_embeddings[:, : int(old.use_class_token)]
        changed["embeddings.position_embeddings"] = torch.cat([of_class_token, table], dim=1).detach()
    if set(ratios) != {1.0}:
        _check_scalable(config)
        scaled = encoder.rotary_encoding.scale_generators(torch.tensor(ratios))
        changed |= {f"rotary_encoding.{name}": tensor for name, tensor in scaled.items()}
    return rebuild(model, config, changed)


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
