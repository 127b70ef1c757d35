"""Rebuilding a model with another configuration, for upgrades and for other image sizes."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..models.transformer.configuration_liere import LieREConfig
from ..models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError


Config = TypeVar("Config", bound=LieREConfig)


def change_config(config: Config, changes: Mapping[str, object]) -> Config:
    """
    A copy of a configuration with some fields changed.

    Raises:
        ConversionError: if the configuration is invalid or that of a model folded for inference.
    """
    if config.folded_grids is not None:
        raise ConversionError(
            f"folded_grids={config.folded_grids}: a folded model cannot be changed; accepted is the original model."
        )
    try:
        changed = type(config).from_dict({**config.to_dict(), **changes})
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(f"No such model: {error}") from error
    changed._attn_implementation = config._attn_implementation
    return changed


def find_encoder(model: LieREPreTrainedModel) -> tuple[nn.Module, str]:
    """The encoder of a model with any head, and the prefix of its names in the model's state dict."""
    encoder = getattr(model, model.base_model_prefix, model)
    return encoder, "" if encoder is model else f"{model.base_model_prefix}."


def rebuild(
    model: LieREPreTrainedModel, config: LieREConfig, state_dict: Mapping[str, torch.Tensor]
) -> LieREPreTrainedModel:
    """A new model of the same class and mode with copies of these weights."""
    encoder, _ = find_encoder(model)
    # A model for masked image modeling has a mask token.
    arguments = {"use_mask_token": True} if encoder is model and encoder.embeddings.mask_token is not None else {}
    new = type(model)(config, **arguments)
    new.load_state_dict({name: tensor.clone() for name, tensor in state_dict.items()}, assign=True)
    return new.train(model.training)
