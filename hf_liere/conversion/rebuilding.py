"""A model of ours again, with another configuration: what upgrades and other image sizes have in common."""

from collections.abc import Mapping

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..models.transformer.configuration_liere import LieREConfig
from ..models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError


def changed_config(config: LieREConfig, changes: Mapping[str, object]) -> LieREConfig:
    """
    A configuration with other values of some fields.

    Raises:
        ConversionError: if there is no such model, or it would be made from one that is folded for inference.
    """
    if config.folded_grids is not None:
        raise ConversionError(
            f"folded_grids={config.folded_grids}: a model that was folded for inference cannot be changed; accepted is "
            "the model from which it was folded."
        )
    try:
        changed = type(config).from_dict(config.to_dict() | changes)
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(f"No such model: {error}") from error
    changed._attn_implementation = config._attn_implementation
    return changed


def encoder_of(model: LieREPreTrainedModel) -> tuple[nn.Module, str]:
    """The transformer of a model with any head, and what its names start with in the state dict of the model."""
    encoder = getattr(model, model.base_model_prefix, model)
    return encoder, "" if encoder is model else f"{model.base_model_prefix}."


def rebuilt(
    model: LieREPreTrainedModel, config: LieREConfig, state_dict: Mapping[str, torch.Tensor]
) -> LieREPreTrainedModel:
    """A new model of the same class and mode with these weights, which are copied."""
    encoder, _ = encoder_of(model)
    # A bare model for masked images has a mask token.
    arguments = {"use_mask_token": True} if encoder is model and encoder.embeddings.mask_token is not None else {}
    new = type(model)(config, **arguments)
    new.load_state_dict({name: tensor.clone() for name, tensor in state_dict.items()}, assign=True)
    return new.train(model.training)
