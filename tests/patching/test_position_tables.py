"""The absolute table of a patched model: interpolated, read at the nearest entry, faded and dropped."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from patching_cases import CASES, build, randomize, run, same_bits
from patching_checks import SHARED_CONFIG

from hf_liere import patch, set_absolute_weight, unpatch
from hf_liere.patching.vision_towers import find_towers, position_table


# transformers' own interpolation of ViViT's table fails.
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].other_size and name != "vivit"])
def test_other_sizes_start_as_the_model_with_its_interpolated_table(name):
    model, _ = build(name)
    inputs = CASES[name].inputs(CASES[name].other_size)
    native = {} if name in ("siglip2", "dinov2", "dinov2_registers") or "beit" in name else NATIVE
    expected = run(model, inputs, **native)
    patch(model, SHARED_CONFIG)
    assert same_bits(run(model, inputs), expected)
    randomize(model)
    assert not same_bits(run(model, inputs), expected)


def test_clips_of_other_sizes_and_lengths_read_the_table_in_between():
    model, inputs = build("vivit")
    patch(model, SHARED_CONFIG)
    table = model.embeddings.position_embeddings
    with torch.no_grad():
        # A table that is linear in the frame, row and column stays so between its entries.
        frame, row, column = torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij")
        table[0, 1:] = (frame + 10 * row + 100 * column).flatten().unsqueeze(-1)
    added = {}
    model.embeddings.register_forward_hook(lambda module, args, output: added.update(tokens=output))
    model.embeddings.patch_embeddings.register_forward_hook(lambda module, args, output: output * 0)
    model(pixel_values=torch.randn(1, 8, 3, 12, 8))
    frame, row, column = torch.meshgrid(
        # Four frames of the grid lie at −¼, ¼, ¾, 1¼ of the trained two, the outer ones at its border.
        torch.tensor([0, 0.25, 0.75, 1]),
        torch.tensor([0, 0.5, 1]),
        torch.tensor([0.0, 1]),
        indexing="ij",
    )
    expected = (frame + 10 * row + 100 * column).flatten()
    torch.testing.assert_close(added["tokens"][0, 1:, 0], expected, rtol=0, atol=1e-4)
    unpatch(model)
    assert "interpolate_pos_encoding" not in vars(model.embeddings)


NATIVE = {"interpolate_pos_encoding": True}
WITH_TABLE = [name for name in CASES if name != "beit_relative"]


def sizes_of(name):
    return [size for size in (CASES[name].size, CASES[name].other_size) if size]


@pytest.mark.parametrize("name", WITH_TABLE)
def test_absolute_table_dropped_and_faded_as_if_its_weights_were(name):
    """To the last bit: reading a table between its entries is linear, and a half is a power of two."""
    model, _ = build(name)
    table = patch_table(model)
    original = table.clone()
    for size in sizes_of(name):
        inputs = CASES[name].inputs(size)
        expected = {}
        for factor in (1.0, 0.5, 0.0):
            table.copy_(original * factor)
            patch(model, SHARED_CONFIG)
            expected[factor] = run(model, inputs)
            unpatch(model)
        table.copy_(original)
        patch(model, replace(SHARED_CONFIG, keep_absolute="fade"))
        for factor in expected:
            set_absolute_weight(model, factor)
            assert same_bits(run(model, inputs), expected[factor]), (size, factor)
        unpatch(model)
        patch(model, replace(SHARED_CONFIG, keep_absolute="drop"))
        assert same_bits(run(model, inputs), expected[0.0])
        unpatch(model)
        assert torch.equal(patch_table(model), original)
        assert not same_bits(expected[1.0], expected[0.0])


def patch_table(model):
    """View of the table's rows of patches."""
    (tower,) = find_towers(model)
    return position_table(tower.embeddings).data[-math.prod(tower.train_grid) :]


@pytest.mark.parametrize("name", [name for name in WITH_TABLE if not name.endswith("pretraining")])
def test_table_at_train_size_is_read_at_the_index_of_each_patch(name):
    """A patch beyond the trained grid reads the nearest entry; expected by loops over a table of indices."""
    model, _ = build(name)
    patch(model, replace(SHARED_CONFIG, keep_absolute="train_size"))
    tower = model.get_submodule(CASES[name].tower)
    embeddings = tower.get_submodule(tower.rotary_patch.embeddings_name)
    is_video, trained = len(tower.rotary_patch.train_grid) == 3, tower.rotary_patch.train_grid
    rows = patch_rows(tower.rotary_patch, embeddings)
    with torch.no_grad():
        rows.copy_(torch.arange(len(rows)).unsqueeze(-1).expand_as(rows))
        for module in embeddings.modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d | torch.nn.Linear):
                for parameter in module.parameters():
                    parameter.zero_()
    seen = {}
    embeddings.register_forward_hook(lambda module, args, output: seen.update(tokens=output))
    inputs = {"pixel_values": torch.randn(2, 8, 3, 8, 8)} if is_video else CASES[name].inputs((24, 16))
    grid = (4, 2, 2) if is_video else (6, 4)
    if name.startswith("vit_mae"):
        inputs["noise"] = torch.arange(24.0).expand(2, 24)
    model(**inputs)
    tokens = seen["tokens"][0] if isinstance(seen["tokens"], tuple) else seen["tokens"]
    expected = []
    for indices in itertools.product(*map(range, grid)):
        row = 0
        for index, size in zip(indices, trained):
            row = row * size + min(index, size - 1)
        expected.append(float(row))
    found = tokens[0, CASES[name].prefix :, 0].tolist()
    assert found == expected[: len(found)] and len(found) >= 12


def patch_rows(patch, embeddings):
    table = position_table(embeddings) if patch.fixed_table is None else patch.fixed_table.squeeze(0)
    return table.data[-math.prod(patch.train_grid) :]


def test_longer_clips_of_a_model_with_a_fixed_table():
    """VideoMAE's own code takes one height and width, but now any length; unpatched it takes neither."""
    model, _ = build("videomae")
    longer = {"pixel_values": torch.randn(2, 8, 3, 8, 8)}
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(**longer)
    before = model.videomae.embeddings.position_embeddings
    patch(model, SHARED_CONFIG)
    seen = {}
    model.videomae.embeddings.register_forward_hook(lambda module, args, output: seen.update(tokens=output))
    model.videomae.embeddings.patch_embeddings.register_forward_hook(lambda module, args, output: output)
    assert model(**longer).logits.isfinite().all() and seen["tokens"].shape[1] == 16
    with pytest.raises(ValueError, match="doesn't match model"):
        model(pixel_values=torch.randn(2, 4, 3, 16, 16))
    unpatch(model)
    assert model.videomae.embeddings.position_embeddings is before


@pytest.mark.parametrize("keep_absolute, size", [("train_size", (24, 16)), ("drop", (24, 16)), ("fade", (16, 16))])
def test_offloaded_tables_are_read(keep_absolute, size):
    accelerate = pytest.importorskip("accelerate")
    model, _ = build("clip_vision")
    patch(model, replace(SHARED_CONFIG, keep_absolute=keep_absolute))
    inputs = CASES["clip_vision"].inputs(size)
    expected = run(model, inputs)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert same_bits(run(offloaded, inputs), expected)
