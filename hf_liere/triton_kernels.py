"""
Rotating queries and keys in one pass over memory each way, for CUDA (Triton). Never needed: where Triton or a GPU is
absent, or types are others than float32, bfloat16 and float16, the plain operations do the same.

A rotation is shared by the batch, so a program loads that of its tokens once and goes through the samples with it.
Planes (cos and sin) are turned elementwise. Blocks of any size b are laid out as one block-diagonal matrix per token
and head, for the tensor cores.
"""

from types import SimpleNamespace

import torch


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Programs of a launch, by which the samples are divided where tokens and heads alone make too few.
PROGRAMS = 1024
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_available(states: torch.Tensor) -> bool:
    """Whether the kernels take these queries or keys: on CUDA, or anywhere under Triton's interpreter."""
    if triton is None or states.dtype not in TYPES or states.shape[-1] > 256:
        return False
    return states.is_cuda or not isinstance(_turn_kernel, triton.JITFunction)


def apply_rotation(
    query: torch.Tensor, key: torch.Tensor, rotation: torch.Tensor, inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    R(p), or Rᵀ(p), applied to blocks of channels of query and key (LieRE §4: q′ = R(p) q, k′ = R(p) k).

    Args:
        query: (B, H, N, D).
        key: (B, H, N, D).
        rotation: (1 or B, 1 or H, N, blocks, 2) with cos and sin, or (1 or B, 1 or H, N, blocks, b, b); channels
            beyond blocks · b are passed through.

    Returns:
        Both (B, H, N, D), in their type and their layout in memory, or contiguous where theirs overlaps.
    """
    query, key = rows(query), rows(key)
    out = empty_like(query), empty_like(key)
    batch, heads, tokens, head_dim = query.shape
    rotation = rotation.contiguous()
    width = rotation.shape[3] * rotation.shape[-1]
    block_dim = max(16, triton.next_power_of_2(head_dim))
    arguments = [*_pointers(query, key, *out), rotation, *_steps(rotation)]
    if rotation.ndim == 5:
        block_tokens = _block_tokens(block_dim)
        blocks = triton.cdiv(tokens, block_tokens)
        samples = _samples(rotation.shape[0], batch, blocks * heads)
        _turn_kernel[(blocks, heads, triton.cdiv(batch, samples))](
            *arguments,
            batch,
            tokens,
            head_dim,
            width,
            samples,
            INVERSE=inverse,
            BLOCK_TOKENS=block_tokens,
            BLOCK_DIM=block_dim,
        )
    else:
        samples = _samples(rotation.shape[0], batch, tokens * heads)
        _multiply_kernel[(tokens, heads, triton.cdiv(batch, samples))](
            *arguments,
            batch,
            head_dim,
            width,
            samples,
            INVERSE=inverse,
            BLOCK_SIZE=rotation.shape[-1],
            BLOCK_BATCH=_block_batch(samples, query.dtype),
            BLOCK_DIM=block_dim,
            num_warps=4 if block_dim <= 64 else 8,
        )
    return out


def angle_gradients(gradients, rotated, shape: torch.Size) -> torch.Tensor:
    """
    Derivative of the loss along the angles of planes, from gradients (g₁, g₂) and rotated states (r₁, r₂) of query and
    key: Σ g₂ r₁ − g₁ r₂ over both, and over the samples and heads that share an angle.

    Args:
        gradients: Of the rotated query and key, (B, H, N, D) each.
        rotated: Query and key, likewise.
        shape: (1 or B, 1 or H, N, planes).

    Returns:
        float32 of this shape.
    """
    gradients, rotated = [rows(each) for each in gradients], [rows(each) for each in rotated]
    batch, heads, tokens, head_dim = rotated[0].shape
    block_dim = max(16, triton.next_power_of_2(head_dim))
    block_tokens = _block_tokens(block_dim)
    blocks = triton.cdiv(tokens, block_tokens)
    samples = _samples(shape[0], batch, blocks * heads)
    parts = triton.cdiv(batch, samples)
    partial = torch.empty(parts, heads, *shape[2:], dtype=torch.float32, device=rotated[0].device)
    _angle_gradient_kernel[(blocks, heads, parts)](
        *_pointers(*gradients, *rotated),
        partial,
        *_steps(partial),
        batch,
        tokens,
        head_dim,
        shape[3],
        samples,
        BLOCK_TOKENS=block_tokens,
        BLOCK_DIM=block_dim,
    )
    return partial.sum_to_size(shape)


def outer_products(
    gradients, rotated, shape: torch.Size, block_size: int, rotation: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Σ g rᵀ of every block over query and key, and over the samples and heads that share a rotation, times that rotation
    if given.

    Args:
        gradients: Of the rotated query and key, (B, H, N, D) each.
        rotated: Query and key, likewise.
        shape: (1 or B, 1 or H, N, blocks).
        block_size: b.
        rotation: (*shape, b, b).

    Returns:
        (*shape, b, b) in float32.
    """
    gradients, rotated = [rows(each) for each in gradients], [rows(each) for each in rotated]
    batch, heads, tokens, head_dim = rotated[0].shape
    block_dim = max(16, triton.next_power_of_2(head_dim))
    samples = _samples(shape[0], batch, tokens * heads)
    parts = triton.cdiv(batch, samples)
    partial = torch.empty(
        parts, heads, *shape[2:], block_size, block_size, dtype=torch.float32, device=rotated[0].device
    )
    _outer_kernel[(tokens, heads, parts)](
        *_pointers(*gradients, *rotated),
        partial,
        *_steps(partial),
        batch,
        head_dim,
        shape[3] * block_size,
        samples,
        BLOCK_SIZE=block_size,
        BLOCK_BATCH=_block_batch(samples, rotated[0].dtype),
        BLOCK_DIM=block_dim,
        num_warps=4 if block_dim <= 64 else 8,
    )
    outer = partial.sum_to_size(*shape, block_size, block_size)
    return outer if rotation is None else outer @ rotation.to(outer.dtype)


def rows(states: torch.Tensor) -> torch.Tensor:
    """The same numbers with the channels of a token side by side in memory."""
    # A negative view holds the numbers with the other sign.
    return (states if states.stride(-1) == 1 else states.contiguous()).resolve_neg()


def empty_like(states: torch.Tensor) -> torch.Tensor:
    """
    Memory for a result, in the layout of `states` but always dense, with the channels of a token side by side:
    `torch.empty_like` of sliding windows, which overlap, has them further apart.
    """
    out = torch.empty_like(states)
    return out if out.stride(-1) == 1 else torch.empty_like(states, memory_format=torch.contiguous_format)


def _pointers(*tensors: torch.Tensor) -> list:
    """Tensors and their steps over samples, heads and tokens, in the order of the kernels' arguments."""
    return [argument for tensor in tensors for argument in (tensor, *tensor.stride()[:3])]


def _steps(shared: torch.Tensor) -> list[int]:
    """Steps over samples, heads and tokens of what samples or heads may share."""
    return [0 if size == 1 else step for size, step in zip(shared.shape[:3], shared.stride())]


def _samples(rotations: int, batch: int, programs: int) -> int:
    """How many samples a program goes through with one rotation."""
    return 1 if rotations > 1 else max(1, batch * programs // max(PROGRAMS, programs))


def _block_tokens(block_dim: int) -> int:
    return max(1, 1024 // block_dim)


def _block_batch(samples: int, dtype: torch.dtype) -> int:
    # A product on the tensor cores has at least 16 rows; float32 tiles of more do not fit every GPU's shared memory.
    return 16 if dtype == torch.float32 else min(64, max(16, triton.next_power_of_2(samples)))


# See cpu_kernels.
TRITON_KERNELS = SimpleNamespace(
    is_available=is_available,
    apply_rotation=apply_rotation,
    angle_gradients=angle_gradients,
    outer_products=outer_products,
)


if triton is not None:

    @triton.jit
    def _turn(
        states, out, offsets, out_offsets, present, cos, sin, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr
    ):
        loaded = tl.load(states + offsets, mask=present, other=0.0)
        first, second = tl.split(tl.reshape(loaded.to(tl.float32), [BLOCK_TOKENS, BLOCK_DIM // 2, 2]))
        turned = tl.join(first * cos - second * sin, first * sin + second * cos)
        turned = tl.reshape(turned, [BLOCK_TOKENS, BLOCK_DIM]).to(loaded.dtype)
        tl.store(out + out_offsets, turned, mask=present)

    @triton.jit
    def _turn_kernel(
        query,
        query_batch,
        query_head,
        query_token,
        key,
        key_batch,
        key_head,
        key_token,
        query_out,
        query_out_batch,
        query_out_head,
        query_out_token,
        key_out,
        key_out_batch,
        key_out_head,
        key_out_token,
        planes,
        planes_batch,
        planes_head,
        planes_token,
        batch,
        tokens,
        head_dim,
        width,
        samples,
        INVERSE: tl.constexpr,
        BLOCK_TOKENS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None]
        head = tl.program_id(1)
        first_sample = tl.program_id(2) * samples
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        present = (token < tokens) & (channel < head_dim)
        offsets = first_sample.to(tl.int64) * planes_batch + head * planes_head + token * planes_token + channel
        pairs = tl.load(planes + offsets, mask=(token < tokens) & (channel < width), other=0.0).to(tl.float32)
        cos, sin = tl.split(tl.reshape(pairs, [BLOCK_TOKENS, BLOCK_DIM // 2, 2]))
        # Channels without a plane stay as they are.
        cos = tl.where(tl.arange(0, BLOCK_DIM // 2)[None, :] * 2 < width, cos, 1.0)
        if INVERSE:
            sin = -sin
        for step in range(first_sample, tl.minimum(first_sample + samples, batch)):
            sample = tl.cast(step, tl.int64)
            _turn(
                query,
                query_out,
                sample * query_batch + head * query_head + token * query_token + channel,
                sample * query_out_batch + head * query_out_head + token * query_out_token + channel,
                present,
                cos,
                sin,
                BLOCK_TOKENS,
                BLOCK_DIM,
            )
            _turn(
                key,
                key_out,
                sample * key_batch + head * key_head + token * key_token + channel,
                sample * key_out_batch + head * key_out_head + token * key_out_token + channel,
                present,
                cos,
                sin,
                BLOCK_TOKENS,
                BLOCK_DIM,
            )

    @triton.jit
    def _slope(gradients, states, offsets, state_offsets, present, BLOCK_TOKENS: tl.constexpr, BLOCK_DIM: tl.constexpr):
        gradient = tl.load(gradients + offsets, mask=present, other=0.0).to(tl.float32)
        state = tl.load(states + state_offsets, mask=present, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(gradient, [BLOCK_TOKENS, BLOCK_DIM // 2, 2]))
        state_first, state_second = tl.split(tl.reshape(state, [BLOCK_TOKENS, BLOCK_DIM // 2, 2]))
        return second * state_first - first * state_second

    @triton.jit
    def _angle_gradient_kernel(
        query_gradient,
        query_gradient_batch,
        query_gradient_head,
        query_gradient_token,
        key_gradient,
        key_gradient_batch,
        key_gradient_head,
        key_gradient_token,
        query,
        query_batch,
        query_head,
        query_token,
        key,
        key_batch,
        key_head,
        key_token,
        out,
        out_part,
        out_head,
        out_token,
        batch,
        tokens,
        head_dim,
        planes,
        samples,
        BLOCK_TOKENS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS))[:, None]
        head, part = tl.program_id(1), tl.program_id(2)
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        present = (token < tokens) & (channel < head_dim)
        slopes = tl.full([BLOCK_TOKENS, BLOCK_DIM // 2], 0.0, tl.float32)
        for step in range(part * samples, tl.minimum((part + 1) * samples, batch)):
            sample = tl.cast(step, tl.int64)
            slopes += _slope(
                query_gradient,
                query,
                sample * query_gradient_batch + head * query_gradient_head + token * query_gradient_token + channel,
                sample * query_batch + head * query_head + token * query_token + channel,
                present,
                BLOCK_TOKENS,
                BLOCK_DIM,
            )
            slopes += _slope(
                key_gradient,
                key,
                sample * key_gradient_batch + head * key_gradient_head + token * key_gradient_token + channel,
                sample * key_batch + head * key_head + token * key_token + channel,
                present,
                BLOCK_TOKENS,
                BLOCK_DIM,
            )
        plane = tl.arange(0, BLOCK_DIM // 2)[None, :]
        offsets = part.to(tl.int64) * out_part + head * out_head + token * out_token + plane
        tl.store(out + offsets, slopes, mask=(token < tokens) & (plane < planes))

    @triton.jit
    def _multiply_kernel(
        query,
        query_batch,
        query_head,
        query_token,
        key,
        key_batch,
        key_head,
        key_token,
        query_out,
        query_out_batch,
        query_out_head,
        query_out_token,
        key_out,
        key_out_batch,
        key_out_head,
        key_out_token,
        rotation,
        rotation_batch,
        rotation_head,
        rotation_token,
        batch,
        head_dim,
        width,
        samples,
        INVERSE: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        BLOCK_BATCH: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        first_sample = tl.program_id(2) * samples
        source, target = tl.arange(0, BLOCK_DIM)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
        row, column = (source, target) if INVERSE else (target, source)
        same = (source // BLOCK_SIZE == target // BLOCK_SIZE) & (source < width) & (target < width)
        entry = (row // BLOCK_SIZE) * BLOCK_SIZE * BLOCK_SIZE + (row % BLOCK_SIZE) * BLOCK_SIZE + column % BLOCK_SIZE
        base = first_sample.to(tl.int64) * rotation_batch + head * rotation_head + token * rotation_token
        matrix = tl.load(rotation + base + entry, mask=same, other=0.0).to(query.dtype.element_ty)
        # Channels without a block stay as they are.
        matrix = tl.where((source == target) & (source >= width), 1.0, matrix).to(query.dtype.element_ty)
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        for start in range(0, samples, BLOCK_BATCH):
            step = start + tl.arange(0, BLOCK_BATCH)[:, None]
            sample = (first_sample + step).to(tl.int64)
            present = (step < samples) & (sample < batch) & (channel < head_dim)
            offsets = sample * query_batch + head * query_head + token * query_token + channel
            states = tl.load(query + offsets, mask=present, other=0.0)
            product = tl.dot(states, matrix, input_precision="ieee").to(states.dtype)
            offsets = sample * query_out_batch + head * query_out_head + token * query_out_token + channel
            tl.store(query_out + offsets, product, mask=present)
            offsets = sample * key_batch + head * key_head + token * key_token + channel
            states = tl.load(key + offsets, mask=present, other=0.0)
            product = tl.dot(states, matrix, input_precision="ieee").to(states.dtype)
            offsets = sample * key_out_batch + head * key_out_head + token * key_out_token + channel
            tl.store(key_out + offsets, product, mask=present)

    @triton.jit
    def _outer_kernel(
        query_gradient,
        query_gradient_batch,
        query_gradient_head,
        query_gradient_token,
        key_gradient,
        key_gradient_batch,
        key_gradient_head,
        key_gradient_token,
        query,
        query_batch,
        query_head,
        query_token,
        key,
        key_batch,
        key_head,
        key_token,
        out,
        out_part,
        out_head,
        out_token,
        batch,
        head_dim,
        width,
        samples,
        BLOCK_SIZE: tl.constexpr,
        BLOCK_BATCH: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
    ):
        token, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        outer = tl.full([BLOCK_DIM, BLOCK_DIM], 0.0, tl.float32)
        for start in range(0, samples, BLOCK_BATCH):
            step = start + tl.arange(0, BLOCK_BATCH)[:, None]
            sample = (part * samples + step).to(tl.int64)
            present = (step < samples) & (sample < batch) & (channel < head_dim)
            offsets = sample * query_gradient_batch + head * query_gradient_head + token * query_gradient_token
            gradient = tl.load(query_gradient + offsets + channel, mask=present, other=0.0)
            offsets = sample * query_batch + head * query_head + token * query_token
            states = tl.load(query + offsets + channel, mask=present, other=0.0)
            outer += tl.dot(tl.trans(gradient), states, input_precision="ieee")
            offsets = sample * key_gradient_batch + head * key_gradient_head + token * key_gradient_token
            gradient = tl.load(key_gradient + offsets + channel, mask=present, other=0.0)
            offsets = sample * key_batch + head * key_head + token * key_token
            states = tl.load(key + offsets + channel, mask=present, other=0.0)
            outer += tl.dot(tl.trans(gradient), states, input_precision="ieee")
        row, column = tl.arange(0, BLOCK_DIM)[:, None], channel
        same = (row // BLOCK_SIZE == column // BLOCK_SIZE) & (row < width) & (column < width)
        entry = (row // BLOCK_SIZE) * BLOCK_SIZE * BLOCK_SIZE + (row % BLOCK_SIZE) * BLOCK_SIZE + column % BLOCK_SIZE
        offsets = part.to(tl.int64) * out_part + head * out_head + token * out_token
        tl.store(out + offsets + entry, outer, mask=same)
