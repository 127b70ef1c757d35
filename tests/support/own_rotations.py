"""What a user may add, in one file that is not part of the package: an encoding, a start and coordinates."""

import torch

from hf_liere import (
    BlockSizes,
    Convention,
    RotaryEncoding,
    Start,
    register_coordinates,
    register_encoding,
    register_start,
)


def accepts(size, head_dim, axes):
    return size % 2 == 0 and head_dim % size == 0


@register_encoding
class TwoParameters(RotaryEncoding):
    """Every plane of a block rotates with the same two learned rates, one of each axis."""

    name = "two_parameters"
    description = "Two parameters: one learned rate an axis for all planes of a block"
    block_sizes = BlockSizes(accepts, " must be even and divide head_dim={head_dim} for {encoding}", 4)
    rotary_inits = ("normal", "zeros", "tenth")
    pretrained = "one number for all planes of a block"

    def __init__(self, config, num_axes):
        super().__init__(config, num_axes)
        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks, 1)

    def entries(self, device):
        planes = self.generators.expand(*self.generators.shape[:-1], self.block_size // 2)  # (A, …, blocks, b/2)
        return self.to_blocks(planes.flatten(-2))


@register_start
class Tenth(Start):
    """All rates are a tenth of a radian for each unit of a coordinate."""

    name = "tenth"
    encodings = ("liere",)

    @classmethod
    def parameters(cls, encoding):
        return {"generators": torch.full_like(encoding.generators, 0.1)}


def place_squares(index, size, trained, width):
    return (index / trained) ** 2


register_coordinates("squares", Convention("squares of indices over the trained size", place_squares))
