"""Plain float64 references: loops over layers, heads, tokens and blocks, nothing shared with the package."""

import torch


def block_generators(parameters, encoding, num_axes, layer, head, block, block_size, rope_theta=None, head_dim=None):
    """One (b, b) float64 generator per axis for a block, read from the named parameters of a rotary encoding."""
    if encoding == "axial_rope":
        planes = head_dim // (2 * num_axes)
        generators = [torch.zeros(2, 2, dtype=torch.float64) for _ in range(num_axes)]
        frequency = rope_theta ** (-(block % planes) / planes)
        generators[block // planes] = torch.tensor([[0.0, -frequency], [frequency, 0.0]], dtype=torch.float64)
        return generators
    entries = parameters["generators"].double()
    generators = []
    for axis in range(num_axes):
        if encoding in ("liere", "rope_mixed"):
            source, factor = _pick(entries[axis], layer, head)[block], 1.0
        elif encoding == "comrope_ap":
            source, factor = _pick(entries, layer, head)[block], float(block % num_axes == axis)
        else:
            source = _pick(entries, layer, head)[block]
            factor = _pick(parameters["multipliers"].double()[axis], layer, head)[block].item()
        generator = torch.zeros(block_size, block_size, dtype=torch.float64)
        index = 0
        for i in range(block_size):
            for j in range(i + 1, block_size):
                generator[j, i] = factor * source[index]
                generator[i, j] = -factor * source[index]
                index += 1
        generators.append(generator)
    return generators


def head_rotation(position, parameters, config, num_axes, layer, head):
    """(head_dim, head_dim) rotation of one token in one head; channels without a block keep the identity."""
    rotation = torch.eye(config.head_dim, dtype=torch.float64)
    size = config.block_size
    blocks = config.head_dim // size
    if config.position_encoding == "axial_rope":
        blocks = config.head_dim // (2 * num_axes) * num_axes
    for block in range(blocks):
        generators = block_generators(
            parameters,
            config.position_encoding,
            num_axes,
            layer,
            head,
            block,
            size,
            config.rope_theta,
            config.head_dim,
        )
        exponent = torch.zeros(size, size, dtype=torch.float64)
        for axis in range(num_axes):
            exponent += position[axis].double() * generators[axis]
        channels = slice(block * size, (block + 1) * size)
        rotation[channels, channels] = exponential(exponent)
    return rotation


def exponential(matrices):
    """
    exp(X) of skew-symmetric float64 matrices (…, n, n) from the eigenvalues of the Hermitian iX, with its exact
    gradient. `torch.matrix_exp` is off by up to 2e-10 where all norms are between 1e-3 and 0.05.
    """
    return Exponential.apply(matrices)


class Exponential(torch.autograd.Function):
    """X = U diag(−iw) Uᴴ; the gradient is Daleckii and Kreĭn's, with divided differences that hold at equal w too."""

    @staticmethod
    def forward(ctx, matrices):
        values, vectors = torch.linalg.eigh(1j * matrices)
        ctx.save_for_backward(values, vectors)
        return ((vectors * torch.exp(-1j * values).unsqueeze(-2)) @ vectors.mH).real

    @staticmethod
    def backward(ctx, gradient):
        values, vectors = ctx.saved_tensors
        rows, columns = values.unsqueeze(-1), values.unsqueeze(-2)
        differences = torch.exp(-0.5j * (rows + columns)) * torch.sinc((rows - columns) / (2 * torch.pi))
        inside = vectors.mH @ gradient.to(vectors.dtype) @ vectors * differences.conj()
        return (vectors @ inside @ vectors.mH).real


def dense(rotation, head_dim, layer_heads):
    """(B, heads, N, head_dim, head_dim) float64 matrices of a rotation that the package hands to a layer."""
    batch, heads, tokens, blocks = rotation.shape[:4]
    matrices = torch.eye(head_dim, dtype=torch.float64).expand(batch, heads, tokens, head_dim, head_dim).clone()
    if rotation.ndim == 5:
        cos, sin = rotation.double().unbind(-1)
        rotation = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    size = rotation.shape[-1]
    for block in range(blocks):
        channels = slice(block * size, (block + 1) * size)
        matrices[..., channels, channels] = rotation[..., block, :, :].double()
    return matrices.expand(batch, layer_heads, tokens, head_dim, head_dim)


def attention(hidden_states, attention_module, rotations):
    """Self-attention with loops over samples and heads, on (B, heads, N, D, D) rotations of the tokens."""
    parameters = {name: value.double() for name, value in attention_module.named_parameters()}
    config, head_dim = attention_module.config, attention_module.head_dim
    output = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for sample, states in enumerate(hidden_states.double()):
        attended = []
        for head in range(config.num_attention_heads):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            query, key, value = (
                states @ parameters[f"{name}_proj.weight"][rows].T + parameters[f"{name}_proj.bias"][rows]
                for name in "qkv"
            )
            rotation = rotations[min(sample, len(rotations) - 1), head]
            query = torch.stack([matrix @ vector for matrix, vector in zip(rotation, query)])
            key = torch.stack([matrix @ vector for matrix, vector in zip(rotation, key)])
            attended.append(torch.softmax(query @ key.T / head_dim**0.5, dim=-1) @ value)
        output[sample] = torch.cat(attended, -1) @ parameters["o_proj.weight"].T + parameters["o_proj.bias"]
    return output


def _pick(entries, layer, head):
    """Entry of a layer and head where either may be shared (size one)."""
    return entries[min(layer, entries.shape[0] - 1), min(head, entries.shape[1] - 1)]
