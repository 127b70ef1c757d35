"""
Numbers that travel from a rotary module to attention. They are behind the channels of cos, so whatever a model does
with cos (windows, slices of tokens, copies for recomputation or another device) is done with them.
"""

import torch
from torch import nn

from ..probing.coordinate_probe import Turn


def carry(turn: Turn, numbers: torch.Tensor, is_joined: bool = False) -> Turn:
    """
    cos and sin of tokens, or cos + i sin, with (…, N, C) numbers for attention. Where the model joins them to cos and
    sin of further tokens (`is_joined`), the numbers are the imaginary part of cos, which is 0 for these.
    """
    if isinstance(turn, torch.Tensor):
        return torch.cat([turn.expand(*numbers.shape[:-1], -1), numbers.to(turn.dtype)], dim=-1)  # (…, N, D + C)
    # Numbers may have samples where the model's cos has none; sin keeps its shape.
    cos, sin = turn[0].expand(*numbers.shape[:-1], -1), turn[1]
    # sin keeps the type of the model; half types would round numbers.
    wide = torch.promote_types(cos.dtype, torch.float32)
    if is_joined:
        numbers = nn.functional.pad(numbers, (0, cos.shape[-1] - numbers.shape[-1]))  # (…, N, D)
        return torch.complex(cos.to(wide), numbers.to(wide)), sin  # 2 × (…, N, D)
    return torch.cat([cos.to(wide), numbers.to(wide)], dim=-1), sin  # (…, N, D + C), (…, N, D)


def take_off(carrier: Turn, receiver: str, channels: int, *counts: int) -> tuple[Turn, torch.Tensor]:
    """
    Undoes [`carry`]: returns D channels of cos and sin, and C carried numbers. C is one of `counts`, the first if the
    model joined tokens. Raises `RuntimeError` if the `receiver` got none.
    """
    first = carrier if isinstance(carrier, torch.Tensor) else carrier[0]
    count = first.shape[-1] - channels
    if first.is_complex() and first is not carrier:
        turn, numbers = first.real, first.imag[..., : counts[0]]
    elif count in counts and first.dtype not in (torch.float16, torch.bfloat16):
        turn, numbers = first.split([channels, count], dim=-1)
    else:
        raise RuntimeError(
            f"{receiver} got rotations of {first.shape[-1]} channels in {first.dtype}, which do not come from the "
            "patched model, or which the model computes with before attention: the positions of its tokens are "
            "unknown. Call the model around it, or unpatch the model."
        )
    numbers = numbers.real if numbers.is_complex() else numbers
    if first is carrier:
        return turn, numbers
    turn = turn[0] if turn.ndim > carrier[1].ndim else turn
    return (turn.to(carrier[1].dtype), carrier[1]), numbers


def keep_joined(turn: Turn, numbers: torch.Tensor, computed: Turn) -> Turn:
    """The computed rotations, but those of the tokens that the model joined, which have no numbers."""
    is_joined = (numbers == 0).all(dim=-1, keepdim=True)  # (…, N, 1)
    cos, sin = (torch.where(is_joined, given, new) for given, new in zip(turn, computed))
    return cos, sin
