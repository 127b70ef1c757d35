"""
What a patched vision tower does in its forward pass. Unusual in this file:

- attention modules keep their class and weights: a registered attention function rotates query and key and then calls
  the implementation that the model was configured with. It is selected by a view of the configuration that only the
  attention modules see, so masks, `set_attn_implementation` and `output_attentions` of the model work as before;
- the rotations of a forward pass live on a stack that belongs to the thread and the pass, never on a module.
"""

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .lie_algebra import working_dtype
from .positions import grid_positions, perturbation, with_prefix
from .rotation import EigenRotation, Rotation, fold_states, rotate_query_key
from .vision_towers import position_table, takes


# Code that came with a checkpoint and the package may be loaded side by side, each with forward passes of its own.
ROTARY_ATTENTION = f"rotary:{__name__}"


class RotaryAttentionConfig:
    """What a rotated attention module sees as its configuration: all of `base`, but our attention implementation."""

    _attn_implementation = ROTARY_ATTENTION

    def __init__(self, base, layer: int, eager):
        self.base = base
        self.layer = layer
        self.eager = eager

    def __getattr__(self, name: str):
        # Copying and unpickling ask an object without attributes.
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)


class _Unrotated:
    """An attention module with its own configuration, for implementations that read their name there."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.config = module.config.base

    def __getattr__(self, name: str):
        return getattr(self._module, name)


class ForwardPass:
    """One forward pass of one tower: its grid, once patches are embedded, then its rotations."""

    def __init__(self, tower: nn.Module):
        self.tower = tower
        self.grid: tuple[int, ...] | None = None
        self.rotations: Sequence[Rotation] | None = None
        self.rotated: list[int] = []


_thread = threading.local()


def _passes() -> tuple[ForwardPass, ...]:
    return getattr(_thread, "passes", ())


def rotary_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    R(p) q and R(p) k (LieRE §4, ComRoPE eq. 3), then the attention that the model is configured with.

    Args:
        query, key, value: (B, H, N, D).

    Raises:
        RuntimeError: if the patched model is not being run, or its tokens are not those that were embedded.
    """
    config, passes = module.config, _passes()
    if not passes or passes[-1].rotations is None:
        raise RuntimeError(
            "A rotated attention module ran outside the forward pass of its vision tower, so the positions of its "
            "tokens are unknown. Call the vision tower (or a model around it), or unpatch the model."
        )
    rotation = tree_map(lambda tensor: tensor.to(query.device), passes[-1].rotations[config.layer])
    tokens = (rotation.planes if isinstance(rotation, EigenRotation) else rotation).shape[2]
    if tokens != query.shape[2]:
        raise RuntimeError(
            f"Attention sees {query.shape[2]} tokens, but {tokens} were embedded: models that merge or window tokens "
            "cannot be patched."
        )
    passes[-1].rotated.append(config.layer)
    if isinstance(rotation, EigenRotation):
        # The weights are not ours to turn.
        rotated = rotate_query_key(*(fold_states(part, rotation.basis) for part in (query, key)), rotation)
    else:
        rotated = rotate_query_key(query, key, rotation)
    query, key = _as_laid_out(rotated[0], query), _as_laid_out(rotated[1], key)
    implementation = config.base._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, config.eager)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        module = _Unrotated(module)
    return function(module, query, key, value, attention_mask, **kwargs)


