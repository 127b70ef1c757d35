"""
Exact upgrades of a model to a more general position encoding: the same function, with more to learn.

So a pretrained RoPE-Mixed ViT becomes a LieRE ViT, and fine-tuning starts from the accuracy that it has.
In the table b divides b′, and the channels b leaves unrotated stay unrotated under b′:

| from | to | how |
|---|---|---|
| none, absolute | rope_mixed, liere b, comrope_ap b, comrope_ld b | generators 0, multipliers 1 |
| axial_rope | rope_mixed, liere b, comrope_ld 2 | the fixed frequencies become entries |
| axial_rope | comrope_ap b | the same after reordering query and key channels, if the planes fill the head |
| rope_mixed | liere b, comrope_ld 2 | diagonal 2×2 blocks inside b×b blocks; a plane has one generator up to scale |
| liere b | liere b′ | diagonal blocks inside larger blocks |
| comrope_ap b | liere b′, comrope_ld b | zero for the axes that a block does not serve |
| comrope_ap b | comrope_ap b′ | blocks of one axis are put side by side by reordering query and key channels |
| comrope_ld b | liere b′ | θ_a · P for every axis |
| shared heads or layers | not shared | copies |

No exact upgrade exists in these cases:

- *rope_mixed, liere or comrope_ld → comrope_ap*: their blocks rotate with all axes, those of comrope_ap with one.
- *liere → comrope_ld, and any block size that joins blocks under comrope_ld*: all axes' generators of a block must be
  multiples of one matrix, and blocks that differ in their ratio of axes are not; checked on the values.
- *b′ < b, or b not dividing b′*: the blocks of b would be cut.
- *A larger unrotated tail*, and *any rotation → none, absolute or axial_rope*: rotations would be lost.
"""

import re

import torch
from huggingface_hub.errors import StrictDataclassError

from ..models.configuration_liere import LieREConfig
from ..models.encodings import RotaryEncoding
from ..models.lie_algebra import skew, skew_entries
from ..models.modeling_liere import LieREPreTrainedModel
from .base import ConversionError


LEARNED_ENCODINGS = ("rope_mixed", "liere", "comrope_ap", "comrope_ld")
# Generators that are multiples of one matrix up to float32 rounding.
PROPORTIONAL = 1e-6


def upgrade_encoding(
    model: LieREPreTrainedModel,
    *,
    position_encoding: str,
    block_size: int | None = None,
    share_heads: bool | None = None,
    share_layers: bool | None = None,
) -> LieREPreTrainedModel:
    """
    A model of a more general position encoding that computes the same function; see the top of this file.

    Args:
        model: Any of our models; it is left as it is.
        position_encoding: One of [`LEARNED_ENCODINGS`].
        block_size: Size of its blocks; `None` means the configuration's default.
        share_heads: Whether all heads share generators; `None` keeps what the model does, and `False` where it has
            nothing learned to share.
        share_layers: Whether all layers share generators, likewise.

    Returns:
        A new model of the same class, type, device and mode. Coordinates, `rotate_prefix` and tables are carried over.

    Raises:
        ConversionError: if no model of the new encoding computes the same function, with the mathematical reason.
    """
    if position_encoding not in LEARNED_ENCODINGS:
        raise ConversionError(
            f"position_encoding={position_encoding!r} has nothing to learn rotations with; accepted are "
            f"{', '.join(LEARNED_ENCODINGS)}."
        )
    changes = {"block_size": block_size, "share_heads": share_heads, "share_layers": share_layers}
    config = _upgraded_config(model.config, {"position_encoding": position_encoding, **changes})
    encoder = getattr(model, model.base_model_prefix, model)
    entries, order = _upgraded_entries(model, encoder.rotary_encoding, config)
    state_dict = {name: tensor for name, tensor in model.state_dict().items() if "rotary_encoding." not in name}
    if order != sorted(order):
        _reorder_channels(state_dict, model.config, order)
    prefix = "" if encoder is model else f"{model.base_model_prefix}."
    device = next(model.parameters()).device
    for name, tensor in _parameters(entries, position_encoding).items():
        state_dict[f"{prefix}rotary_encoding.{name}"] = tensor.float().to(device)
    arguments = {"use_mask_token": True} if encoder is model and encoder.embeddings.mask_token is not None else {}
    upgraded = type(model)(config, **arguments)
    upgraded.load_state_dict({name: tensor.clone() for name, tensor in state_dict.items()}, assign=True)
    return upgraded.train(model.training)


