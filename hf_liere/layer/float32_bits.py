"""Which float32 frequencies give the bits of measured cos and sin."""

import torch


# How far the nearest float32 number to a measured frequency may be off, in units of the last place.
NEIGHBOURS = sorted(range(-8, 9), key=abs)


def nearest_float32(frequency: torch.Tensor, steps: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The float32 number near a frequency whose cos and sin at most steps have the measured bits."""
    nearest = frequency.float()  # (layers, heads, planes)
    bits = nearest.view(torch.int32)
    candidates = torch.stack([(bits + offset).view(torch.float32) for offset in NEIGHBOURS])
    candidates = candidates.where(nearest != 0, nearest)  # (neighbours, layers, heads, planes)
    angles = candidates.unsqueeze(-2) * steps.unsqueeze(-1)  # (neighbours, layers, heads, T, planes)
    same = ((angles.cos() == cos).float() + (angles.sin() == sin)).sum(-2)  # (neighbours, layers, heads, planes)
    return candidates.gather(0, same.argmax(0, keepdim=True)).squeeze(0)


def rounded_cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    products = (p[:, None] * f.unsqueeze(-2) for p, f in zip(positions.unbind(-1), frequencies))
    angles = sum(products)  # (layers, heads, N, planes)
    return torch.cos(angles), torch.sin(angles)
