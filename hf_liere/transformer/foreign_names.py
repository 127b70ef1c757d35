"""Names that other libraries give to fields of ours, and names of fields that do not exist."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from ..registers import closest


logger = logging.get_logger(__name__)


# Of timm, torch, MONAI, x-transformers, GPT-2 and the papers' code, by the name of ours.
NAMES = {
    "num_labels": "num_classes n_classes nb_classes num_class class_num",
    "num_hidden_layers": "depth depths num_layers n_layers n_layer layers num_encoder_layers num_blocks "
    "num_transformer_layers",
    "hidden_size": "embed_dim embedding_dim emb_dim dim d_model n_embd width hidden_dim model_dim embed_size",
    "num_attention_heads": "num_heads n_heads n_head nhead heads",
    "head_dim": "dim_head attn_head_dim attention_head_dim d_head",
    "intermediate_size": "mlp_dim ffn_dim dim_feedforward d_ff n_inner mlp_hidden_dim",
    "image_size": "img_size input_size resolution input_resolution image_resolution",
    "num_channels": "in_chans in_channels input_channels in_dim channels",
    "position_encoding": "encoding pos_embed pos_embed_type pos_encoding pe_type position_embedding "
    "position_embedding_type rope_type",
    "drop_path_rate": "drop_path stochastic_depth stochastic_depth_prob",
    "hidden_dropout_prob": "dropout dropout_rate drop_rate proj_drop_rate hidden_dropout",
    "attention_probs_dropout_prob": "attn_drop attn_drop_rate attention_dropout attn_dropout",
    "mlp_dropout_prob": "mlp_dropout ffn_dropout",
    "patch_dropout_prob": "patch_drop patch_drop_rate patch_dropout",
    "layerscale_value": "init_values layer_scale layerscale layer_scale_init_value",
    "hidden_act": "act_layer activation activation_function hidden_activation",
    "use_class_token": "class_token cls_token use_cls_token",
    "num_register_tokens": "reg_tokens register_tokens num_registers num_reg_tokens",
    "pooling": "global_pool pool pool_type",
    "block_size": "block blocks generator_dim block_dim",
    "rope_theta": "theta base rope_base rotary_base",
    "num_frames": "frames n_frames clip_length",
    "tubelet_size": "t_patch_size temporal_patch_size",
}
# What files of configurations of any model may contain.
COMMON = {"auto_map", "mlp_ratio", "modules_of_parts", "stage_names"}
COMMON |= {*dir(PreTrainedConfig()), *dir(GenerationConfig())}
FOREIGN_NAMES = {name: ours for ours, names in NAMES.items() for name in names.split()}


def warn_of_names(config: Any, given: Mapping[str, Any]) -> None:
    """
    Warn of names that are stored without a field, of any configuration of transformers; [`check_names`] refuses others.
    Options of loaders, such as `attn_implementation`, are not stored by their names.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in given:
        if name not in vars(config) or name in COMMON or name[0] == "_" or find_field(type(config), name) is not None:
            continue
        logger.warning(f"{type(config).__name__} has no field {name!r} and ignores it{closest(name, fields, 0.85)}.")
    if "mlp_ratio" in given:
        logger.warning(f"mlp_ratio={given['mlp_ratio']} is ignored: intermediate_size={config.intermediate_size}.")


def check_names(config: Any) -> None:
    """Raises `ValueError` if a configuration has a field by the name of another library, which nothing would read."""
    values = vars(config)
    found = [(name, find_field(type(config), name)) for name in FOREIGN_NAMES if name in values]
    if answers := [f"{name}={values[name]!r} is {field} here" for name, field in found if field is not None]:
        raise ValueError(f"{type(config).__name__} has other names for these fields: {', '.join(answers)}.")


def find_field(kind: type, name: str) -> str | None:
    """The field of a configuration class that another library calls `name`; `None` if there is none."""
    fields, ours = vars(kind)["__dataclass_fields__"], FOREIGN_NAMES.get(name)
    # Labels are counted by a property.
    return ours if name not in fields and (ours in fields or ours == "num_labels") else None
