"""
Rotates query and key in one pass over memory, forward and backward, on CUDA (Triton). The kernels are optional: without
Triton or a GPU, for dtypes other than float32, bfloat16 and float16, and if `self_check` finds a difference, plain
operations compute the same. HF_LIERE_CUDA_KERNELS=0 in the environment disables the kernels; `all` turns on also those
of `cuda_exponentials`, which make rotations and eigenbases of small blocks, where `FASTER_ON` does not name the GPU.

The batch shares a rotation, so a program loads the rotation of its tokens once and applies it to several samples.
Planes (cos and sin) are rotated elementwise; blocks of any size b by tensor cores, as a block-diagonal matrix per head.

Bytes moved, with queries and keys of S bytes together and rotations of R bytes (8 per token, head and plane, or 4·b²
per block), and a batch divided among P programs (`PROGRAMS`) that each load or add the rotations once:

- [`apply_rotation`] reads S + P·R and writes S. Cos and sin are stored once for both channels of a plane. Heads that
  share a rotation read the same bytes from the cache.
- [`angle_gradients`] reads 2·S and writes P·R/2 for all heads; these are read again if there is anything to add.
- [`outer_products`] reads 2·S and writes P·R likewise; the product with the rotation reads 2·R and writes R.

That is 2·S for inference and 6·S for a training step, in addition to the rotations. Overwriting the outputs of the
projections would move the same number of bytes.
"""

import os
from typing import TYPE_CHECKING, Any

import torch

from .cuda_exponentials import LARGEST_BLOCK, batched_backward, batched_rotations, eigenbases, import_error, tl, triton
from .layout import Tensors, contiguous_channels, empty_like, is_planes, shared_strides
from .self_check import SelfCheck, padded_width


NAME = "Triton kernels"
SWITCH = "HF_LIERE_CUDA_KERNELS"
# The batch is divided among several programs if tokens and heads give fewer programs than this.
PROGRAMS = 1024
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Names of GPUs on which `make gpu` found the kernels of exponentials faster than plain operations: none was measured.
FASTER_ON: tuple[str, ...] = ()
# Products of wider heads need more shared memory than an H100 has.
MAX_HEAD_DIM = 128

_angle_gradients_kernel: Any
_outer_products_kernel: Any
_rotate_blocks_kernel: Any
_rotate_planes_kernel: Any


def is_interpreted() -> bool:
    """Whether Triton interprets the kernels, on CPUs too, instead of compiling them for CUDA."""
    return triton is not None and not isinstance(_rotate_planes_kernel, triton.JITFunction)


def refusal(states: torch.Tensor, dtype: torch.dtype, block_size: int, function: str = "") -> str | None:
    """
    Why the kernels do not accept these queries or keys, or generators, for results in `dtype`; `None` if they do. They
    rotate by blocks of any size, and make those that are small, on CUDA and on CPUs under Triton's interpreter. The
    first call for a device, dtype, block size and head width compares them with plain operations, see `self_check`.
    """
    if triton is None:
        return import_error
    if not states.is_cuda and not (states.is_cpu and is_interpreted()):
        return "they run only on CUDA"
    if dtype not in TYPES:
        return "they compute only float32, bfloat16 and float16"
    if function in (batched_rotations.__name__, batched_backward.__name__, eigenbases.__name__):
        if block_size > LARGEST_BLOCK:
            return f"a block has more than {LARGEST_BLOCK} channels"
        is_measured = states.is_cuda and torch.cuda.get_device_name(states.device) in FASTER_ON
        if not is_measured and os.environ.get(SWITCH) != "all":
            return f"they were not measured on this device: {SWITCH}=all turns them on"
        return self_check.failure(states.device, dtype, block_size)
    if states.shape[-1] > MAX_HEAD_DIM:
        return f"a head has more than {MAX_HEAD_DIM} channels"
    return self_check.failure(states.device, dtype, block_size, states.shape[-1])


