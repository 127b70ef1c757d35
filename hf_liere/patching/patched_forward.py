"""
The forward pass of a patched vision tower.

- Attention modules keep their class and weights. A registered attention function rotates query and key, then calls the
  implementation that the model was configured with. A view of the configuration, which only the attention modules
  see, selects it, so masks, `set_attn_implementation` and `output_attentions` work as before.
- The rotations of a forward pass belong to a `Pass`, never to a module.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..encoding.placement import draw_displacements
from ..encoding.positions import TokenPositions
from ..encoding.rotary_fields import rotated_prefix
from ..fast.dispatch import product_dtype
from ..probing.module_inspection import View, takes
from ..transformer.attention_functions import refuse_ignored_poses
from .tower_patch import Pass
from .vision_towers import position_table, trained_size


# Checkpoints of earlier releases, whose code has another such function, can be loaded beside the package.
ROTARY_ATTENTION = "rotary:hf_liere"


@dataclass(eq=False)
class ForwardPass(Pass):
    """
    One forward pass of one tower.

    Attributes:
        grid: Patches per axis, once the patches are embedded.
        rotations: One rotation per rotated layer, once the embeddings are complete.
        states: Where content moves tokens, those of the current layer, of which its partial in `rotations` makes one.
        rotated: Indices of the layers that have applied theirs.
    """

    grid: tuple[int, ...] = ()
    rotations: Sequence[Any] = ()
    states: torch.Tensor | None = None
    rotated: list[int] = field(default_factory=list)


def rotary_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    R(p) q and R(p) k (LieRE §4, ComRoPE eq. 3) of (B, H, N, D) states, then the attention that the model is configured
    with. Raises `RuntimeError` if the patched model is not being run, or its tokens are not those that were embedded.
    """
    config, current = module.config, ForwardPass.current()
    if current is None or not current.rotations:
        raise RuntimeError(
            "A rotated attention module ran outside the forward pass of its vision tower, so the positions of its "
            "tokens are unknown. Call the vision tower (or a model around it), or unpatch the model."
        )
    rotation = current.rotations[config.layer]
    if current.states is not None:
        rotation = rotation(current.states)
    rotation = rotation.to(query.device)  # matrices for (1 or B, 1 or H, N)
    if rotation.num_tokens() != query.shape[2]:
        raise RuntimeError(
            f"Attention sees {query.shape[2]} tokens, but {rotation.num_tokens()} were embedded: models that merge or "
            "window tokens cannot be patched."
        )
    current.rotated.append(config.layer)
    # The projections are not in the eigenbasis, because the weights of the model are never changed.
    rotated = rotation.rotate(rotation.change_basis(query), rotation.change_basis(key))  # 2 × (B, H, N, D)
    query, key = _match_strides(rotated[0], query), _match_strides(rotated[1], key)
    implementation = config.base._attn_implementation
    refuse_ignored_poses(implementation, kwargs.get("poses"))
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, config.eager)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        # These implementations read their name from the configuration of the module.
        module = View(module, config=config.base)
    return function(module, query, key, value, attention_mask, **kwargs)  # (B, N, H, D), weights or None


