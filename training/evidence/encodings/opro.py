"""OPRO ([2603.27637](https://arxiv.org/abs/2603.27637)) for the axes of a grid, as docs/own_encoding.md shows."""

import torch

from hf_liere import BlockSizes, RotaryEncoding, register_encoding


WHOLE_HEAD = BlockSizes(lambda size, head_dim, axes: size == head_dim, ": {encoding} has one block, {head_dim}", None)


@register_encoding
class OPRO(RotaryEncoding):
    """A_a = L_a R_aᵀ − R_a L_aᵀ of rank 4 for each axis; L_a = 0 at the start."""

    name = "opro"
    description = "OPRO: a generator of low rank for each axis"
    block_sizes = WHOLE_HEAD
    rotary_inits = ("zeros",)
    pretrained = "a low rank cannot give any frequencies"

    def __init__(self, config, num_axes):
        super().__init__(config, num_axes)
        self.left = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks, self.block_size, 2)
        self.right = self.new_parameter(num_axes, self.layers, self.heads, self.num_blocks, self.block_size, 2)

    def reset_parameters(self):
        torch.nn.init.zeros_(self.left)
        torch.nn.init.normal_(self.right)

    def entries(self, device):
        product = self.left @ self.right.mT  # (A, layers, heads, blocks, b, b)
        column, row = torch.triu_indices(self.block_size, self.block_size, 1, device=product.device)
        return (product - product.mT)[..., row, column]  # (A, layers, heads, blocks, b(b−1)/2)
