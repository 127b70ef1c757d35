"""
Exact upgrades of a model to another position encoding: the same function, usually with more to learn.

So a pretrained RoPE-Mixed ViT becomes a LieRE ViT, and fine-tuning starts from the accuracy that it has.
There are two ways, and the first that is possible is taken:

*In place*, query and key stay as they are: the blocks of b channels are put into blocks of b′, where b divides b′ and
the channels that b leaves unrotated stay unrotated.

*In another basis*, for generators that commute: they share planes (see [`lie_algebra.CommonPlanes`]), in whose basis
they are RoPE-Mixed. Query and key weights take up the basis, which changes no attention logit because queries and keys
are not normalised, and the planes are put where the new encoding can rotate them as the old one does:

| to | planes that fit |
|---|---|
| rope_mixed, cayley_string, liere b | all, where the blocks hold as many planes as are rotated |
| circulant_string b | ⌊(b−1)/2⌋ for each block |
| comrope_ld b | planes of one block rotate with the same ratio of the axes |
| comrope_ap b | every plane rotates with one axis alone; each block serves one axis, in turn |

So every encoding whose generators commute becomes RoPE-Mixed, and LieRE whose generators happen to commute as well;
RoPE-Mixed becomes ComRoPE or Circulant-STRING where its spectrum allows. From `none` and `absolute`, generators are 0
and multipliers 1.

No exact upgrade exists where generators do not commute and b does not divide b′, where planes do not fit, and to
encodings that learn no rotations. Spherical RoPE is a product of rotations, which no other encoding is.
"""

import torch

from ..models.encoding.encoding_traits import ENCODING_TRAITS, OWN_FIELDS, traits_of
from ..models.encoding.encodings import ENCODING_CLASSES
from ..models.encoding.encodings_in_basis import EncodingInBasis
from ..models.encoding.rotary_encoding import RotaryEncoding
from ..models.rotation.lie_algebra import common_planes, skew, skew_entries
from ..models.transformer.configuration_liere import LieREConfig
from ..models.transformer.pretrained import LieREPreTrainedModel
from .base import ConversionError
from .rebuilding import changed_config, encoder_of, rebuilt


LEARNED_ENCODINGS = tuple(name for name, traits in ENCODING_TRAITS.items() if traits.learned and not traits.product)
# Relative difference from commuting, proportional or axial generators that float32 rounding may cause.
ROUNDING = 1e-6


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
        A new model of the same class, type, device and mode. Coordinates, `rotate_prefix` and tables are carried over;
        where nothing was rotated before, the first two are those of a new model.

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
    encoder, prefix = encoder_of(model)
    parameters, bases = _upgraded_parameters(encoder.rotary_encoding, model.config, config)
    state_dict = {name: tensor for name, tensor in model.state_dict().items() if "rotary_encoding." not in name}
    device = next(model.parameters()).device
    for name, tensor in parameters.items():
        state_dict[f"{prefix}rotary_encoding.{name}"] = tensor.float().to(device)
    upgraded = rebuilt(model, config, state_dict)
    if bases is not None:
        for index, layer in enumerate(encoder_of(upgraded)[0].layers):
            layer.attention.fold(bases[index % len(bases)].unsqueeze(1).to(device))
    return upgraded


def _upgraded_config(config: LieREConfig, changes: dict[str, object]) -> LieREConfig:
    traits = traits_of(config)
    learned = traits is not None and traits.learned
    for name in ("share_heads", "share_layers"):
        if changes[name] is None:
            changes[name] = learned and getattr(config, name)
    # Fields for which the new encoding has its own defaults.
    changes |= dict.fromkeys(("rotary_init", "rotary_init_scale", "rope_theta", *OWN_FIELDS))
    if traits is None:
        # Generators that start at zero leave class tokens as they are, wherever these are placed.
        changes["rotate_prefix"] = None
    return changed_config(config, changes)


