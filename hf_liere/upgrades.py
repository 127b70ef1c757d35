"""
Exact upgrades of a model to another position encoding or image size: the same function, usually with more to learn.

For example, a pretrained RoPE-Mixed ViT becomes a LieRE ViT, and fine-tuning starts from its accuracy. There are two
ways; the first possible one is used:

*In place*, query and key do not change: blocks of b channels are embedded into blocks of b′, where b divides b′ and the
channels that b leaves unrotated stay unrotated.

*In another basis*, for commuting generators: they share planes (see [`CommonPlanes`]), and in the basis of these
planes they are RoPE-Mixed. The basis is multiplied into the query and key weights, which does not change
attention logits because queries and keys are not normalised. The planes move to where the new encoding can rotate them
as the old one does:

| to | planes that fit |
|---|---|
| rope_mixed, cayley_string, liere_product, liere b | all, if the blocks have room for all rotated planes |
| circulant_string b | ⌊(b−1)/2⌋ for each block |
| comrope_ld b | planes of one block rotate with the same ratio of the axes |
| comrope_ap b | every plane rotates with one axis alone; each block serves one axis, in turn |

So every encoding with commuting generators becomes RoPE-Mixed, and so does LieRE if its generators happen to commute;
RoPE-Mixed becomes ComRoPE or Circulant-STRING if its spectrum allows. From `none` and `absolute`, generators start at
0.

No exact upgrade exists if generators do not commute and b does not divide b′, if planes do not fit, or for encodings
without learned rotations. From Spherical RoPE and the LieRE product, which are products of exponentials, there is one
only while their generators commute.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError

from .encoding.commuting_encodings import ROUNDING, EncodingInBasis
from .encoding.fixed_encodings import AXIAL_FIELDS
from .encoding.kinds import ENCODINGS, TRIPLES, encoding_of, generators_commute
from .encoding.rotary_encoding import RotaryEncoding
from .encoding.rotary_fields import OWN_FIELDS
from .errors import InputError
from .geometry.common_planes import CommonPlanes, find_common_planes, generator_matrices
from .rotation.exponential import skew_entries
from .transformer.configuration_liere import LieREConfig, LieREViTConfig
from .transformer.pretrained import LieREPreTrainedModel


class ConversionError(InputError):
    """The checkpoint cannot be converted, or an option is invalid; the message has the reason."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn the reason why a configuration or an encoding is impossible into [`ConversionError`]."""
    try:
        yield
    except (StrictDataclassError, ValueError) as reason:
        raise ConversionError(f"{what}: {str(reason).removesuffix('.')}.") from reason


def sizes(name: str, value: int | Iterable[int], axes: int) -> tuple[int, ...]:
    """One positive extent per axis, from a single number or one number per axis."""
    extents = (value,) * axes if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else ()
    if len(extents) != axes or any(not isinstance(size, int) or size < 1 for size in extents):
        raise ConversionError(f"{name}={value!r} must be one positive number, or one for each of {axes} axes.")
    return extents


# Blocks of three channels cannot contain the planes of another encoding.
LEARNED_ENCODINGS = tuple(name for name, kind in ENCODINGS.items() if kind.learned and kind.block_sizes is not TRIPLES)
Config = TypeVar("Config", bound=LieREConfig)


def upgrade_encoding(
    model: LieREPreTrainedModel,
    *,
    position_encoding: str,
    block_size: int | None = None,
    share_heads: bool | None = None,
    share_layers: bool | None = None,
    coordinates: str | None = None,
) -> LieREPreTrainedModel:
    """
    A model with a more general position encoding that computes the same function; see the top of this file.

    ```python
    import hf_liere

    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = hf_liere.LieREViTConfig(position_encoding="rope_mixed", **sizes)
    model = hf_liere.LieREViTForImageClassification(config)
    upgraded = hf_liere.upgrade_encoding(model, position_encoding="liere")  # the same outputs
    ```

    Args:
        model: Any of our models; it is left as it is.
        position_encoding: One of [`LEARNED_ENCODINGS`].
        block_size: Size of its blocks; `None` means the configuration's default.
        share_heads: Whether all heads share generators; `None` keeps the model's choice (`False` without rotations).
        share_layers: Whether all layers share generators, likewise.
        coordinates: Coordinates of the new model; `None` keeps the model's. `train_grid` and `centred_grid` differ by a
            shift, which changes nothing if generators commute and there are no class and register tokens, at which the
            shift would be seen; a model that rotates nothing takes any.

    Returns:
        A new model of the same class, dtype, device and mode. It keeps `rotate_prefix` and tables; if nothing was
        rotated before, it has the default coordinates and `rotate_prefix`.

    Raises:
        ConversionError: if no model of the new encoding computes the same function, with the mathematical reason.
    """
    if position_encoding not in LEARNED_ENCODINGS:
        raise ConversionError(
            f"position_encoding={position_encoding!r} learns no rotations; accepted are {', '.join(LEARNED_ENCODINGS)}."
        )
    changes: dict[str, object] = {"position_encoding": position_encoding, "block_size": block_size}
    changes |= {"share_heads": share_heads, "share_layers": share_layers}
    if coordinates is not None:
        _check_coordinates(model.config, coordinates)
        changes["coordinates"] = coordinates
    config = _upgrade_config(model.config, changes)
    parameters, bases = _upgrade_parameters(model.base_model.rotary_encoding, model.config, config)
    device = next(model.parameters()).device
    changed = {f"rotary_encoding.{name}": tensor.float().to(device) for name, tensor in parameters.items()}
    upgraded = rebuild(model, config, changed)
    if bases is not None:
        for index, layer in enumerate(upgraded.base_model.layers):
            layer.attention.fold(bases[index % len(bases)].unsqueeze(1).to(device))
    return upgraded


