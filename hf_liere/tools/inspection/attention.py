"""
Attention maps, distances and relativity of any vision transformer that `find_towers` finds, and the change of its
output when all patch coordinates move by a common offset.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from ...encoding.positions import needs_spacing
from ...patching.vision_towers import Tower, find_towers
from ...probing.module_inspection import replaced, takes
from ...transformer.configuration_liere import pair
from .encodings import rotary_encoding, step_sizes


# Common offsets at which outputs are compared, in patches.
OUTPUT_OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0)


class AttentionMaps(NamedTuple):
    """
    Attributes:
        maps: (layers, images, *grid) float32, attention of one query to every patch, mean over heads. The sum is 1
            minus the attention to class and register tokens.
        grid: Patches per axis: (rows, columns), or (frames, rows, columns) for video.
        query: Whose attention it is, `"class token"` or `"mean of patches"`.
        per_head: (layers, images, heads, *grid) float32 if requested.
    """

    maps: torch.Tensor
    grid: tuple[int, ...]
    query: str
    per_head: torch.Tensor | None = None


class OutputChange(NamedTuple):
    """
    Attributes:
        offsets: (offsets,) in patches.
        change: (offsets, images) ‖f(x; p + c) − f(x; p)‖ / ‖f(x; p)‖.
    """

    offsets: torch.Tensor
    change: torch.Tensor


def vision_tower(model: nn.Module) -> Tower:
    """The vision tower of a model, patched or not. Raises `ValueError` if there is none, or several."""
    towers = find_towers(model)
    if len(towers) > 1:
        names = [tower.name for tower in towers]
        raise ValueError(f"{type(model).__name__} has the vision towers {names}; accepted are models with one.")
    return towers[0]


def attention_maps(
    model: nn.Module, pixel_values: torch.Tensor, batch_size: int = 8, *, per_head: bool = False, progress: bool = False
) -> AttentionMaps:
    """
    Attention of one query to all patches in every layer (LieRE App. G). The query is the class token; if the model
    pools patches or has no class token, it is the mean over all patches.

    Only the vision tower runs, temporarily in evaluation mode and with eager attention. This is not thread-safe.

    Args:
        model: A model of this package or of transformers, folded, patched or neither.
        pixel_values: (B, C, H, W) images or (B, T, C, H, W) clips, as for `forward`, of any size that it accepts.
        batch_size: Number of images in a batch.
        per_head: Whether to also return each head.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: if the model has no vision tower, its tokens do not form a grid of patches, or it refuses the input.
    """
    tower = vision_tower(model)
    takes_mean = getattr(tower.module.config, "pooling", "cls") in ("mean", "mean_all")
    queries = set()

    def pooled_query(weights: torch.Tensor, prefix: int, grid: tuple[int, ...]) -> torch.Tensor:
        by_mean = takes_mean or prefix == 0
        queries.add("mean of patches" if by_mean else "class token")
        row = weights[:, :, prefix:].mean(dim=2) if by_mean else weights[:, :, 0]
        return row[..., prefix:].unflatten(-1, grid)

    heads, grid = observe_attention(tower, pixel_values, pooled_query, batch_size, progress)
    return AttentionMaps(heads.mean(dim=2), grid, queries.pop(), heads if per_head else None)


def attention_distances(
    model: nn.Module, pixel_values: torch.Tensor, batch_size: int = 8, *, progress: bool = False
) -> torch.Tensor:
    """
    Attention distance d = mean_q Σ_k w_qk ‖k − q‖ over patches q and k, where w are the attention weights among
    patches, normalised to Σ_k w_qk = 1 (ViT, Dosovitskiy et al. 2021, Fig. 7 and Fig. 11).

    Args:
        model, pixel_values, batch_size, progress: As in [`attention_maps`].

    Returns:
        (layers, images, heads) float32, in patches; for video, in tubelets along each axis.
    """

    def distance(weights: torch.Tensor, prefix: int, grid: tuple[int, ...]) -> torch.Tensor:
        weights = weights[:, :, prefix:, prefix:]
        return ((weights * patch_distances(grid).to(weights.device)).sum(-1) / weights.sum(-1)).mean(-1)

    return observe_attention(vision_tower(model), pixel_values, distance, batch_size, progress)[0]


def patch_distances(grid: tuple[int, ...]) -> torch.Tensor:
    """(N, N) distances ‖k − q‖ between all patches of a grid, in patches."""
    places = torch.cartesian_prod(*[torch.arange(size, dtype=torch.float32) for size in grid])
    return torch.cdist(places, places)


def attention_relativity(model: nn.Module) -> torch.Tensor:
    """
    How far the model's attention is from a function of position differences, whatever encodes the positions. On an
    input of the trained size with equal patches, the first layer's logits s_ij − s_ii are equal for all patches i and j
    with the same j − i if attention depends only on that difference (the RoPE equation, ComRoPE eq. 2).

    Returns:
        (heads,) the largest spread of s_ij − s_ii over pairs with the same difference, in nats (weights of such pairs
        differ by a factor of up to e to the spread). Relative attention gives 0, up to float32 rounding.

    Raises:
        ValueError: as [`attention_maps`].
    """
    tower = vision_tower(model)
    if next(tower.module.parameters()).dtype != torch.float32:
        (tower,) = find_towers(copy.deepcopy(tower.module).float())

    def spread(weights: torch.Tensor, prefix: int, grid: tuple[int, ...]) -> torch.Tensor:
        weights = weights[0, :, prefix:, prefix:].cpu()
        logits = weights.log()
        logits = (logits - logits.diagonal(dim1=1, dim2=2).unsqueeze(-1)).flatten(1)
        places, extents = torch.cartesian_prod(*map(torch.arange, grid)), [2 * size - 1 for size in grid]
        differences = places - places.unsqueeze(1) + torch.tensor(grid) - 1  # (N, N, A), from 0
        index = np.ravel_multi_index(differences.flatten(0, 1).T.numpy(), extents)
        # Smaller weights have inaccurate logarithms.
        ends = torch.stack([logits, -logits]).where(weights.flatten(1) > 1e-30, -math.inf)  # (2, heads, N²)
        index = torch.from_numpy(index).expand_as(ends)
        highest = ends.new_full((*ends.shape[:2], math.prod(extents)), -math.inf).scatter_reduce(2, index, ends, "amax")
        return highest.sum(0).clamp(min=0).amax(1, keepdim=True).T

    return observe_attention(tower, equal_patches(tower), spread)[0][0, 0]


def equal_patches(tower: Tower) -> torch.Tensor:
    """A random image or clip of the trained size with equal patches, from a fixed seed."""
    extent, grid = tower.patch_embedding.kernel_size, tower.train_grid
    patch = torch.randn(tower.patch_embedding.in_channels, *extent, generator=torch.Generator().manual_seed(0))
    pixels = patch.repeat(1, *grid[-len(extent) :])
    return (pixels.transpose(0, 1) if len(extent) == 3 else pixels).unsqueeze(0)


def black_input(tower: Tower) -> torch.Tensor:
    """One black image or clip of the trained size."""
    return torch.zeros_like(equal_patches(tower))


@torch.no_grad()
def observe_attention(
    tower: Tower,
    pixel_values: torch.Tensor,
    reduce: Callable[[torch.Tensor, int, tuple[int, ...]], torch.Tensor],
    batch_size: int = 8,
    progress: bool = False,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """
    Apply `reduce` to the attention weights of every layer, one at a time: it maps (B, H, N, N) float32 weights, the
    number of tokens before the patches, which are the last, and the grid to (B, …). Returns (layers, images, …) and the
    grid; raises `ValueError` as [`attention_maps`].
    """
    if tower.is_flexible:
        raise ValueError(
            f"{type(tower.module).__name__} takes images with different grids; accepted are models with a patch "
            "convolution."
        )
    if not len(pixel_values) or batch_size < 1:
        raise ValueError(f"{len(pixel_values)} images in batches of {batch_size}: accepted are 1 or more of each.")
    grid: tuple[int, ...] = ()
    record: dict[int, torch.Tensor] = {}

    def see_grid(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal grid
        grid = tuple(output.shape[2:])

    def see_weights(layer: int, module: nn.Module, inputs: tuple, output: Any) -> None:
        weights = output[1] if isinstance(output, tuple) else None
        patches = math.prod(grid)
        if weights is None or weights.ndim != 4 or weights.shape[-1] < patches:
            shape = None if weights is None else tuple(weights.shape)
            raise ValueError(
                f"{type(module).__name__} returned attention weights of shape {shape} for {patches} patches; "
                "accepted is (batch, heads, tokens, tokens) with every patch among the tokens."
            )
        record[layer] = reduce(weights.float(), weights.shape[-1] - patches, grid).cpu()

    batches = []
    with ExitStack() as stack:
        stack.enter_context(tower.patch_embedding.register_forward_hook(see_grid))
        for layer, (_, attention) in enumerate(tower.attentions):
            stack.enter_context(attention.register_forward_hook(functools.partial(see_weights, layer)))
        stack.enter_context(evaluation_mode(tower.module))
        stack.enter_context(eager_attention(tower))
        for batch, options in input_batches(tower, pixel_values, batch_size, "attention", progress):
            tower.module(batch, **options)
            batches.append(torch.stack([record.pop(layer) for layer in range(len(tower.attentions))]))
    return torch.cat(batches, dim=1), grid


def input_batches(
    tower: Tower, pixel_values: torch.Tensor, batch_size: int, title: str | None = None, progress: bool = False
) -> Iterator[tuple[torch.Tensor, dict[str, bool | torch.Tensor]]]:
    """Batches of inputs for a tower's `forward`, with its other options."""
    parameter, options = next(tower.module.parameters()), size_options(tower, pixel_values)
    for batch in tqdm(pixel_values.split(batch_size), desc=title, disable=not progress):
        yield batch.to(parameter.device, parameter.dtype), options


