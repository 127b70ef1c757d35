"""Small configurations of any model type of transformers, made from its default one by the names of its fields."""

import contextlib
import copy
import math
import re
from typing import Any

from transformers import PreTrainedConfig


HEADS, HEAD_DIM, VOCABULARY = 4, 16, 256
WIDTH = HEADS * HEAD_DIM
# Fields of configurations by what they mean; the first pattern that matches counts.
SIZES = [
    (r"mamba_d_ssm", lambda old: 2 * WIDTH),
    (r"linear_num_.*_heads|mamba_n_groups|n_groups?|topk_group", lambda old: min(old, 2)),
    (r"linear_.*_head_dim|rotary_dim", lambda old: 8),
    # Twice the width in heads.
    (r"mamba_(d_head|head_dim)", lambda old: 2 * WIDTH // HEADS),
    (r"qk_head_dim", lambda old: 2 * HEAD_DIM),
    (r"(.*_)?(head_dim|attention_head_size|kv_channels)", lambda old: HEAD_DIM),
    (r"(q|kv|o)_lora_rank|.*_lora_.*rank.*|laurel_rank", lambda old: 16),
    (r"(.*_)?(n_heads?|num_heads|attention_heads|num_.*attention_heads)", lambda old: min(old, HEADS)),
    (r"(.*_)?vocab_size.*|.*codebook_size", lambda old: min(old, VOCABULARY)),
    (r"(num_|n_)?(routed_|local_)?experts|num_local_experts|moe_num_experts|n_routed_experts", lambda old: min(old, 4)),
    (r".*experts_per_tok.*|.*top_?k|num_selected_experts|moe_k", lambda old: min(old, 2)),
    (r".*(intermediate|ffn|mlp|feed_?forward).*(size|dim)|ff_dim|d_ff|inner_size", lambda old: min(old, WIDTH)),
    (
        r"(.*_)?(hidden_size|d_model|embed_dim|embedding_dim|n_embd|hidden_dim|model_dim|embedding_size)",
        lambda old: WIDTH,
    ),
    (
        r".*(out_hidden_size|output_dim|projection_dim|proj_dim|hidden_size_per_layer_input)",
        lambda old: min(old, WIDTH),
    ),
    (r"adapter_(in_dim|out_dim|input_size)", lambda old: WIDTH),
    (r"image_size|crop_size", lambda old: 32),
    (r"(spatial_)?patch_size", lambda old: min(old, 8)),
    (r"max_position_embeddings|max_seq.*|n_positions|original_max_position_embeddings", lambda old: min(old, 512)),
    (r"(sliding_)?window(_size)?|attention_window|local_attention|attention_chunk_size", lambda old: min(old, 8)),
]
LAYERS = re.compile(r"(.*_)?(num_hidden_layers|num_layers|n_layers?|depth|depths|encoder_layers|decoder_layers)")
KEY_HEADS = re.compile(r"(.*_)?(key_value_heads|kv_heads|n_head_kv)")
TOKEN = re.compile(r".*(_token_id|_token_index|_token)")


def shrink(config: PreTrainedConfig, sections: bool = False) -> dict[str, Any]:
    """
    Fields for a small model with every kind of layer of this configuration, those of its parts among them.

    Args:
        sections: Whether to name the planes of each of three axes where the configuration leaves them to the model.
    """
    return _shrink_fields(config.to_dict(), sections)


def make_config(config: PreTrainedConfig, fields: dict, names: tuple[str, ...] | None) -> PreTrainedConfig:
    """The configuration with these fields, or only those with one of `names` in theirs."""
    if names is None:
        fields = {name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")}
        return type(config)(**fields)
    changed = copy.deepcopy(config)
    _set_fields(changed, fields, names)
    return changed


def _set_fields(config: PreTrainedConfig, fields: dict, names: tuple[str, ...]) -> None:
    for name, value in fields.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
            _set_fields(inner, value, names)
        elif any(part in name for part in names) or (isinstance(value, list) and "layer" in name):
            with contextlib.suppress(Exception):
                setattr(config, name, value)


def _shrink_fields(fields: dict[str, Any], sections: bool) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    kept = _choose_layers(fields)
    for name, value in fields.items():
        changed[name] = _shrink_value(name, value, fields, kept, sections)
    for name, value in fields.items():
        if TOKEN.fullmatch(name) and type(value) is int and value >= VOCABULARY:
            changed[name] = _small_token(fields, name)
        if name in ("eos_token_id", "bos_token_id") and isinstance(value, list):
            changed[name] = 2
    if fields.get("num_kv_shared_layers") and kept:
        changed["num_kv_shared_layers"] = len(kept[1]) // 2
    if (fields.get("head_dim") or 0) > (fields.get("qk_rope_head_dim") or math.inf):
        # The width with the channels that do not rotate.
        changed["head_dim"] = 2 * HEAD_DIM
    if isinstance(fields.get("rope_parameters"), dict):
        changed["rope_parameters"] = _shrink_rope(fields["rope_parameters"], changed, sections)
    return changed


def _shrink_key_heads(count: int, fields: dict[str, Any]) -> int:
    """One for each head of queries, one for all, or one for two."""
    heads = fields.get("num_attention_heads") or fields.get("num_heads") or fields.get("n_head")
    return HEADS if count == heads else min(count, HEADS // 2)


def _shrink_table(table: dict, kept: tuple[int, list[int]] | None) -> dict:
    """A table by layer keeps the layers that stay."""
    if kept is None or not table or not all(str(key).isdecimal() for key in table):
        return table
    rows = {kept[1].index(int(key)): value for key, value in table.items() if int(key) in kept[1]}
    return {key: _shrink_row(row) if isinstance(row, dict) else row for key, row in rows.items()}


def _shrink_row(row: dict) -> dict:
    """What one layer has instead of the common sizes: twice the common width of heads."""
    changed = {name: _shrink_value(name, value, row, None, False) for name, value in row.items()}
    return changed | ({"head_dim": 2 * HEAD_DIM} if "head_dim" in row else {})


def _shrink_value(
    name: str, value: Any, fields: dict[str, Any], kept: tuple[int, list[int]] | None, sections: bool
) -> Any:
    if isinstance(value, dict) and name != "rope_parameters":
        is_config = name.endswith("config") and name != "per_layer_config"
        return _shrink_fields(value, sections) if is_config else _shrink_table(value, kept)
    if name == "architecture":
        # Of a vision tower of timm.
        return value.replace("large_patch14_336", "tiny_patch16_384")
    if name == "block_types":
        return list(dict.fromkeys(value))
    if isinstance(value, list) and kept and len(value) == kept[0]:
        return [value[layer] for layer in kept[1]]
    if KEY_HEADS.fullmatch(name) and type(value) is int:
        return _shrink_key_heads(value, fields)
    if value is None and name in ("vocab_size", "attn_layer_indices"):
        # Without, some models take no tokens, or have no attention.
        return VOCABULARY if name == "vocab_size" else [1]
    return _shrink_number(name, value, kept) if type(value) is int else value


def _choose_layers(fields: dict[str, Any]) -> tuple[int, list[int]] | None:
    """The number of layers, and those that stay: two, and one of every kind."""
    count = next((fields[name] for name in fields if LAYERS.fullmatch(name) and type(fields[name]) is int), None)
    if not count:
        return None
    kinds = next((fields[n] for n in ("layer_types", "layers_block_type") if isinstance(fields.get(n), list)), [])
    if isinstance(fields.get("block_types"), list):
        # They repeat.
        kinds = [fields["block_types"][layer % len(fields["block_types"])] for layer in range(count)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)] if len(kinds) == count else []
    kept = {*firsts, *range(min(2, count))} if len(firsts) < 2 else set(firsts)
    if fields.get("num_kv_shared_layers"):
        # Layers that read the keys of those.
        kept |= {count - 1 - kinds[::-1].index(kind) for kind in dict.fromkeys(kinds)}
    return count, sorted(kept)


def _shrink_number(name: str, value: int, kept: tuple[int, list[int]] | None) -> int:
    if LAYERS.fullmatch(name):
        return len(kept[1]) if kept and kept[0] == value else min(value, 2)
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name) and value > 0:
            return size(value)
    return value


def _small_token(fields: dict[str, Any], name: str) -> int:
    """Distinct for the tokens of a configuration, and not among the first ones, which tests use."""
    names = [each for each in fields if TOKEN.fullmatch(each)]
    return VOCABULARY - 1 - names.index(name)


def _shrink_rope(rope: dict[str, Any], fields: dict[str, Any], sections: bool) -> dict[str, Any]:
    """Scaling by layer type is nested; lists have one entry for each plane, and sections sum up to the planes."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _shrink_rope(v, fields, sections) if isinstance(v, dict) else v for name, v in rope.items()}
    share = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    width = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    width = width or fields.get("hidden_size", WIDTH) // fields.get("num_attention_heads", HEADS)
    if "partial_rotary_factor" in rope and int(width * share) % 4:
        # A block contains two planes.
        rope = {**rope, "partial_rotary_factor": (share := math.ceil(width * share / 4) * 4 / width)}
    planes = int(width * share) // 2
    changed = {**({"mrope_section": [1, 1, 1]} if sections else {}), **rope}
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            changed[name] = rope[name][:planes]
    for name in ("mrope_section", "xdrope_section"):
        if isinstance(changed.get(name), list):
            parts = [max(1, planes * part // sum(changed[name])) for part in changed[name]]
            changed[name] = [parts[0] + planes - sum(parts), *parts[1:]]
    if "original_max_position_embeddings" in rope:
        changed["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"] or 64, 64)
    if isinstance(rope.get("factor"), float) and math.isinf(rope["factor"]):
        changed["factor"] = 1.0
    return changed