def _match_strides(states: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) with the strides of `original`: the rounding of matrix products depends on the memory layout."""
    if states.stride() == original.stride():
        return states
    return states.transpose(1, 2).contiguous().transpose(1, 2)  # (B, H, N, D), tokens before heads in memory


AttentionInterface.register(ROTARY_ATTENTION, rotary_attention_forward)


class CheckpointingInPass:
    """Recomputes a checkpointed layer with the rotations of its forward pass, in the thread that runs backward."""

    def __init__(self, function):
        self.function = function

    def __call__(self, layer, *args, **kwargs):
        current = ForwardPass.current()
        if current is None:
            return self.function(layer, *args, **kwargs)
        shared = [each for each in current.rotations if not isinstance(each, partial)]

        def layer_in_pass(*inputs, **named_inputs):
            tensors = iter(inputs[len(args) :])
            rotations = [type(each)(*(next(tensors) for _ in each)) for each in shared] or current.rotations
            again = replace(current, rotations=rotations)
            return again.resume(layer, *inputs[: len(args)], **named_inputs)

        # Reentrant checkpointing differentiates with respect to inputs only, so tensors of rotations are inputs.
        tensors = (tensor for rotation in shared for tensor in rotation)
        return self.function(layer_in_pass, *args, *tensors, **kwargs)


def run_pass(module: nn.Module, forward: Callable, *args, **kwargs):
    """A pass of a tower. Raises `RuntimeError` if an attention module did not rotate."""
    if module.training:
        for inner in module.modules():
            checkpointing = getattr(inner, "_gradient_checkpointing_func", None)
            if checkpointing is not None and not isinstance(checkpointing, CheckpointingInPass):
                inner._gradient_checkpointing_func = CheckpointingInPass(checkpointing)
    current = ForwardPass(module)
    current.begin()
    output = forward(*args, **kwargs)
    missing = set(range(len(module.rotary_patch.attention_names))) - set(current.rotated)
    if missing:
        names = [module.rotary_patch.attention_names[layer] for layer in sorted(missing)]
        raise RuntimeError(
            f"{names} ran without rotations: their attention did not go through transformers' attention interface. "
            "Was the configuration or the forward of these modules replaced after patching?"
        )
    return output


def accept_any_size(embeddings: nn.Module, args, kwargs):
    """
    Make the embeddings interpolate their position table, unless the input has the trained size and the configuration
    keeps the table as it is.
    """
    current = ForwardPass.current()
    if current is None or not takes(embeddings, "interpolate_pos_encoding"):
        return None
    pixels = args[0] if args else kwargs["pixel_values"]  # (B, C, height, width) or (B, T, C, height, width)
    config = current.module.config
    trained = trained_size(config)
    is_trained_size = tuple(pixels.shape[-2:]) == trained and (pixels.ndim < 5 or pixels.shape[1] == config.num_frames)
    # torch.jit.trace would keep the answer for inputs of every shape.
    is_trained_size &= not torch.jit.is_tracing()
    if is_trained_size and current.module.rotary_patch.config.keep_absolute == "interpolate":
        return None
    return args, {**kwargs, "interpolate_pos_encoding": True}


def record_grid(patch_embedding: nn.Module, args, output: torch.Tensor) -> torch.Tensor | None:
    """
    Record the grid of the embedded patches, (B, hidden_size, *grid), and add the entries of a fixed table, which the
    model cannot resize itself.
    """
    current = ForwardPass.current()
    if current is None:
        return None
    current.grid = grid = tuple(output.shape[2:])
    rotary_patch = current.module.rotary_patch
    if rotary_patch.fixed_table is None:
        return None
    table = _read_entries(rotary_patch, rotary_patch.fixed_table.squeeze(0).to(output), grid, None)  # (N, hidden_size)
    return output + table.T.unflatten(-1, grid).unsqueeze(0)  # (B, hidden_size, *grid)


def interpolate_table(embeddings: nn.Module, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(1, prefix + N, hidden_size) table for the current grid; replaces `interpolate_pos_encoding` of a module."""
    interpolate = partial(type(embeddings).interpolate_pos_encoding, embeddings, tokens, height, width)
    current = ForwardPass.current()
    if current is None:
        return interpolate()
    rotary_patch, grid = current.module.rotary_patch, current.grid
    table, num_trained = _load_table(embeddings, tokens.device), math.prod(rotary_patch.train_grid)
    prefix, trained = table.split([len(table) - num_trained, num_trained])  # 2 × (entries, hidden_size)
    patches = _read_entries(
        rotary_patch, trained, grid, lambda: interpolate()[0, -math.prod(grid) :]
    )  # (N, hidden_size)
    return torch.cat([prefix, patches]).unsqueeze(0)


def _load_table(embeddings: nn.Module, device: torch.device) -> torch.Tensor:
    """[`position_table`], by calling the embedding module if there is one, because its hooks load offloaded weights."""
    table = position_table(embeddings)
    for module in embeddings.children():
        if isinstance(module, nn.Embedding) and module.weight is table:
            return module(torch.arange(module.num_embeddings, device=device))  # (entries, hidden_size)
    return table


def resize_tables(
    embeddings: nn.Module, table: torch.Tensor, spatial_shapes: torch.Tensor, max_length: int
) -> torch.Tensor:
    """(B, max_length, hidden_size) tables, one grid per sample; replaces `resize_positional_embeddings` of a module."""
    tables = type(embeddings).resize_positional_embeddings(table, spatial_shapes, max_length)
    current = ForwardPass.current()
    if current is None:
        return tables
    rotary_patch, trained = current.module.rotary_patch, table.flatten(0, 1)  # (entries, hidden_size)
    samples = []
    for sample, grid in zip(tables, map(tuple, spatial_shapes.tolist())):
        length = math.prod(grid)
        patches = _read_entries(rotary_patch, trained, grid, lambda sample=sample, length=length: sample[:length])
        # As transformers does, repeat the first patch as padding: (max_length, hidden_size).
        samples.append(torch.cat([patches, patches[:1].expand(max_length - length, -1)]))
    return torch.stack(samples)


def _read_entries(
    rotary_patch, trained: torch.Tensor, grid: tuple[int, ...], interpolate: Callable[..., torch.Tensor] | None
) -> torch.Tensor:
    """
    (N, hidden_size) entries for the patches of a grid, from the trained table, as `keep_absolute` defines them. The
    model's own interpolation is not used on three axes, where that of transformers takes square frames only.
    """
    keep = rotary_patch.config.keep_absolute
    if keep == "drop":
        return trained.new_zeros(math.prod(grid), trained.shape[-1])
    # Models with one grid per sample also interpolate to the trained grid.
    if not torch.jit.is_tracing() and grid == rotary_patch.train_grid and not rotary_patch.is_flexible:
        patches = trained
    elif keep == "train_size":
        patches = trained.unflatten(0, rotary_patch.train_grid)  # (*train_grid, hidden_size)
        for axis, (size, limit) in enumerate(zip(grid, rotary_patch.train_grid)):
            nearest = torch.arange(size, device=trained.device).clamp(max=limit - 1)  # (size,)
            patches = patches.index_select(axis, nearest)
        patches = patches.flatten(0, -2)
    elif len(grid) == 3:
        volume = trained.T.unflatten(-1, rotary_patch.train_grid).unsqueeze(0).float()  # (1, hidden_size, *train_grid)
        resized = nn.functional.interpolate(volume, size=grid, mode="trilinear", align_corners=False)
        patches = resized[0].flatten(1).T.to(trained)  # (N, hidden_size)
    else:
        assert interpolate is not None, "a table that the model cannot resize is for clips"
        patches = interpolate()
    return patches * rotary_patch.config.absolute_weight if keep == "fade" else patches


