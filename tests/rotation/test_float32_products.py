"""Which products of exponentials may be float32 where float64 is slow: the figures of speed_tables.md."""

import math

import pytest
import reference
import torch

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.fast.exponential_gradient import batched_rotations_backward
from hf_liere.fast.scaling_and_squaring import POLYNOMIAL_NORM, _exponential
from hf_liere.rotation.exponential import skew


@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.parametrize("block_size", [8, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_two_squarings_may_be_float32_and_no_more(block_size, factor):
    """Of LieRE at its initial norm and at ten times it, on a 14 × 14 grid."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 2}
    config = LieREViTConfig(position_encoding="liere", block_size=block_size, image_size=224, patch_size=16, **sizes)
    model = LieREViTForImageClassification(config)
    positions = model.liere.grid_positions((14, 14), torch.device("cpu")).coordinates  # (196, 2)
    generators = skew(model.liere.rotary_encoding.entries("cpu").detach().flatten(2, 3) * factor, block_size)
    leaf = generators.double().requires_grad_()
    exact = reference.exponential(torch.einsum("pa,agkij->gpkij", positions, leaf))  # (1, 196, K, b, b)
    exponents = torch.einsum("pa,akij->pkij", positions, generators[:, 0].double()).flatten(0, 1)
    squarings = math.ceil(math.log2(float(torch.linalg.matrix_norm(exponents, 2).max()) / POLYNOMIAL_NORM))

    def error(in_float32):
        """The largest error of an element, with the last products in float32: squarings, then polynomial too."""
        scaled = exponents * 2.0**-squarings
        rotation = _exponential(scaled.float() if in_float32 > squarings else scaled)
        for left in range(squarings, 0, -1):
            rotation = rotation.float() if left <= in_float32 else rotation
            rotation = rotation @ rotation
        return float((rotation - exact.detach()[0].flatten(0, 1)).abs().max())

    assert error(0) < 1e-10 < error(1) < 3e-7 and error(2) < 5e-7
    assert 1e-6 < error(squarings) < 2e-5 < error(squarings + 1) < 1e-3

    weight = torch.randn(exact.shape)
    (expected,) = torch.autograd.grad((exact * weight).sum(), leaf)
    expected = 0.5 * (expected - expected.mT)

    def gradient_error(dtype):
        arguments = positions.to(dtype), generators.to(dtype), exact.detach().float(), weight
        _, found = batched_rotations_backward(*arguments, squarings + 1, needs_positions=False)
        return float((found - expected).abs().max() / expected.abs().max())

    assert gradient_error(torch.float64) < 5e-7 and gradient_error(torch.float32) > 1e-5