def size_options(tower: Tower, pixel_values: torch.Tensor) -> dict[str, bool | torch.Tensor]:
    """
    Options that a vision tower's `forward` needs for inputs of this size, for example of unpatched transformers models.
    Inputs of models with `physical` coordinates get an extent of one unit.
    """
    if needs_spacing(tower.module.config):
        sizes = pixel_values.new_tensor(tower.module.pixels(pixel_values).shape[2:])
        return {"spacing": pixel_values.new_tensor(tower.module.config.physical_unit) / sizes}
    if not takes(tower.module, "interpolate_pos_encoding"):
        return {}
    trained = pair("image_size", tower.module.config.image_size)
    return {} if tuple(pixel_values.shape[-2:]) == trained else {"interpolate_pos_encoding": True}


@torch.no_grad()
def output_change(
    model: nn.Module,
    pixel_values: torch.Tensor,
    batch_size: int = 8,
    *,
    offsets: Sequence[float] = OUTPUT_OFFSETS,
    progress: bool = False,
) -> OutputChange:
    """
    The change of the output if all patch coordinates move by a common offset (ComRoPE §4.3.1, Fig. 5): ‖f(x; p + c) −
    f(x; p)‖ / ‖f(x; p)‖, where f is the pooled output of the vision tower.

    With a relative encoding, attention between patches does not change. Nor does the output, if class and register
    tokens move too (`rotate_prefix`) or if there are none. Other sources of positions, such as a table, do not move, so
    a change of 0 is a statement only about the rotations; see [`attention_relativity`] for the whole model.

    Args:
        offsets: The offsets c along every axis, in patches of the trained grid.

    Raises:
        ValueError: if the model has no rotations.
    """
    tower = vision_tower(model)
    encoding = rotary_encoding(tower.module)
    if encoding is None:
        raise ValueError(f"{type(model).__name__} has no rotations; accepted are models with rotations of hf_liere.")
    steps, offset = step_sizes(encoding), 0.0

    def move(module: nn.Module, inputs: tuple, options: dict) -> tuple[tuple, dict]:
        positions, *others = inputs
        moved = positions.coordinates.clone()  # (N, A) or (B, N, A)
        first = 0 if encoding.config.rotate_prefix else positions.num_prefix_tokens
        moved[..., first:, :] += offset * steps.to(moved)
        return (positions._replace(moved), *others), options

    pooled: dict[float, torch.Tensor] = {}
    with encoding.register_forward_pre_hook(move, with_kwargs=True):
        # The hook reads `offset`.
        for offset in tqdm(dict.fromkeys((0.0, *offsets)), desc="offsets", disable=not progress):
            outputs = []
            for batch, options in input_batches(tower, pixel_values, batch_size):
                output = tower.module(batch, **options)
                found = getattr(output, "pooler_output", None)
                outputs.append(output.last_hidden_state.flatten(1) if found is None else found)
            pooled[offset] = torch.cat(outputs).float().cpu()  # (images, features)
    reference = pooled[0.0]
    changes = [(pooled[offset] - reference).norm(dim=1) / reference.norm(dim=1) for offset in offsets]
    return OutputChange(torch.tensor(offsets), torch.stack(changes))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode; restore the mode of each at the end."""
    with replaced("training", False, *model.modules()):
        model.eval()
        yield


def eager_attention(tower: Tower) -> AbstractContextManager[None]:
    """Select eager attention, which returns its weights; restore the configured implementation at the end."""
    # A patched attention module's configuration is a view of another one.
    configs = (getattr(a.config, "base", a.config) for _, a in tower.attentions)
    return replaced("_attn_implementation_internal", "eager", tower.module.config, *configs)


def overlay(
    image: Any,
    attention: torch.Tensor | np.ndarray,
    *,
    opacity: float = 0.6,
    colormap: str = "viridis",
    limits: tuple[float, float] | None = None,
) -> np.ndarray:
    """
    Blend an attention map with its input. The map is enlarged to the image, scaled to its smallest and largest value so
    that grids of any size are comparable (LieRE App. G), and coloured.

    Args:
        image: A PIL image, or (H, W, 3), (H, W, 1) or (H, W) uint8.
        attention: (rows, columns); for video, the map of one frame.
        opacity: Weight of the map's colours, from 0 to 1.
        colormap: Name of a matplotlib colour map; this function needs matplotlib.
        limits: Values at the ends of the colour map, for maps that share one scale; `None` means those of the map.

    Returns:
        (H, W, 3) uint8.

    Raises:
        ValueError: if a shape or the opacity is invalid.
    """
    from matplotlib import colormaps

    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3):
        raise ValueError(
            f"The image is {pixels.dtype} of shape {pixels.shape}; accepted is uint8, (H, W) or (H, W, 1 or 3)."
        )
    values = torch.as_tensor(attention).detach().float().cpu()
    if values.ndim != 2:
        raise ValueError(f"The attention map has shape {tuple(values.shape)}; accepted is (rows, columns).")
    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity={opacity} must be in [0, 1].")
    low, high = limits or (values.min().item(), values.max().item())
    # Use nearest neighbour, because a patch is one token with one value.
    rows, columns = (torch.arange(n) * m // n for n, m in zip(pixels.shape[:2], values.shape))
    scaled = ((values - low) / max(high - low, torch.finfo(values.dtype).tiny)).clamp(0, 1)
    colours = colormaps[colormap](scaled[rows][:, columns].numpy())[..., :3] * 255
    return ((1 - opacity) * pixels + opacity * colours).round().astype(np.uint8)
