"""Values of the parameters of an encoding before training, by the name of `rotary_init`."""

import math

import torch

from .kinds import ANY, STARTS, Start, encoding_of


@STARTS.add("uniform")
class Uniform(Start):
    """U[0, scale), as in LieRE's code."""

    default_scale = 2 * math.pi

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.empty_like(encoding.generators).uniform_(0, encoding.config.rotary_init_scale)}


@STARTS.add("normal")
class Normal(Start):
    """N(0, scale²): the entries of P − Pᵀ for a standard normal P, as in ComRoPE's code."""

    default_scale = math.sqrt(2)

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.empty_like(encoding.generators).normal_(0, encoding.config.rotary_init_scale)}


@STARTS.add("zeros")
class Zeros(Start):
    """No rotations: exp(0) = I (ComRoPE §4.4)."""

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.zeros_like(encoding.generators)}


class Spectrum(Start):
    """Starts that give every plane of a head a frequency on every axis."""

    has_planes = True

    @classmethod
    def frequencies(cls, config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
        """(A, layers, heads, planes), without scale."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        config, sizes = encoding.config, (encoding.num_axes, encoding.layers, encoding.heads, encoding.num_planes)
        return encoding.parameters_for_planes(cls.frequencies(config, *sizes) * config.rotary_init_scale)

    @classmethod
    def obstacle(cls, config) -> str | None:
        if encoding_of(config).block_sizes is not ANY or config.block_size % 2 == 0:
            return None
        return (
            "it gives every plane of two channels a frequency, and blocks of "
            f"{config.block_size} channels would cut them"
        )


@STARTS.add("frequencies")
class Frequencies(Spectrum):
    """
    RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head form one group per axis, plane i of q in a group
    rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for every layer and head.
    """

    @classmethod
    def frequencies(cls, config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
        group_size = math.ceil(planes / num_axes)
        plane = torch.arange(planes)  # (planes,)
        magnitudes = config.rope_theta ** -((plane % group_size) / group_size)  # (planes,)
        # torch has no QR decomposition of half types. (layers, heads, A, A)
        directions, _ = torch.linalg.qr(torch.randn(layers, heads, num_axes, num_axes, dtype=torch.float32))
        return (directions[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)