def apply_rotation(
    states: Tensors, rotation: torch.Tensor, inverse: bool = False, samples: int | None = None
) -> tuple[torch.Tensor, ...]:
    """
    Apply R(p), or Rᵀ(p), to blocks of channels of query and key (LieRE §4: q′ = R(p) q, k′ = R(p) k).

    Args:
        states: Query and key, (B, H, N, D) each, or one of them.
        rotation: (1 or B, 1 or H, N, planes, 2) cos and sin, or (1 or B, 1 or H, N, blocks, b, b); channels beyond the
            last plane or block do not change.
        inverse: Whether to apply Rᵀ(p).
        samples: Number of samples per program; `None` chooses it so that about `PROGRAMS` programs run.

    Returns:
        (B, H, N, D) each, in the dtype and memory layout of the states, but contiguous if that layout overlaps.
    """
    states = tuple(map(contiguous_channels, states))
    out = tuple(map(empty_like, states))
    rotation = rotation.contiguous()
    if is_planes(rotation):
        kernel, block_size = _rotate_planes_kernel, None
    else:
        kernel, block_size = _rotate_blocks_kernel, rotation.shape[-1]
    grid, sizes, constants = _launch(states, rotation.shape, block_size, samples)
    rotation = rotation, *shared_strides(rotation)
    # Triton launches on the current device, which may differ from that of the tensors.
    with torch.cuda.device_of(states[0]):
        kernel[grid](_add_strides(states), _add_strides(out), rotation, sizes, INVERSE=inverse, **constants)
    return out


def angle_gradients(
    gradients: Tensors, rotated: Tensors, shape: torch.Size, samples: int | None = None
) -> torch.Tensor:
    """
    Derivative of the loss with respect to the angles of planes, from gradients (g₁, g₂) and rotated states (r₁, r₂) of
    query and key: Σ g₂ r₁ − g₁ r₂ over both, and over the samples and heads that share an angle.

    Args:
        gradients: Of the rotated query and key, (B, H, N, D) each, or of one of them.
        rotated: Query and key, likewise.
        shape: (1 or B, 1 or H, N, planes).
        samples: As in [`apply_rotation`].

    Returns:
        float32 of this shape.
    """
    return _sums(_angle_gradients_kernel, gradients, rotated, shape, _launch(rotated, shape, None, samples))


def outer_products(
    gradients: Tensors,
    rotated: Tensors,
    shape: torch.Size,
    block_size: int,
    rotation: torch.Tensor | None = None,
    samples: int | None = None,
) -> torch.Tensor:
    """
    Σ g rᵀ of every block over query, key, and samples and heads that share a rotation, times that rotation if given.

    Args:
        gradients, rotated: As in [`angle_gradients`].
        shape: (1 or B, 1 or H, N, blocks).
        block_size: b.
        rotation: (*shape, b, b).
        samples: As in [`apply_rotation`].

    Returns:
        (*shape, b, b) in float32.
    """
    shape, launch = (*shape, block_size, block_size), _launch(rotated, shape, block_size, samples)
    outer = _sums(_outer_products_kernel, gradients, rotated, shape, launch)
    if rotation is None:
        return outer
    # A backward pass inside autocast would otherwise multiply in its dtype.
    with torch.autocast(outer.device.type, enabled=False):
        return outer @ rotation.to(outer.dtype)


def _add_strides(pair: Tensors) -> tuple[tuple, ...]:
    """Query and key, or one of them, each with its strides over samples, heads and tokens, as the kernels expect."""
    return tuple((states, *states.stride()[:3]) for states in pair)


