"""How many operations of PyTorch rotations take on accelerators, each a launch."""

import pytest
import torch
from launches import count_operations
from slow_cases import slow_except

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.encoding.positions import TokenPositions
from hf_liere.fast.dispatch import as_on_accelerators


LAYERS = 12
# Of twelve layers.
MAKING = {
    ("rope_mixed", 2): 60,
    ("axial_rope", 2): 60,
    ("comrope_ld", 4): 150,
    ("comrope_ld", 8): 150,
    ("comrope_ld", 16): 150,
    ("comrope_ap", 8): 150,
    ("liere", 4): 120,
    ("liere", 8): 200,
    ("liere", 16): 200,
    ("liere", 64): 200,
}
STEPS = [("rope_mixed", 2), ("liere", 4), ("liere", 8), ("liere", 16), ("liere", 64), ("comrope_ld", 8)]


@pytest.fixture(autouse=True)
def on_accelerators():
    with as_on_accelerators():
        yield


def build(encoding, block_size, grid):
    config = LieREViTConfig(
        position_encoding=encoding,
        block_size=block_size,
        image_size=[4 * size for size in grid],
        patch_size=4,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
        use_class_token=False,
        pooling="mean",
    )
    return LieREViTForImageClassification(config).train()


@pytest.mark.parametrize("samples", [None, 2], ids=["shared", "by sample"])
@pytest.mark.parametrize("encoding, block_size", MAKING, ids=lambda value: str(value))
def test_rotations_of_all_layers_take_few_operations(encoding, block_size, samples):
    grid = (7, 9) if block_size < 16 else (3, 3)
    encoder = next(
        module for module in build(encoding, block_size, grid).modules() if "rotary_encoding" in module._modules
    )
    positions = encoder.grid_positions(grid, torch.device("cpu"))
    if samples:
        positions = TokenPositions(torch.rand(samples, grid[0] * grid[1], 2))

    def make_and_go_back():
        rotations = list(encoder.rotary_encoding(positions))
        # The stand-ins for outer products take the gradients of cos and sin.
        made = [
            tensor
            for rotation in rotations
            for name, tensor in rotation._asdict().items()
            if tensor is not None and not (name == "cos_sin" and getattr(rotation, "outer", None) is not None)
        ]
        learned = [tensor for tensor in made if tensor.requires_grad]
        if learned:
            torch.autograd.backward(learned, [torch.zeros(1).expand_as(tensor) for tensor in learned])

    # Grids are located by a dozen operations and each gradient here is a constant.
    assert count_operations(make_and_go_back) <= MAKING[encoding, block_size] + 13 + LAYERS * 2


@pytest.mark.parametrize(
    "encoding, block_size, samples",
    # Exponentials of the largest blocks, of every sample, take seconds.
    slow_except(
        [(*step, samples) for step in STEPS for samples in (None, 2) if (step[1], samples) != (64, 2)],
        [(*step, samples) for step in STEPS for samples in (None, 2)],
    ),
)
def test_a_step_takes_few_operations_more_than_with_a_table(encoding, block_size, samples):
    grid = (8, 8) if block_size < 16 else (3, 3)
    inputs = {"pixel_values": torch.randn(2, 3, 4 * grid[0], 4 * grid[1]), "labels": torch.tensor([0, 1])}
    plain, model = build("absolute", None, grid), build(encoding, block_size, grid)
    given = {"positions": torch.rand(samples, grid[0] * grid[1], 2)} if samples else {}
    allowed = 1.3 * count_operations(lambda: plain(**inputs).loss.backward())
    assert count_operations(lambda: model(**inputs, **given).loss.backward()) <= allowed
