"""What accelerators compute, on CPUs: the same models, with the rotations of all layers in one batch."""

import pytest
import torch
from encoding_cases import ENCODINGS, block_size

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.fast.dispatch import as_on_accelerators, plain_operations


SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
GRIDS = {"image_size": 32, "patch_size": 8}


def results(model, pixel_values, context):
    """Logits, and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(1)
    with context():
        output = model(pixel_values, labels=torch.tensor([0, 1]))
        output.loss.backward()
    return {"logits": output.logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    "fields",
    [{}, {"share_heads": True}, {"share_layers": True}, {"patch_dropout_prob": 0.3}, {"rotate_prefix": True}],
    ids=str,
)
@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in ("none", "absolute")])
def test_models_are_those_of_cpus(encoding, fields):
    for size in {block_size(encoding, wanted=wanted) for wanted in (2, 4, 8)}:
        config = LieREViTConfig(position_encoding=encoding, block_size=size, **SIZES, **GRIDS, **fields)
        model = LieREViTForImageClassification(config).train()
        pixel_values = torch.randn(2, 3, 32, 24)
        found, expected = (results(model, pixel_values, context) for context in (as_on_accelerators, plain_operations))
        for name, value in expected.items():
            # float32 sums in another order.
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}, block_size={size}")


def test_norms_that_are_too_large_give_nan():
    """The number of squarings suffices up to 3.2 · 2¹⁶, whatever the host does not read."""
    config = LieREViTConfig(position_encoding="liere", block_size=8, **SIZES, **GRIDS)
    model = LieREViTForImageClassification(config).eval()
    with torch.no_grad(), as_on_accelerators():
        for factor, is_finite in ((1e3, True), (1e5, False)):
            for _, parameter in model.rotary_parameters():
                parameter.mul_(factor)
            assert model(torch.randn(1, 3, 32, 32)).logits.isfinite().all() == is_finite