def compute_rotations(embeddings: nn.Module, args, kwargs, output) -> None:
    """Compute the rotations of all layers once per forward pass, outside of checkpointed layers."""
    current = ForwardPass.current()
    if current is None:
        return
    tower = current.module
    tokens = output[0] if isinstance(output, tuple) else output  # (B, prefix + patches, hidden_size)
    device = [*tower.rotary_encoding.parameters(), tokens][0].device
    # Offloaded generators are moved to the device of the tokens.
    device = tokens.device if device.type == "meta" else device
    rotary_patch, grid, patches = tower.rotary_patch, current.grid, None
    if rotary_patch.is_flexible:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        patches = place_samples(tower, shapes, tokens.shape[1], device)  # (B, length, 2)
    else:
        visible = _find_visible(math.prod(grid), embeddings, args, kwargs, output)
        if visible is not None:
            patches = place_grid(tower, grid, device).coordinates[visible.to(device)]  # (B, visible, A)
    num_patches = math.prod(grid) if patches is None else patches.shape[-2]
    prefix_length = tokens.shape[1] - num_patches
    if prefix_length < 0:
        raise RuntimeError(
            f"Got {tokens.shape[1]} tokens from {num_patches} patches and cannot tell which patches were kept."
        )
    if patches is None:
        positions = place_grid(tower, grid, device, prefix_length)
    else:
        positions = TokenPositions.from_coordinates(patches, prefix_length, prefix_coordinate(rotary_patch))
    if rotary_patch.config.content_positions is not None:
        moves = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0) >= prefix_length  # (1, tokens)
        rotate = partial(tower.rotary_encoding.rotate_moved, positions, moves, product_dtype(tokens))
        current.rotations = [partial(rotate, layer) for layer in range(tower.rotary_encoding.num_layers)]
        return
    # One rotation per layer, with matrices for (1 or B, 1 or H, prefix + patches).
    current.rotations = list(tower.rotary_encoding(positions, product_dtype(tokens)))


def record_states(attention: nn.Module, options: dict) -> None:
    """Records the states that an attention module reads, its first argument."""
    if (current := ForwardPass.current()) is not None:
        current.states = next(iter(options.values()))


def _find_visible(num_patches: int, embeddings, args, kwargs, output) -> torch.Tensor | None:
    """(B, visible) indices of the patches that the embeddings do not drop, or `None` if they drop none."""
    if isinstance(output, tuple) and hasattr(embeddings, "random_masking"):
        num_visible = int(num_patches * (1 - embeddings.config.mask_ratio))
        return output[2].argsort(dim=1)[:, :num_visible]
    tokens = output[0] if isinstance(output, tuple) else output  # (B, prefix + visible, hidden_size)
    arguments = inspect.signature(type(embeddings).forward).bind(embeddings, *args, **kwargs).arguments
    masked = arguments.get("bool_masked_pos")  # (B, N)
    if masked is None or tokens.shape[1] >= num_patches:
        return None
    return (~masked).nonzero()[:, 1].unflatten(0, (len(masked), -1))  # (B, visible)


def place_samples(tower: nn.Module, shapes: torch.Tensor, length: int, device) -> torch.Tensor:
    """(B, length, 2) coordinates for one grid (height, width) per sample; padding tokens are at coordinate 0."""
    samples = []
    for grid in map(tuple, shapes.tolist()):
        positions = place_grid(tower, grid, device).coordinates  # (rows · columns, 2)
        samples.append(nn.functional.pad(positions, (0, 0, 0, length - len(positions))))
    return torch.stack(samples)


def prefix_coordinate(rotary_patch) -> float:
    """The coordinate of class and register tokens on every axis; at zero they are not rotated."""
    return rotated_prefix(rotary_patch) if rotary_patch.config.rotate_prefix else 0.0


def place_grid(
    tower: nn.Module, grid: tuple[int, ...], device: torch.device, num_prefix_tokens: int = 0
) -> TokenPositions:
    """Positions of prefix tokens and of all patches of a grid, augmented during training if so configured."""
    rotary_patch, offsets = tower.rotary_patch, None
    if tower.training:
        _, offsets = draw_displacements(rotary_patch.config, grid, None, device)  # (N, A) or None
    prefix, trained = (num_prefix_tokens, prefix_coordinate(rotary_patch)), rotary_patch.train_grid
    return TokenPositions.from_grid(grid, trained, rotary_patch.coordinates, *prefix, offsets, device)