def _as_laid_out(states: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """The same numbers in the original's memory order: matrix products round differently in another one."""
    if states.stride() == original.stride():
        return states
    return states.transpose(1, 2).contiguous().transpose(1, 2)


AttentionInterface.register(ROTARY_ATTENTION, rotary_attention_forward)


class CheckpointingInPass:
    """Recomputes a checkpointed layer in the forward pass that it belongs to, whichever thread runs the backward."""

    def __init__(self, function):
        self.function = function

    def __call__(self, layer, *args, **kwargs):
        forward_pass = _passes()[-1]

        rotations, structure = tree_flatten(forward_pass.rotations)

        def layer_in_pass(*inputs, **named_inputs):
            outer = _passes()
            again = ForwardPass(forward_pass.tower)
            again.rotations, again.rotated = tree_unflatten(inputs[len(args) :], structure), forward_pass.rotated
            _thread.passes = (*outer, again)
            try:
                return layer(*inputs[: len(args)], **named_inputs)
            finally:
                _thread.passes = outer

        # As inputs, because reentrant checkpointing differentiates with respect to nothing else.
        return self.function(layer_in_pass, *args, *rotations, **kwargs)


def begin_pass(tower: nn.Module, args) -> None:
    if tower.training and not torch.compiler.is_compiling():
        for module in tower.modules():
            checkpointing = getattr(module, "_gradient_checkpointing_func", None)
            if checkpointing is not None and not isinstance(checkpointing, CheckpointingInPass):
                module._gradient_checkpointing_func = CheckpointingInPass(checkpointing)
    _thread.passes = (*_passes(), ForwardPass(tower))


def end_pass(tower: nn.Module, args, output) -> None:
    passes = _passes()
    if not passes or passes[-1].tower is not tower:
        return
    _thread.passes = passes[:-1]
    if output is None or torch.compiler.is_compiling():
        return
    missing = set(range(len(tower.rotary_patch.attention_names))) - set(passes[-1].rotated)
    if missing:
        names = [tower.rotary_patch.attention_names[layer] for layer in sorted(missing)]
        raise RuntimeError(
            f"{names} ran without rotations: their attention did not go through transformers' attention interface. "
            "Was the configuration or the forward of these modules replaced after patching?"
        )


def accept_any_size(embeddings: nn.Module, args, kwargs):
    """Make the embeddings read their table by the method for other sizes, where the pass or the patch asks for it."""
    passes = _passes()
    if not passes or not takes(embeddings, "interpolate_pos_encoding"):
        return None
    pixels = args[0] if args else kwargs["pixel_values"]
    config = passes[-1].tower.config
    trained = (config.image_size,) * 2 if isinstance(config.image_size, int) else tuple(config.image_size)
    is_trained_size = tuple(pixels.shape[-2:]) == trained and (pixels.ndim < 5 or pixels.shape[1] == config.num_frames)
    if is_trained_size and passes[-1].tower.rotary_patch.config.keep_absolute == "interpolate":
        return None
    return args, {**kwargs, "interpolate_pos_encoding": True}


def see_grid(patch_embedding: nn.Module, args, output: torch.Tensor) -> torch.Tensor | None:
    """Read the grid off the embedded patches (B, hidden_size, *grid), and add a table that cannot be read for it."""
    passes = _passes()
    if not passes:
        return None
    passes[-1].grid = grid = tuple(output.shape[2:])
    patch = passes[-1].tower.rotary_patch
    if patch.fixed_table is None:
        return None
    table = _patch_table(patch, patch.fixed_table.squeeze(0).to(output), grid, None)
    return output + table.T.unflatten(-1, grid).unsqueeze(0)


def interpolated_table(embeddings: nn.Module, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(1, prefix + N, hidden_size) for the grid of the pass, in the place of a module's `interpolate_pos_encoding`."""
    own = partial(type(embeddings).interpolate_pos_encoding, embeddings, tokens, height, width)
    passes = _passes()
    if not passes:
        return own()
    patch, grid = passes[-1].tower.rotary_patch, passes[-1].grid
    table, num_trained = _called_table(embeddings, tokens.device), math.prod(patch.train_grid)
    prefix, trained = table.split([len(table) - num_trained, num_trained])
    patches = _patch_table(patch, trained, grid, lambda: own()[0, -math.prod(grid) :])
    return torch.cat([prefix, patches]).unsqueeze(0)


def _called_table(embeddings: nn.Module, device: torch.device) -> torch.Tensor:
    """[`position_table`], through the module that holds it if there is one: it brings back what is offloaded."""
    table = position_table(embeddings)
    for module in embeddings.children():
        if isinstance(module, nn.Embedding) and module.weight is table:
            return module(torch.arange(module.num_embeddings, device=device))
    return table


def resized_tables(
    embeddings: nn.Module, table: torch.Tensor, spatial_shapes: torch.Tensor, max_length: int
) -> torch.Tensor:
    """(B, max_length, hidden_size), one grid per sample, in the place of `resize_positional_embeddings` of a module."""
    own = type(embeddings).resize_positional_embeddings(table, spatial_shapes, max_length)
    passes = _passes()
    if not passes:
        return own
    patch, trained = passes[-1].tower.rotary_patch, table.flatten(0, 1)
    samples = []
    for sample, grid in zip(own, map(tuple, spatial_shapes.tolist())):
        length = math.prod(grid)
        patches = _patch_table(patch, trained, grid, lambda sample=sample, length=length: sample[:length])
        # As in transformers, padding repeats the first patch.
        samples.append(torch.cat([patches, patches[:1].expand(max_length - length, -1)]))
    return torch.stack(samples)


def _patch_table(
    patch, trained: torch.Tensor, grid: tuple[int, ...], interpolate: Callable[[], torch.Tensor] | None
) -> torch.Tensor:
    """
    (N, hidden_size): what `keep_absolute` makes of the trained table for a grid.

    Args:
        interpolate: The model's own way to read its table between entries; on three axes it is trilinear, because
            transformers' own takes square frames only.
    """
    keep = patch.config.keep_absolute
    if keep == "drop":
        return trained.new_zeros(math.prod(grid), trained.shape[-1])
    # A flexible model interpolates to its trained grid too.
    if grid == patch.train_grid and not patch.is_flexible:
        patches = trained
    elif keep == "train_size":
        patches = trained.unflatten(0, patch.train_grid)
        for axis, (size, limit) in enumerate(zip(grid, patch.train_grid)):
            nearest = torch.arange(size, device=trained.device).clamp(max=limit - 1)
            patches = patches.index_select(axis, nearest)
        patches = patches.flatten(0, -2)
    elif len(grid) == 3:
        volume = trained.T.unflatten(-1, patch.train_grid).unsqueeze(0).float()
        resized = nn.functional.interpolate(volume, size=grid, mode="trilinear", align_corners=False)
        patches = resized[0].flatten(1).T.to(trained)
    else:
        patches = interpolate()
    return patches * patch.config.absolute_weight if keep == "fade" else patches


def rotations_of_tokens(embeddings: nn.Module, args, kwargs, output) -> None:
    """Compute the rotations of all layers, outside any checkpointed layer."""
    passes = _passes()
    if not passes:
        return
    tower = passes[-1].tower
    tokens = output[0] if isinstance(output, tuple) else output
    device = [*tower.rotary_encoding.parameters(), tokens][0].device
    # Offloaded generators come to the tokens.
    device = tokens.device if device.type == "meta" else device
    if tower.rotary_patch.is_flexible:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        positions = _flexible_positions(tower, shapes, tokens.shape[1], device)
    else:
        positions = _kept_positions(passes[-1], embeddings, args, kwargs, output, device)
    prefix_length = tokens.shape[1] - positions.shape[-2]
    if prefix_length < 0:
        raise RuntimeError(f"{tokens.shape[1]} tokens were made of {positions.shape[-2]} patches: which is unknown.")
    centre = 0.5 if tower.rotary_patch.config.rotate_prefix else 0.0
    grid = passes[-1].grid
    perturbed = tower.training and tower.rotary_patch.config.position_perturbation
    if perturbed or grid is None or positions.shape[:-1] != (math.prod(grid),):
        grid = None
    positions = with_prefix(positions, prefix_length, centre)
    passes[-1].rotations = list(tower.rotary_encoding(positions, grid, explicit=False))


def _kept_positions(forward_pass: ForwardPass, embeddings, args, kwargs, output, device) -> torch.Tensor:
    """(N, A) coordinates of the patches, or (B, kept, A) where the embeddings pass only some of them on."""
    positions = _positions(forward_pass.tower, forward_pass.grid, device)
    num_patches = math.prod(forward_pass.grid)
    if isinstance(output, tuple) and hasattr(embeddings, "random_masking"):
        restore = output[2].to(device)
        kept = int(num_patches * (1 - embeddings.config.mask_ratio))
        return positions[restore.argsort(dim=1)[:, :kept]]
    tokens = output[0] if isinstance(output, tuple) else output
    masked = (
        inspect.signature(type(embeddings).forward).bind(embeddings, *args, **kwargs).arguments.get("bool_masked_pos")
    )
    if masked is not None and tokens.shape[1] < num_patches:
        return positions.expand(len(masked), *positions.shape)[~masked.to(device)].unflatten(0, (len(masked), -1))
    return positions


def _flexible_positions(tower: nn.Module, shapes: torch.Tensor, length: int, device) -> torch.Tensor:
    """(B, length, 2) coordinates for one (height, width) per sample; padding gets coordinate 0."""
    samples = []
    for grid in map(tuple, shapes.tolist()):
        positions = _positions(tower, grid, device)
        samples.append(nn.functional.pad(positions, (0, 0, 0, length - len(positions))))
    return torch.stack(samples)


def _positions(tower: nn.Module, grid: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(N, A) coordinates of all patches of a grid, perturbed in training where that is asked for."""
    patch, offsets, dtype = tower.rotary_patch, None, working_dtype(device)
    if tower.training and patch.config.position_perturbation:
        offsets = perturbation(grid, patch.config.position_perturbation, device, dtype)
    return grid_positions(grid, patch.train_grid, patch.coordinates, offsets, device, dtype)
