"""What tests add to the plain encodings: exact exponentials with gradients, and loops over layers, heads and tokens."""

import torch

from hf_liere.plain import plain_layer


def generators(parameters, config, num_axes, layer, head):
    """The skew-symmetric A_a of one head, (A, head_dim, head_dim) in float64; zero for channels without a block."""
    plain = plain_layer(config, num_axes, parameters, layer)
    shares = zip(plain.parts, plain.axes) if hasattr(plain, "parts") else [(plain, range(num_axes))]
    diagonals = [[] for _ in range(num_axes)]
    for part, axes in shares:
        blocks = part.matrices()[:, 0].detach()
        of_head = blocks[:, head % blocks.shape[1]]  # (axes, blocks, b, b)
        rest = torch.zeros(part.head_dim % of_head.shape[-1], part.head_dim % of_head.shape[-1]).double()
        for axis, diagonal in enumerate(diagonals):
            own = of_head[list(axes).index(axis)] if axis in axes else torch.zeros_like(of_head[0])
            diagonal += [*own, rest]
    unrotated = torch.zeros([config.head_dim - sum(len(block) for block in diagonals[0])] * 2).double()
    return torch.stack([torch.block_diag(*diagonal, unrotated) for diagonal in diagonals])


def pair_halves(entries, planes):
    """(D, D) of one axis and head, by loops: blocks of two planes; plane i has channels i and i + planes."""
    found = torch.zeros(2 * planes, 2 * planes, dtype=torch.float64)
    for block, values in enumerate(entries.double()):
        channels = [channel for i in (2 * block, 2 * block + 1) for channel in (i, i + planes)]
        places = [(row, column) for column in range(4) for row in range(column + 1, 4)]
        for (row, column), value in zip(places, values, strict=True):
            found[channels[row], channels[column]] = value
            found[channels[column], channels[row]] = -value
    return found


def rotations(matrices, positions, position_encoding=None):
    """
    R(p) of (A, …, n, n) generators at (N, A) positions: (…, N, n, n). For Spherical RoPE and the LieRE product,
    exp(p_0 A_0) exp(p_1 A_1) ….
    """
    if position_encoding not in ("spherical_rope", "liere_product"):
        return exponential(torch.einsum("pa,a...ij->...pij", positions.double(), matrices))
    axes = range(len(matrices))
    first, *others = (rotations(matrices[axis : axis + 1], positions[:, axis : axis + 1]) for axis in axes)
    for other in others:
        first = first @ other
    return first


def rotate(states, matrices):
    """R(p) q of every token (LieRE §4): (…, N, D) queries or keys by (…, N, D, D) rotations."""
    return torch.einsum("...ij,...j->...i", matrices, states.double())


def head_rotation(position, parameters, config, num_axes, layer, head):
    """(head_dim, head_dim) rotation of one token in one head; channels without a block keep the identity."""
    matrices = generators(parameters, config, num_axes, layer, head)
    return rotations(matrices, position.cpu().view(1, -1), config.position_encoding)[0]


def rotate_heads(states, positions, parameters, config, layer):
    """R(p) q of (B, H, N, D) queries or keys of a layer, at (B, N, A) positions."""
    heads, axes = range(states.shape[1]), positions.shape[-1]
    matrices = [generators(parameters, config, axes, layer, head) for head in heads]
    turns = [torch.stack([rotations(of_head, p, config.position_encoding) for of_head in matrices]) for p in positions]
    return rotate(states, torch.stack(turns))


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
    blocks_of_tokens = rotation.matrices().detach().double()
    batch, heads, tokens, blocks, size, _ = blocks_of_tokens.shape
    matrices = torch.eye(head_dim, dtype=torch.float64).expand(batch, heads, tokens, head_dim, head_dim).clone()
    for block in range(blocks):
        channels = slice(block * size, (block + 1) * size)
        matrices[..., channels, channels] = blocks_of_tokens[..., block, :, :]
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
            query, key = rotate(query, rotation), rotate(key, rotation)
            weights = torch.softmax(query @ key.T / head_dim**0.5, dim=-1)
            if config.rotate_values:
                attended.append(rotate(weights @ rotate(value, rotation), rotation.mT))
            else:
                attended.append(weights @ value)
        output[sample] = torch.cat(attended, -1) @ parameters["o_proj.weight"].T + parameters["o_proj.bias"]
    return output
