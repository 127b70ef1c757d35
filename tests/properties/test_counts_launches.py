"""How many operations of PyTorch rotations take on accelerators, each a launch, and that the host reads no value."""

import pytest
import torch
from launches import count_operations

from hf_liere import LieREViTConfig, LieREViTForImageClassification
from hf_liere.models.encoding.positions import TokenPositions
from hf_liere.models.fast.dispatch import as_on_accelerators


LAYERS = 12
# Of twelve layers, and the reads of values that eigenvalues need.
MAKING = {
    ("rope_mixed", 2): (60, 0),
    ("axial_rope", 2): (60, 0),
    ("comrope_ld", 4): (150, 1),
    ("comrope_ld", 8): (150, 1),
    ("comrope_ld", 16): (150, 1),
    ("comrope_ap", 8): (150, 1),
    ("liere", 4): (120, 0),
    ("liere", 8): (200, 0),
    ("liere", 16): (200, 0),
    ("liere", 64): (200, 0),
}
# A whole training step beside that of a model with a table of positions.
STEPS = {("rope_mixed", 2): 1.3, ("liere", 4): 1.3, ("liere", 8): 1.3, ("comrope_ld", 8): 1.35}


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
    grid = (3, 3) if block_size == 64 else (7, 9)
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

    operations, reads = count_operations(make_and_go_back)
    most, reads_at_most = MAKING[encoding, block_size]
    # Grids are located by a dozen operations and each gradient here is a constant.
    assert operations <= most + 13 + LAYERS * 2 and reads <= reads_at_most


@pytest.mark.parametrize("encoding, block_size", STEPS, ids=lambda value: str(value))
def test_a_step_takes_few_operations_more_than_with_a_table(encoding, block_size):
    pixel_values, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    found = []
    for name, size in (("absolute", None), (encoding, block_size)):
        model = build(name, size, (8, 8))
        found.append(count_operations(lambda model=model: model(pixel_values, labels=labels).loss.backward()))
    (plain, _), (operations, reads) = found
    assert operations <= STEPS[encoding, block_size] * plain
    assert reads <= (encoding == "comrope_ld")


@pytest.mark.parametrize("encoding, block_size", [("rope_mixed", 2), ("liere", 4), ("liere", 8), ("comrope_ld", 8)])
def test_inference_reads_no_value(encoding, block_size):
    """Not even to see whether rotations of the last pass are still right."""
    model, pixel_values = build(encoding, block_size, (4, 4)).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        _, reads = count_operations(lambda: model(pixel_values))
    assert reads <= (encoding == "comrope_ld")