def _upgraded_config(config: LieREConfig, changes: dict[str, object]) -> LieREConfig:
    learned = config.position_encoding in LEARNED_ENCODINGS
    for name in ("share_heads", "share_layers"):
        if changes[name] is None:
            changes[name] = learned and getattr(config, name)
        if learned and changes[name] and not getattr(config, name):
            raise ConversionError(f"{name}=True: generators that differ cannot become one set.")
    # Fields for which the new encoding has its own defaults.
    changes |= dict.fromkeys(("rotary_init", "rotary_init_scale", "rope_theta"))
    try:
        upgraded = type(config).from_dict(config.to_dict() | changes)
    except (StrictDataclassError, ValueError) as error:
        raise ConversionError(f"No such model: {error}") from error
    upgraded._attn_implementation = config._attn_implementation
    return upgraded


def _upgraded_entries(
    model: LieREPreTrainedModel, encoding: RotaryEncoding | None, config: LieREConfig
) -> tuple[torch.Tensor, list[int]]:
    """
    The generators' entries of all blocks of `config`, (axes, layers, heads, blocks, entries), and the order in which
    the model's blocks are put into them; it is sorted where channels stay in place.
    """
    old, size, axes = model.config, config.block_size, config.num_axes
    layers = 1 if config.share_layers else config.num_hidden_layers
    heads = 1 if config.share_heads else config.num_attention_heads
    blocks = config.head_dim // size
    if encoding is None:
        return torch.zeros(axes, layers, heads, blocks, size * (size - 1) // 2, dtype=torch.float64), []
    with torch.no_grad():
        entries = encoding.entries(next(model.parameters()).device).detach().double().cpu()
    _check_blocks(old, config.position_encoding, size, entries.shape[3])
    order = list(range(entries.shape[3]))
    if config.position_encoding == "comrope_ap":
        order = _blocks_by_axis(entries, size // old.block_size)
        entries = entries[:, :, :, order]
    entries = _join_blocks(entries, old.block_size, size, blocks)
    return entries.expand(axes, layers, heads, *entries.shape[3:]), order


def _reorder_channels(state_dict: dict[str, torch.Tensor], config: LieREConfig, order: list[int]) -> None:
    """Put the channels of query and key into the order of their blocks."""
    channels = torch.arange(config.head_dim).view(-1, config.block_size)[order].flatten()
    for name in state_dict:
        if re.search(r"\.attention\.[qk]_proj\.", name):
            per_head = state_dict[name].unflatten(0, (config.num_attention_heads, config.head_dim))
            state_dict[name] = per_head[:, channels.to(per_head.device)].flatten(0, 1)


def _parameters(entries: torch.Tensor, position_encoding: str) -> dict[str, torch.Tensor]:
    """Parameters of an encoding by name, from the entries of its generators (axes, layers, heads, blocks, entries)."""
    if position_encoding == "comrope_ld":
        return _proportional(entries)
    if position_encoding == "comrope_ap":
        block = torch.arange(entries.shape[3])
        # Each block serves one axis, and the axes alternate.
        entries = entries.movedim(3, 0)[block, block % len(entries)].movedim(0, 2)
    return {"generators": entries}


def _check_blocks(config: LieREConfig, position_encoding: str, size: int, blocks: int) -> None:
    """Raises where the structure of the encodings alone forbids an exact upgrade."""
    old, old_size = config.position_encoding, config.block_size
    if position_encoding == "comrope_ap" and old not in ("axial_rope", "comrope_ap"):
        raise ConversionError(
            f"No exact upgrade from {old} to comrope_ap: a block of comrope_ap turns with one axis alone, while blocks "
            f"of {old} turn with all {config.num_axes} axes, and no change of basis makes one of the other."
        )
    if size % old_size:
        raise ConversionError(
            f"No exact upgrade from blocks of {old_size} to blocks of {size}: {old_size} does not divide {size}, so "
            "blocks would be cut, and generators that were free would have to vanish between the parts."
        )
    rotated = blocks * old_size
    if config.head_dim // size * size < rotated:
        raise ConversionError(
            f"No exact upgrade to blocks of {size}: they leave the last {config.head_dim % size} of {config.head_dim} "
            f"channels unrotated, blocks of {old_size} only {config.head_dim - rotated}, and rotations of channels in "
            "between would be lost."
        )


def _blocks_by_axis(entries: torch.Tensor, joined: int) -> list[int]:
    """Order of blocks in which each group of `joined` serves one axis, the axes in turn (ComRoPE-AP)."""
    axes, blocks = entries.shape[0], entries.shape[3]
    if blocks % (axes * joined):
        raise ConversionError(
            f"No exact upgrade to comrope_ap: {blocks} blocks cannot be grouped by {joined} for each of {axes} axes."
        )
    # The blocks of Axial RoPE come axis by axis, those of ComRoPE-AP alternate; a block of zeros may serve any axis.
    activity = entries.abs().amax(dim=(1, 2, 4))
    contiguous = torch.arange(blocks) // (blocks // axes)
    in_turn = torch.arange(blocks) % axes
    serves = next(
        axis for axis in (in_turn, contiguous) if (activity * (torch.arange(axes)[:, None] != axis)).sum() == 0
    )
    waiting = [iter((serves == axis).nonzero().flatten().tolist()) for axis in range(axes)]
    return [next(waiting[block % axes]) for block in range(blocks // joined) for _ in range(joined)]


def _join_blocks(entries: torch.Tensor, old_size: int, size: int, blocks: int) -> torch.Tensor:
    """Entries of blocks of `size` that hold the old blocks on their diagonal, and zeros where there are none left."""
    joined = size // old_size
    matrices = skew(entries, old_size)
    matrices = torch.nn.functional.pad(matrices, (0, 0, 0, 0, 0, blocks * joined - matrices.shape[3]))
    matrices = matrices.unflatten(3, (blocks, joined))
    larger = matrices.new_zeros(*matrices.shape[:4], size, size)
    for index in range(joined):
        part = slice(index * old_size, (index + 1) * old_size)
        larger[..., part, part] = matrices[..., index, :, :]
    return skew_entries(larger)


def _proportional(entries: torch.Tensor) -> dict[str, torch.Tensor]:
    """P and θ with entries[a] = θ_a P, block by block (ComRoPE eq. 10); θ = 1 for a block of zeros."""
    largest = entries.norm(dim=-1).argmax(dim=0, keepdim=True)
    base = entries.gather(0, largest.unsqueeze(-1).expand(1, *entries.shape[1:]))
    squared = base.square().sum(dim=-1)
    multipliers = torch.where(squared > 0, (entries * base).sum(dim=-1) / squared.clamp_min(1e-300), 1.0)
    difference = (entries - multipliers.unsqueeze(-1) * base).norm(dim=-1)
    if (difference > PROPORTIONAL * base.norm(dim=-1)).any():
        raise ConversionError(
            "No exact upgrade to comrope_ld: the generators of a block's axes must be multiples of one matrix, and "
            f"in {(difference > PROPORTIONAL * base.norm(dim=-1)).any(dim=0).sum().item()} blocks they are not, whose "
            "planes turn with different ratios of the axes."
        )
    return {"generators": base.squeeze(0), "multipliers": multipliers}