def _check_coordinates(config: LieREConfig, coordinates: str) -> None:
    """Raise [`ConversionError`] if a model of these rotations computes something else in other coordinates."""
    old = getattr(config, "coordinates", None)
    if config.train_grid is None:
        reason = "positions come with every input"
    elif config.position_table_size is not None:
        reason = "the table is read at coordinates"
    elif encoding_of(config) is None or old == coordinates:
        return
    elif {old, coordinates} != {"train_grid", "centred_grid"}:
        reason = "only 'train_grid' and 'centred_grid' differ by a shift"
    elif not generators_commute(config):
        reason = f"generators of {config.position_encoding} need not commute, so a shift changes what they compute"
    elif config.num_prefix_tokens:
        reason = "patches would move relative to class and register tokens"
    else:
        return
    raise ConversionError(f"No exact change of coordinates from {old!r} to {coordinates!r}: {reason}.")


def _upgrade_config(config: LieREConfig, changes: dict[str, object]) -> LieREConfig:
    traits = encoding_of(config)
    learned = traits is not None and traits.learned
    for name in ("share_heads", "share_layers"):
        if changes[name] is None:
            changes[name] = learned and getattr(config, name)
    # Reset fields for which the new encoding has its own defaults.
    reset = dict.fromkeys(("rotary_init", "rotary_init_scale", "rope_theta", *OWN_FIELDS))
    changes = reset | {"content_positions": config.content_positions} | changes
    if traits is None:
        # Generators that start at zero do not rotate class tokens, whatever their position.
        changes["rotate_prefix"] = None
    upgraded = change_config(config, changes)
    in_indices = getattr(config, "coordinates", None) in ("index", None)
    if config.position_encoding == "axial_rope" and in_indices:
        fields = ("rotary_init_scale", "rope_theta", *AXIAL_FIELDS)
        start = {"rotary_init": "axial"} | {name: getattr(config, name) for name in fields}
        with suppress(ConversionError):
            # Its generators are the start of later training, which the configuration then determines.
            upgraded = change_config(upgraded, start)
    return upgraded


