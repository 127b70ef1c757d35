"""Positions that the tokens of a model with RoPE choose, see `content_positions`, and sums that its KV cache keeps."""

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

from ..encoding.kinds import generators_commute
from ..encoding.positions import TokenPositions
from ..probing.attention_probe import Probe
from ..probing.module_inspection import forward_arguments
from ..probing.rope_layout import RopeTower


def refuse_moves(tower: RopeTower, layers: list[int], config, has_planes: bool) -> None:
    """Raises `ValueError` if the states that a layer reads cannot move its queries and keys."""
    axes, modules = tower.layouts[layers[0]].num_axes, {each.rope_name for each in tower.distinct_layouts}
    reads_others = any(next(iter(forward_arguments(tower.attentions[i][1]))) != "hidden_states" for i in layers)
    has_one = len(modules) > 1 or any(tower.inner_rope(i) or Probe.of(tower, i).coordinates.ndim < 3 for i in layers)
    reason = None
    if tower.sources or tower.has_prefix or reads_others:
        reason = "has keys, or cos and sin, that are not of the states that a layer reads; accepted: None"
    elif has_planes and (has_one or "heads" in config.content_positions):
        reason = "has one cos and sin for all heads or samples; accepted: position_encoding='liere' with block_size=2"
    elif "sum" in config.content_positions and (config.num_axes or axes) > 1 and not generators_commute(config):
        reason = "has axes that do not commute, so that padding would turn sums; accepted: shared, heads"
    if reason is not None:
        raise ValueError(f"content_positions={config.content_positions!r}: {tower.label} {reason}.")


def find_sums(tower: nn.Module, layer: int, options: dict[str, Any]) -> DynamicLayer | StaticLayer | None:
    """
    The (B, 1, N, heads · A) sums of tokens in the KV cache among the arguments of an attention module. They are a layer
    of the cache behind those of the model: what repeats, chooses or drops samples or tokens does so with the sums.
    """
    cache: Any = next((each for each in options.values() if isinstance(each, Cache)), None)
    if cache is None:
        return None
    layers, count = getattr(cache, "self_attention_cache", cache).layers, tower.config.num_hidden_layers
    # A layer that grows would change how masks are made for those that do not.
    static = [each for each in layers[:count] if isinstance(each, StaticLayer)]
    limits = [each.max_cache_len for each in static if not each.is_sliding] or [tower.config.max_position_embeddings]
    while len(layers) <= count + layer:
        # Some caches make all layers as they are needed.
        layers.append(StaticLayer(max(limits)) if static else (cache.layer_class_to_replicate or DynamicLayer)())
    return layers[count + layer]


def move_numbers(tower: nn.Module, layer: int, numbers: torch.Tensor, states: torch.Tensor, options: dict):
    """
    The numbers of tokens after their (…, prefix + N, hidden_size) states have moved these: (…, N, A) coordinates become
    those of every head, (B, N, heads · A), and (…, N, planes + 1) angles grow by the pretrained speeds of the planes.
    """
    encoding, past = tower.rotary_encoding, None
    content = encoding.content
    if content is None:
        return numbers
    states = states.flatten(1, -2) if states.ndim > 2 else states.unsqueeze(0)  # (B, prefix + N, hidden_size)
    sums = find_sums(tower, layer, options) if content.sums else None
    if sums is not None and sums.is_initialized:
        last = torch.as_tensor(sums.get_seq_length(), device=sums.keys.device).clamp(min=1) - 1
        past = sums.keys.index_select(2, last.view(1)).flatten(1)  # (B, heads · A)
    start = TokenPositions(states.new_zeros(1, content.weight.shape[1] // content.heads))  # (1, A)
    offsets = content(states[:, -numbers.shape[-2] :], start, encoding.place[layer], None, past).coordinates
    if sums is not None:
        sums.update(offsets.unsqueeze(1), offsets.unsqueeze(1)[..., :0])
    if encoding.rotates_states:
        return torch.cat([numbers.to(offsets)] * content.heads, dim=-1) + offsets  # (B, N, heads · A)
    planes, offsets = encoding.layouts[encoding.layout_of_layer[layer]], offsets.to(numbers)
    speeds = planes.read_frequencies(tower.get_submodule(planes.layout.rope_name)).to(numbers.device)  # (planes,)
    return numbers + nn.functional.pad(offsets[..., planes.axes.to(numbers.device)] * speeds, (0, 1))
