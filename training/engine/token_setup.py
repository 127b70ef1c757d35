"""Configuration of token models, completed from the data."""

import json

import numpy as np
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_liere import LieRETokensConfig, PoseEmbedding
from hf_liere.encoding.kinds import ENCODINGS
from hf_liere.errors import InputError
from hf_liere.geometry.pose_embedding import POSE_ATTENTION
from training.common.arguments import TokensModelArguments
from training.data.tokens import TokenData, TokenTable
from training.engine.model_setup import resolve_config


logger = logging.get_logger(__name__)

ARCHITECTURES = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
# Standard deviations of features that a new linear layer can learn from without scaling.
USUAL_DEVIATIONS = (0.05, 20.0)


def resolve_tokens_config(arguments: TokensModelArguments, data: TokenData) -> LieRETokensConfig:
    """
    The checkpoint's configuration, or a new one from the flags. The data provide what the flags omit: number of
    features and axes, and origin and scale of the positions.

    Raises:
        InputError: if a flag or the checkpoint contradicts the data, or a flag contradicts the checkpoint.
    """
    sizes = dict(zip(("feature_size", "num_axes"), data.some.sizes))
    if arguments.model_name_or_path is not None:
        config = resolve_config(arguments)
        if not isinstance(config, LieRETokensConfig):
            raise InputError(f"--model_name_or_path is a {config.model_type!r}; accepted: a token model.")
        (architecture,) = config.architectures or [ARCHITECTURES[data.task]]
        if "Classification" in architecture and not architecture.endswith(ARCHITECTURES[data.task]):
            raise InputError(
                f"The checkpoint is a {architecture}, but the data label each "
                f"{'token' if data.task == 'token' else 'sample'}."
            )
        for name, value in sizes.items():
            if getattr(config, name) != value:
                raise InputError(f"The checkpoint has {name}={getattr(config, name)}, the data have {value}.")
        return config
    given = arguments.architecture()
    for name, value in sizes.items():
        if given.get(name, value) != value:
            raise InputError(f"--{name} {given[name]}, but the data have {value}; accepted: {value}, or leave it out.")
        setattr(arguments, name, json.dumps(value))
    config = resolve_config(arguments)
    if data.train is not None:
        _warn_of_scale(data.train)
    if config.uses_positions and data.train is not None and not {"position_origin", "position_scale"} & set(given):
        origin, scale = placement(data.train, config.position_encoding)
        arguments.position_origin, arguments.position_scale = json.dumps(origin), json.dumps(scale)
        config = resolve_config(arguments)
    return config


def placement(table: TokenTable, position_encoding: str) -> tuple[list[float], float]:
    """
    Origin of each axis (its smallest position) and one scale for all axes, which keeps angles. The longest axis runs
    from 0 to 1 or, for RoPE and STRING, to n^(1/A) − 1, the largest index of n tokens on a cubic grid of A axes.
    """
    everything = np.concatenate(table.positions).astype(np.float64)
    low, extent = everything.min(axis=0), float(np.ptp(everything, axis=0).max())
    longest = max(map(len, table.positions)) ** (1 / everything.shape[1]) - 1
    traits = ENCODINGS.get(position_encoding)
    wanted = longest if traits is not None and traits.coordinates == "index" else 1.0
    return low.tolist(), wanted / extent if extent > 0 and wanted > 0 else 1.0


def attend_by_poses(model: PreTrainedModel) -> None:
    """
    Lets attention depend on the relative poses of tokens, see [`PoseEmbedding`].

    Raises:
        InputError: if the model has tokens without a pose, or heads of a size that poses do not fit.
    """
    config = model.config
    if config.num_prefix_tokens:
        raise InputError(
            f"--pose_columns: {config.num_prefix_tokens} class and register tokens have no pose; accepted: "
            "--use_class_token false --num_register_tokens 0 --pooling mean."
        )
    try:
        PoseEmbedding(config.head_dim)
    except ValueError as error:
        raise InputError(f"--pose_columns: {error}") from error
    model.set_attn_implementation(POSE_ATTENTION)


def _warn_of_scale(table: TokenTable) -> None:
    features = np.concatenate(table.features)
    deviations = features.std(axis=0)
    low, high = USUAL_DEVIATIONS
    # A channel for something rare, such as one of many classes, varies little and is not small.
    small = (deviations > 0) & (deviations < low) & (np.ptp(features, axis=0) < 1)
    unusual = {index: f"{deviations[index]:.3g}" for index in np.flatnonzero(small | (deviations > high))}
    if unusual:
        shown = ", ".join(f"{value} of feature {index}" for index, value in list(unusual.items())[:5])
        logger.warning(
            f"Unusual standard deviations: {shown}{' …' if len(unusual) > 5 else ''}. Features are not scaled, and "
            "models learn best from values around 1."
        )