def _upgraded_parameters(
    encoding: RotaryEncoding | None, old: LieREConfig, new: LieREConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """
    The parameters of the new encoding by name, and the basis (layers or 1, heads or 1, D, D) that queries and keys
    change to; `None` where they stay as they are.
    """
    target = ENCODING_CLASSES[new.position_encoding](new, new.num_axes)
    if encoding is None:
        zeros = torch.zeros(new.num_axes, target.layers, target.heads, target.num_planes, dtype=torch.float64)
        return _of_planes(target, zeros), None
    with torch.no_grad():
        parameter = next(encoding.parameters(), torch.empty(0))
        matrices = skew(encoding.entries(parameter.device).detach().double().cpu(), encoding.block_size)
    for name, dim, wanted in (("share_layers", 1, target.layers), ("share_heads", 2, target.heads)):
        if wanted < matrices.shape[dim]:
            first = matrices.narrow(dim, 0, 1)
            if (matrices - first).norm() > ROUNDING * matrices.norm():
                raise ConversionError(f"{name}=True: generators that differ cannot become one set.")
            matrices = first
    try:
        entries = _in_place(matrices, old, target)
        return _of_entries(entries.expand(-1, target.layers, target.heads, -1, -1), target), None
    except ConversionError as reason:
        planes = common_planes(matrices)
        if planes.error.max() > ROUNDING:
            raise ConversionError(
                f"{reason} Nor do the generators of this model commute, so that no basis makes them rotations of "
                f"planes, which could be put elsewhere (relative error {planes.error.max():.2g})."
            ) from None
    frequencies, bases = _by_head(planes.frequencies, planes.basis, new.head_dim)
    frequencies, bases = _in_new_places(frequencies, bases, target)
    return _of_planes(target, frequencies.expand(-1, target.layers, target.heads, -1)), bases


def _in_place(matrices: torch.Tensor, old: LieREConfig, target: RotaryEncoding) -> torch.Tensor:
    """
    Entries of blocks that hold the old blocks on their diagonal, and zeros where there are none left, (A, layers,
    heads, blocks, entries).

    Raises:
        ConversionError: if the rotations are no exponentials of sums, old blocks would be cut or not be rotated any
            more, or the new ones have their own form.
    """
    new = target.config
    old_size, size = matrices.shape[-1], new.block_size
    if traits_of(old).product:
        raise ConversionError(
            f"No exact upgrade from {old.position_encoding}: its rotations are products of exponentials."
        )
    if isinstance(target, EncodingInBasis) and not traits_of(new).proportional:
        raise ConversionError(
            f"No exact upgrade from {old.position_encoding} to {new.position_encoding} in place: its parameters are "
            "frequencies of planes."
        )
    if size % old_size:
        raise ConversionError(
            f"No exact upgrade from {old.position_encoding} with blocks of {old_size} to {new.position_encoding} with "
            f"blocks of {size}: {old_size} does not divide {size}, so blocks would be cut."
        )
    rotated, blocks, joined = matrices.shape[3] * old_size, new.head_dim // size, size // old_size
    if blocks * size < rotated:
        raise ConversionError(
            f"No exact upgrade to blocks of {size}: they leave the last {new.head_dim % size} of {new.head_dim} "
            f"channels unrotated, blocks of {old_size} only {new.head_dim - rotated}."
        )
    matrices = torch.nn.functional.pad(matrices, (0, 0, 0, 0, 0, blocks * joined - matrices.shape[3]))
    matrices = matrices.unflatten(3, (blocks, joined))
    larger = matrices.new_zeros(*matrices.shape[:4], size, size)
    for index in range(joined):
        part = slice(index * old_size, (index + 1) * old_size)
        larger[..., part, part] = matrices[..., index, :, :]
    return skew_entries(larger)


def _by_head(frequencies: torch.Tensor, basis: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Planes of blocks as planes of heads: (A, layers, heads, planes), and the basis (layers, heads, D, D) whose columns
    are the planes, two each, and then the channels that are in no plane.
    """
    blocks, size = basis.shape[2:4]
    whole = torch.eye(head_dim, dtype=basis.dtype).repeat(*basis.shape[:2], 1, 1)
    for block in range(blocks):
        part = slice(block * size, (block + 1) * size)
        whole[..., part, part] = basis[:, :, block]
    channels = torch.arange(blocks * size).view(blocks, size)
    in_planes = channels[:, : size - size % 2].flatten()
    others = sorted(set(range(head_dim)) - set(in_planes.tolist()))
    return frequencies.flatten(3), whole[..., in_planes.tolist() + others]


def _in_new_places(
    frequencies: torch.Tensor, basis: torch.Tensor, target: RotaryEncoding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies (A, layers, heads, planes) in the order of the new encoding's planes, and the basis likewise."""
    axes, layers, heads, _ = frequencies.shape
    size, room = target.block_size, target.num_planes // target.num_blocks
    placed = frequencies.new_zeros(axes, layers, heads, target.num_planes)
    ordered = torch.empty_like(basis)
    for layer in range(layers):
        for head in range(heads):
            found = frequencies[:, layer, head]  # (A, planes)
            columns = [-1] * target.config.head_dim
            for plane, place in _places(found, target).items():
                first = place // room * size + place % room * 2
                columns[first : first + 2] = [2 * plane, 2 * plane + 1]
                placed[:, layer, head, place] = found[:, plane]
            others = iter(sorted(set(range(len(columns))) - set(columns)))
            ordered[layer, head] = basis[layer, head][:, [next(others) if c < 0 else c for c in columns]]
    of_block = target.plane_basis(basis.device)
    if of_block is not None:
        rest = torch.eye(target.config.head_dim - target.num_blocks * size, dtype=basis.dtype)
        ordered = ordered @ torch.block_diag(*[of_block.to(basis)] * target.num_blocks, rest).T
    return placed, ordered


def _places(frequencies: torch.Tensor, target: RotaryEncoding) -> dict[int, int]:
    """
    For every plane of a head that is rotated, its place among the planes of the new encoding.

    Args:
        frequencies: (A, planes).

    Raises:
        ConversionError: if the blocks of the new encoding cannot hold the planes.
    """
    encoding, axes, blocks = target.config.position_encoding, len(frequencies), target.num_blocks
    room, free = target.num_planes // blocks, list(range(blocks))
    places = {}
    for axis, planes in _that_share_blocks(frequencies, encoding):
        accepting = [block for block in free if axis is None or block % axes == axis]
        needed = -(-len(planes) // room)
        if len(accepting) < needed:
            shared = "the axes" if axis is None else f"axis {axis}"
            if ENCODING_TRAITS[encoding].proportional and axis is None:
                shared = "one ratio of the axes"
            raise ConversionError(
                f"No exact upgrade to {encoding} with block_size={target.block_size}: {len(planes)} planes of a head "
                f"rotate with {shared}; of the {blocks} blocks they need {needed} for themselves, and "
                f"{len(accepting)} are left."
            )
        for index, plane in enumerate(planes):
            places[plane] = accepting[index // room] * room + index % room
        free = [block for block in free if block not in accepting[:needed]]
    return places


def _that_share_blocks(frequencies: torch.Tensor, encoding: str) -> list[tuple[int | None, list[int]]]:
    """
    Planes (A, planes) that are rotated, in groups that may share the blocks of an encoding, each with the one axis that
    its blocks must serve, `None` for any.
    """
    magnitudes = frequencies.norm(dim=0)
    rotated = (magnitudes > 0).nonzero().flatten().tolist()
    traits = ENCODING_TRAITS[encoding]
    if not traits.proportional:
        return [(None, rotated)] if rotated else []
    directions = frequencies / magnitudes.where(magnitudes > 0, 1)
    if traits.serves_one_axis:
        axes = directions.abs().argmax(dim=0)
        oblique = sum((1 - directions[axes[plane], plane].abs()).item() > ROUNDING**2 for plane in rotated)
        if oblique:
            raise ConversionError(
                f"No exact upgrade to {encoding}: each of its blocks rotates with one axis alone, and {oblique} planes "
                "of a head rotate with several."
            )
        return [
            (axis, planes) for axis in range(len(frequencies)) if (planes := [p for p in rotated if axes[p] == axis])
        ]
    groups: list[list[int]] = []
    for plane in rotated:
        # The cosine of a small angle differs from 1 by its square. A plane may also rotate the other way.
        alike = [
            group
            for group in groups
            if 1 - (directions[:, group[0]] @ directions[:, plane]).abs().item() <= ROUNDING**2
        ]
        if alike:
            alike[0].append(plane)
        else:
            groups.append([plane])
    return [(None, group) for group in groups]


def _of_planes(target: RotaryEncoding, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parameters by name, from the frequencies (A, layers, heads, planes) of an encoding's planes."""
    if traits_of(target.config).proportional:
        return _of_entries(target.to_blocks(frequencies), target)
    return target.parameters_for_planes(frequencies)


def _of_entries(entries: torch.Tensor, target: RotaryEncoding) -> dict[str, torch.Tensor]:
    """Parameters by name, from the entries of the generators (A, layers, heads, blocks, entries)."""
    traits = traits_of(target.config)
    if traits.serves_one_axis:
        serves = target.axis_multipliers(entries.device).unsqueeze(-1)
        if (entries * ~serves).norm() > ROUNDING * entries.norm():
            raise ConversionError(
                f"No exact upgrade to {target.config.position_encoding}: each of its blocks rotates with one axis "
                "alone, the axes in turn."
            )
        return {"generators": (entries * serves).sum(0)}
    return _proportional(entries) if traits.proportional else {"generators": entries}


def _proportional(entries: torch.Tensor) -> dict[str, torch.Tensor]:
    """P and θ with entries[a] = θ_a P, block by block (ComRoPE eq. 10); θ = 1 for a block of zeros."""
    largest = entries.norm(dim=-1).argmax(dim=0, keepdim=True)
    base = entries.gather(0, largest.unsqueeze(-1).expand(1, *entries.shape[1:]))
    squared = base.square().sum(dim=-1)
    multipliers = torch.where(squared > 0, (entries * base).sum(dim=-1) / squared.clamp_min(1e-300), 1.0)
    difference = (entries - multipliers.unsqueeze(-1) * base).norm(dim=-1)
    different = difference > ROUNDING * base.norm(dim=-1)
    if different.any():
        raise ConversionError(
            "No exact upgrade to comrope_ld: the generators of a block's axes must be multiples of one matrix, and "
            f"in {different.any(dim=0).sum().item()} blocks they are not."
        )
    return {"generators": base.squeeze(0), "multipliers": multipliers}
