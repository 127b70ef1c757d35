"""Values of the parameters of an encoding before training, by the name of `rotary_init`."""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .kinds import ANY, STARTS, encoding_of


class Start:
    """
    A value of `rotary_init`, see [`registration.register_start`].

    ```python
    from hf_liere import Start
    assert Start.default_scale == 1
    ```

    Attributes:
        name: Its value of `rotary_init`, for [`registration.register_start`].
        fields: Fields of the configuration for this start alone, with their defaults.
        default_scale: Default of `rotary_init_scale`.
        rope_theta: Default of `rope_theta`; `None` means that of the encoding.
        has_planes: Whether it gives planes frequencies.
        takes_orientations: Whether positions are rotation vectors, see `spins` in [`rotary_fields.RotaryFields`].
        encodings: Encodings that accept it, beside those whose `rotary_inits` name it.
    """

    name: ClassVar[str] = ""
    fields: ClassVar[dict[str, Any]] = {}
    default_scale: ClassVar[float] = 1.0
    rope_theta: ClassVar[float | None] = None
    has_planes: ClassVar[bool] = False
    takes_orientations: ClassVar[bool] = False
    encodings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fill_in(cls, config) -> None:
        """Replace `None` in a configuration by what follows from other fields."""

    @classmethod
    def obstacle(cls, config) -> str | None:
        """Why the encoding of a configuration, which accepts the start, cannot start so; `None` if it can."""
        return None

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        """Values of the parameters of a [`rotary_encoding.RotaryEncoding`] by name."""
        raise NotImplementedError

    @classmethod
    def reset(cls, encoding: nn.Module) -> None:
        """Set the parameters, unless a checkpoint provided them."""
        for name, values in cls.parameters(encoding).items():
            init.copy_(getattr(encoding, name), values.to(getattr(encoding, name)))


def start_of(config) -> type[Start]:
    """The start of a configuration; one without fields where nothing is learned or a model gives the rotations."""
    return STARTS.get(config.rotary_init, Start)


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
