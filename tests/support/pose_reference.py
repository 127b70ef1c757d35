"""Random cameras, and GTA's attention between them in float64, for every pair of tokens."""

import math

import torch


HEADS, HEAD_DIM = 2, 16


def random_poses(*shape, distance=1.0, dtype=torch.float64):
    """Camera to world, (*shape, 4, 4), with translations of standard deviation `distance` on every axis."""
    rotation, _ = torch.linalg.qr(torch.randn(*shape, 3, 3, dtype=torch.float64))
    poses = torch.eye(4, dtype=torch.float64).repeat(*shape, 1, 1)
    poses[..., :3, :3] = rotation * torch.linalg.det(rotation)[..., None, None]
    poses[..., :3, 3] = distance * torch.randn(*shape, 3, dtype=torch.float64)
    return poses.to(dtype)


def random_states(batch, *tokens, dtype=torch.float64):
    query, *others = tokens if len(tokens) == 3 else tokens * 3
    return [torch.randn(batch, HEADS, count, HEAD_DIM, dtype=dtype) for count in (query, *others)]


def expected(states, transforms, key_transforms=None, bias=0.0):
    """
    GTA's attention for (B, N, D, D) matrices ρ(g) of the tokens: oᵢ = Σⱼ softmaxⱼ(sᵢⱼ) ρ(gᵢ) ρ(gⱼ)⁻¹ vⱼ with
    sᵢⱼ = qᵢᵀ ρ(gᵢ) ρ(gⱼ)⁻¹ kⱼ / √D + biasᵢⱼ.
    """
    query, key, value = (x.double() for x in states)
    inverse = torch.linalg.inv(transforms if key_transforms is None else key_transforms)
    relative = transforms.unsqueeze(2) @ inverse.unsqueeze(1)  # (B, N, M, D, D)
    weights = torch.einsum("bhid,bijde,bhje->bhij", query, relative, key) / math.sqrt(query.shape[-1])
    return torch.einsum("bhij,bijde,bhje->bhid", (weights + bias).softmax(-1), relative, value)


def by_distance(factors, places, key_places):
    """(B, heads, N, M): a factor of each head times the squared distance of every pair."""
    return torch.tensor(
        [
            [[[factor * sum((a - b) ** 2 for a, b in zip(x, y)) for y in keys] for x in queries] for factor in factors]
            for queries, keys in zip(places.tolist(), key_places.tolist())
        ],
        dtype=torch.float64,
    )


def tiled(matrices, width=HEAD_DIM):
    """(B, N, 4, 4) → (B, N, width, width), I ⊗ matrix (PRoPE eq. 18)."""
    return torch.stack([torch.block_diag(*[each] * (width // 4)) for each in matrices.flatten(0, 1)]).unflatten(
        0, matrices.shape[:2]
    )