def _launch(
    states: Tensors, shape: torch.Size, block_size: int | None, samples: int | None
) -> tuple[tuple, tuple, dict]:
    """
    The grid over tokens, heads and samples, and a kernel's sizes and constants, for (B, H, N, D) states, rotations of a
    shape (1 or B, 1 or H, N, planes or blocks, …), blocks of a size, or `None` for planes, and `samples` per program.
    """
    assert triton is not None, import_error
    count, states = len(states), states[0]
    batch, heads, tokens, head_dim = states.shape
    block_dim = padded_width(head_dim)
    block_tokens = max(1, 1024 // block_dim) if block_size is None else 1
    programs = triton.cdiv(tokens, block_tokens) * heads
    if shape[0] > 1:
        samples = 1
    elif samples is None:
        samples = max(1, batch * programs // max(PROGRAMS, programs))
    grid = (programs // heads, heads, triton.cdiv(batch, samples))
    sizes = (batch, tokens, head_dim, shape[3] * (block_size or 2), samples)
    if block_size is None:
        return grid, sizes, {"STATES": count, "BLOCK_TOKENS": block_tokens, "BLOCK_DIM": block_dim}
    # Tensor-core products have at least 16 rows; larger float32 tiles exceed the shared memory of some GPUs.
    rows = 16 if states.dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(samples)))
    tiles = {"STATES": count, "BLOCK_SIZE": block_size, "BLOCK_BATCH": rows, "BLOCK_DIM": block_dim}
    # With three stages, float32 heads of 128 channels exceed the 99 KiB of shared memory of compute capability 8.6.
    return grid, sizes, tiles | ({"num_warps": 4} if block_dim <= 64 else {"num_warps": 8, "num_stages": 2})


def _sums(
    kernel: Any, gradients: Tensors, rotated: Tensors, shape: tuple[int, ...], launch: tuple[tuple, tuple, dict]
) -> torch.Tensor:
    """Run a kernel whose programs each sum over their samples, and add the sums that share a rotation."""
    grid, sizes, constants = launch
    gradients, rotated = (tuple(map(contiguous_channels, pair)) for pair in (gradients, rotated))
    sums = torch.empty(grid[2], grid[1], *shape[2:], dtype=torch.float32, device=rotated[0].device)
    out = sums, *shared_strides(sums)
    with torch.cuda.device_of(sums):
        kernel[grid](_add_strides(gradients), _add_strides(rotated), out, sizes, **constants)
    return sums.sum_to_size(shape)


functions = apply_rotation, angle_gradients, outer_products, batched_rotations, batched_backward, eigenbases
self_check = SelfCheck(NAME, *functions)


# `states`, `gradients` and `out` are query and key, or one of them: STATES tensors of (B, H, N, D). `rotation` and
# `sums` are planes or blocks, (samples, heads, N, …). Each tensor comes in a tuple with its strides over samples, heads
# and tokens. `width` of `head_dim` channels are rotated, and a program processes `samples` of `batch` samples. Type
# checkers do not read Triton's language.
if not TYPE_CHECKING and triton is not None:

    @triton.jit
    def _pointer(tensor, sample, head, token):
        # 64 bits for the largest offset: a batch may contain more than 2³¹ values.
        return tensor[0] + (tl.cast(sample, tl.int64) * tensor[1] + head * tensor[2] + token * tensor[3])

    @triton.jit
    def _channel_pairs(values, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr):
        """The even and the odd channels, (BLOCK_TOKENS, BLOCK_DIM / 2) each."""
        return tl.split(tl.reshape(values.to(tl.float32), [BLOCK_TOKENS, BLOCK_DIM // 2, 2]))

    @triton.jit
    def _rotate_planes_kernel(
        states,
        out,
        rotation,
        sizes,
        INVERSE: tl.constexpr,
        STATES: tl.constexpr,
        BLOCK_TOKENS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        batch, tokens, head_dim, width, samples = sizes
        token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None]
        head, first = tl.program_id(1), tl.program_id(2) * samples
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        present = (token < tokens) & (channel < head_dim)
        planes = _pointer(rotation, first, head, token) + channel
        cos_sin = tl.load(planes, mask=(token < tokens) & (channel < width), other=0.0)  # (BLOCK_TOKENS, BLOCK_DIM)
        cos, sin = _channel_pairs(cos_sin, BLOCK_TOKENS, BLOCK_DIM)
        # Channels beyond the last plane do not change.
        cos = tl.where(tl.arange(0, BLOCK_DIM // 2)[None, :] * 2 < width, cos, 1.0)
        if INVERSE:
            sin = -sin
        for sample in range(first, tl.minimum(first + samples, batch)):
            for i in tl.static_range(STATES):
                loaded = tl.load(_pointer(states[i], sample, head, token) + channel, mask=present, other=0.0)
                x, y = _channel_pairs(loaded, BLOCK_TOKENS, BLOCK_DIM)  # (BLOCK_TOKENS, BLOCK_DIM / 2) each
                rotated = tl.reshape(tl.join(x * cos - y * sin, x * sin + y * cos), [BLOCK_TOKENS, BLOCK_DIM])
                tl.store(_pointer(out[i], sample, head, token) + channel, rotated.to(loaded.dtype), mask=present)

    @triton.jit
    def _angle_gradients_kernel(
        gradients, states, sums, sizes, STATES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr
    ):
        batch, tokens, head_dim, width, samples = sizes
        token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None]
        head, part = tl.program_id(1), tl.program_id(2)
        channel, plane = tl.arange(0, BLOCK_DIM)[None, :], tl.arange(0, BLOCK_DIM // 2)[None, :]
        present = (token < tokens) & (channel < head_dim)
        by_angle = tl.full([BLOCK_TOKENS, BLOCK_DIM // 2], 0.0, tl.float32)
        for sample in range(part * samples, tl.minimum((part + 1) * samples, batch)):
            for i in tl.static_range(STATES):
                gradient = tl.load(_pointer(gradients[i], sample, head, token) + channel, mask=present, other=0.0)
                state = tl.load(_pointer(states[i], sample, head, token) + channel, mask=present, other=0.0)
                dx, dy = _channel_pairs(gradient, BLOCK_TOKENS, BLOCK_DIM)  # (BLOCK_TOKENS, BLOCK_DIM / 2) each
                x, y = _channel_pairs(state, BLOCK_TOKENS, BLOCK_DIM)
                by_angle += dy * x - dx * y
        angles = _pointer(sums, part, head, token) + plane
        tl.store(angles, by_angle, mask=(token < tokens) & (plane * 2 < width))

    @triton.jit
    def _block_diagonal(row, column, width, BLOCK_SIZE: tl.constexpr):
        """Which entries of a block-diagonal matrix are in a block, and their offsets in memory, block by block."""
        inside = (row // BLOCK_SIZE == column // BLOCK_SIZE) & (row < width) & (column < width)
        block = (row // BLOCK_SIZE) * BLOCK_SIZE * BLOCK_SIZE
        return inside, block + (row % BLOCK_SIZE) * BLOCK_SIZE + column % BLOCK_SIZE

    @triton.jit
    def _rotate_blocks_kernel(
        states,
        out,
        rotation,
        sizes,
        INVERSE: tl.constexpr,
        STATES: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        BLOCK_BATCH: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        batch, _, head_dim, width, samples = sizes
        token, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * samples
        source, target = tl.arange(0, BLOCK_DIM)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        # States are rows: multiply them by Rᵀ, or by R for the inverse.
        row, column = (source, target) if INVERSE else (target, source)
        inside, entry = _block_diagonal(row, column, width, BLOCK_SIZE)
        matrix = tl.load(_pointer(rotation, first, head, token) + entry, mask=inside, other=0.0)
        # Channels beyond the last block do not change.
        matrix = tl.where((source == target) & (source >= width), 1.0, matrix)  # (BLOCK_DIM, BLOCK_DIM)
        matrix = matrix.to(states[0][0].dtype.element_ty)
        for start in range(0, samples, BLOCK_BATCH):
            step = start + tl.arange(0, BLOCK_BATCH)[:, None]
            sample = first + step
            present = (step < samples) & (sample < batch) & (target < head_dim)
            for i in tl.static_range(STATES):
                loaded = tl.load(_pointer(states[i], sample, head, token) + target, mask=present, other=0.0)
                rotated = tl.dot(loaded, matrix, input_precision="ieee").to(loaded.dtype)  # (BLOCK_BATCH, BLOCK_DIM)
                tl.store(_pointer(out[i], sample, head, token) + target, rotated, mask=present)

    @triton.jit
    def _outer_products_kernel(
        gradients,
        states,
        sums,
        sizes,
        STATES: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        BLOCK_BATCH: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        batch, _, head_dim, width, samples = sizes
        token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        row, column = tl.arange(0, BLOCK_DIM)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        outer = tl.full([BLOCK_DIM, BLOCK_DIM], 0.0, tl.float32)
        for start in range(0, samples, BLOCK_BATCH):
            step = start + tl.arange(0, BLOCK_BATCH)[:, None]
            sample = part * samples + step
            present = (step < samples) & (sample < batch) & (column < head_dim)
            for i in tl.static_range(STATES):
                gradient = tl.load(_pointer(gradients[i], sample, head, token) + column, mask=present, other=0.0)
                state = tl.load(_pointer(states[i], sample, head, token) + column, mask=present, other=0.0)
                outer += tl.dot(tl.trans(gradient), state, input_precision="ieee")  # (BLOCK_DIM, BLOCK_DIM)
        inside, entry = _block_diagonal(row, column, width, BLOCK_SIZE)
        tl.store(_pointer(sums, part, head, token) + entry, outer, mask=inside)