def _upgrade_parameters(
    encoding: RotaryEncoding | None, old: LieREConfig, new: LieREConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """
    The parameters of the new encoding by name, and the basis (layers or 1, heads or 1, D, D) for queries and keys;
    `None` if these do not change.
    """
    target = ENCODINGS[new.position_encoding](new, new.num_axes)
    if encoding is None:
        zeros = torch.zeros(new.num_axes, target.layers, target.heads, target.num_planes, dtype=torch.float64)
        return target.parameters_for_planes(zeros), None
    matrices = generator_matrices(encoding)
    for name, dim, wanted in (("share_layers", 1, target.layers), ("share_heads", 2, target.heads)):
        if wanted < matrices.shape[dim]:
            first = matrices.narrow(dim, 0, 1)
            if (matrices - first).norm() > ROUNDING * matrices.norm():
                raise ConversionError(f"{name}=True: different generators cannot become one set.")
            matrices = first
    refusal = f"No exact upgrade to {new.position_encoding}"
    try:
        entries = _embed_blocks(matrices, old, target)
        with refusing(refusal):
            return target.parameters_for_entries(entries.expand(-1, target.layers, target.heads, -1, -1)), None
    except ConversionError as reason:
        planes = find_common_planes(matrices)
        if planes.error.max() > ROUNDING:
            raise ConversionError(
                f"{reason} The generators of this model do not commute either, so no basis turns them into rotations "
                f"of planes that could be moved (relative error {planes.error.max():.2g})."
            ) from None
    frequencies, bases = _move_planes(planes, target)
    with refusing(refusal):
        return target.parameters_for_planes(frequencies.expand(-1, target.layers, target.heads, -1)), bases


def _embed_blocks(matrices: torch.Tensor, old: LieREConfig, target: RotaryEncoding) -> torch.Tensor:
    """
    Entries (A, layers, heads, blocks, entries) of blocks with the old blocks on their diagonals, and zeros elsewhere.
    Raises [`ConversionError`] if rotations are not exponentials of sums, or the new blocks cannot contain the old ones.
    """
    new = target.config
    old_size, size = matrices.shape[-1], new.block_size
    if encoding_of(old).product:
        raise ConversionError(
            f"No exact upgrade from {old.position_encoding}: its rotations are products of exponentials."
        )
    if isinstance(target, EncodingInBasis) and not encoding_of(new).proportional:
        raise ConversionError(
            f"No exact upgrade from {old.position_encoding} to {new.position_encoding} in place: it learns frequencies."
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
    return skew_entries(_block_diagonal(matrices.unflatten(3, (blocks, joined))))


def _block_diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """(…, n · b, n · b) with (…, n, b, b) matrices on the diagonal."""
    return torch.diag_embed(matrices.movedim(-3, -1), dim1=-4, dim2=-2).flatten(-4, -3).flatten(-2)


def _move_planes(found: CommonPlanes, target: RotaryEncoding) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Frequencies (A, layers, heads, planes) in the order of the new encoding's planes, and the basis (layers, heads, D,
    D) that moves the planes found in the old blocks there.
    """
    frequencies, (layers, heads, blocks, found_size) = found.frequencies.flatten(3), found.basis.shape[:4]
    size, room, head_dim = target.block_size, target.num_planes // target.num_blocks, target.config.head_dim
    basis = torch.eye(head_dim, dtype=found.basis.dtype).repeat(layers, heads, 1, 1)
    basis[..., : blocks * found_size, : blocks * found_size] = _block_diagonal(found.basis)
    # Two for each plane, then those outside of all planes.
    channels = torch.arange(blocks * found_size).view(blocks, -1)[:, : found_size - found_size % 2].flatten().tolist()
    channels += sorted(set(range(head_dim)) - set(channels))
    placed = frequencies.new_zeros(len(frequencies), layers, heads, target.num_planes)
    ordered = torch.empty_like(basis)
    for layer in range(layers):
        for head in range(heads):
            of_head = frequencies[:, layer, head]  # (A, planes)
            columns = [-1] * head_dim
            for plane, place in _assign_planes(of_head, target).items():
                first = place // room * size + place % room * 2
                columns[first : first + 2] = channels[2 * plane : 2 * plane + 2]
                placed[:, layer, head, place] = of_head[:, plane]
            others = iter([channel for channel in channels if channel not in columns])
            ordered[layer, head] = basis[layer, head][:, [next(others) if c < 0 else c for c in columns]]
    if (of_block := target.plane_basis(basis.device)) is not None:
        rest = torch.eye(head_dim - target.num_blocks * size, dtype=basis.dtype)
        ordered = ordered @ torch.block_diag(*[of_block.to(basis)] * target.num_blocks, rest).T
    return placed, ordered


def _assign_planes(frequencies: torch.Tensor, target: RotaryEncoding) -> dict[int, int]:
    """
    Maps every rotated plane of a head, with (A, planes) frequencies, to its place among the planes of the new encoding.
    Raises [`ConversionError`] if the planes do not fit its blocks.
    """
    encoding, axes, blocks = target.config.position_encoding, len(frequencies), target.num_blocks
    refusal, traits = f"No exact upgrade to {encoding}", ENCODINGS[encoding]
    room, free, places = target.num_planes // blocks, list(range(blocks)), {}
    magnitudes = frequencies.norm(dim=0)
    directions = frequencies / magnitudes.where(magnitudes > 0, 1)
    # Planes that may share blocks.
    groups: list[list[int]] = []
    for plane in (magnitudes > 0).nonzero().flatten().tolist():
        with_it = (g for g in groups if not traits.proportional or _is_one(directions[:, g[0]] @ directions[:, plane]))
        if (group := next(with_it, None)) is None:
            groups.append(group := [])
        group.append(plane)
    # By group, the axis that its blocks must serve.
    served = [int(directions[:, group[0]].abs().argmax()) if traits.serves_one_axis else None for group in groups]
    oblique = [
        group for group, axis in zip(groups, served) if axis is not None and not _is_one(directions[axis, group[0]])
    ]
    if oblique:
        raise ConversionError(
            f"{refusal}: each of its blocks rotates with one axis alone, and {sum(map(len, oblique))} planes of a head "
            "rotate with several."
        )
    for axis, planes in zip(served, groups):
        accepting = [block for block in free if axis is None or block % axes == axis]
        needed = -(-len(planes) // room)
        if len(accepting) < needed:
            ratio = "one ratio of the axes" if traits.proportional else "the axes"
            shared = ratio if axis is None else f"axis {axis}"
            raise ConversionError(
                f"{refusal} with block_size={target.block_size}: {len(planes)} planes of a head rotate with {shared} "
                f"and need {needed} of the {blocks} blocks alone; {len(accepting)} are left."
            )
        for index, plane in enumerate(planes):
            places[plane] = accepting[index // room] * room + index % room
        free = [block for block in free if block not in accepting[:needed]]
    return places


def _is_one(cosine: torch.Tensor) -> bool:
    """Whether planes are parallel; they may rotate in opposite ways."""
    # The cosine of a small angle differs from 1 by about its square.
    return 1 - cosine.abs().item() <= ROUNDING**2


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
        if (content := encoder.rotary_encoding.content) is not None:
            rows = content.weight.new_tensor(ratios).repeat(content.heads).unsqueeze(-1)  # (heads · A, 1)
            changed["rotary_encoding.content.weight"] = content.weight.detach() / rows
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
