"""Inference computes the rotations of a grid once, and never uses those of other generators."""

import copy
import pickle
import threading

import patching_cases
import pytest
import torch
from encoding_cases import ENCODINGS, perturb
from encoding_cases import fields as fields_of

import hf_liere
from hf_liere.encoding import rotary_encoding as rotation_cache
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.encoding.positions import TokenPositions


# Each share of a head has a cache of its own.
ONE_CACHE = [name for name in ENCODINGS if name != "shares"]


@pytest.fixture
def computed(monkeypatch):
    """The grids for which rotations are really computed, one after the other."""
    grids = []

    def recorded(original):
        def layer_rotations(self, positions, *arguments):
            grids.append(getattr(positions, "grid", None))
            return original(self, positions, *arguments)

        return layer_rotations

    for ancestor in {ancestor for encoding in KINDS.values() for ancestor in encoding.mro()}:
        if "layer_rotations" in vars(ancestor):
            monkeypatch.setattr(ancestor, "layer_rotations", recorded(ancestor.layer_rotations))
    return grids


def build(tiny, encoding, **fields):
    return hf_liere.LieREViTModel(tiny(**fields_of(encoding), **fields)).eval()


@pytest.mark.parametrize("encoding", ONE_CACHE)
def test_a_size_is_computed_once(tiny, computed, encoding):
    model, images = build(tiny, encoding), {size: torch.randn(2, 3, size, size) for size in (16, 32)}
    expected = {size: model(pixels).last_hidden_state for size, pixels in images.items()}
    computed.clear()
    for mode in (torch.no_grad, torch.inference_mode):
        for size in (16, 32, 16, 32):
            with mode():
                assert torch.equal(model(images[size]).last_hidden_state, expected[size])
    assert len(computed) == 2
    # What inference stored is of no use for gradients, and in nobody's way.
    model.train()(images[16]).last_hidden_state.sum().backward()
    assert len(computed) == 3


def test_other_coordinates_of_a_grid_are_seen(tiny):
    """A table that is read at coordinates and rotations give the prefix different places on the same grid."""
    model, grid = build(tiny, "liere", coordinates="index"), (4, 4)
    positions = model.grid_positions(grid, torch.device("cpu"))
    with torch.no_grad():
        first = model.rotary_encoding(positions)[0].blocks
        scaled = positions._replace(coordinates=positions.locate().coordinates * 2)
        second = model.rotary_encoding(scaled)[0].blocks
        assert torch.equal(first, model.rotary_encoding(positions)[0].blocks)
    torch.testing.assert_close(second, first @ first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("encoding", ONE_CACHE)
def test_the_layer_keeps_what_it_computed(computed, encoding, shared):
    size = fields_of(encoding, wanted=8).get("block_size")
    rotary = hf_liere.LieRotaryEmbedding(2, 24, 2, encoding, size, num_layers=2, share_layers=shared).eval()
    perturb(rotary)
    grids = [hf_liere.grid_positions(grid, "index", num_prefix_tokens=1) for grid in ((3, 4), (4, 3))]
    states = torch.randn(1, 2, 13, 24)
    expected = [[rotary(states, states, grid, layer=layer) for layer in range(2)] for grid in grids]
    computed.clear()
    for mode in (torch.no_grad, torch.inference_mode):
        for index in (0, 1, 0):
            for layer in range(2):
                with mode():
                    found = rotary(states, states, grids[index], layer=layer)
                    assert torch.equal(rotary.rotate(states, grids[index], layer=layer), found[0])
                assert all(map(torch.equal, found, expected[index][layer]))
    # Of two grids, for every layer that has generators of its own.
    assert len(computed) == 2 * rotary.encoding.layers
    with torch.no_grad():
        for parameter in rotary.parameters():
            parameter.data.mul_(1.5)
            found = rotary(states, states, grids[0], layer=1)
            assert not torch.allclose(found[0], expected[0][1][0])
            expected[0][1] = found
            fresh = copy.deepcopy(rotary)(states, states, grids[0], layer=1)
            assert all(map(torch.equal, found, fresh))


def test_nothing_is_stored_beyond_inference(tiny, computed):
    model, pixels = build(tiny, "liere"), torch.randn(1, 3, 16, 16)
    model(pixels)
    with torch.no_grad():
        model.train()(pixels)
        given = torch.rand(16, 2)
        model.eval()(pixels, positions=given)
    assert not model.rotary_encoding.cache.stored and len(computed) == 3


def test_memory_is_bounded(tiny, computed, monkeypatch):
    """The grid that was stored first goes first; one that is too large by itself is never stored."""
    model = build(tiny, "liere")
    images = [torch.randn(1, 3, size, size) for size in (16, 24, 32)]
    entries = model.rotary_encoding.cache.stored
    with torch.no_grad():
        for pixels in images:
            model(pixels)
        sizes = [entry.num_bytes() for entry in entries.values()]
        assert len(sizes) == 3
        monkeypatch.setattr(rotation_cache, "CACHE_BYTES", sizes[1] + sizes[2])
        model.rotary_encoding.cache.clear()
        for pixels in images:
            model(pixels)
        assert [entry.num_bytes() for entry in entries.values()] == sizes[1:]
        monkeypatch.setattr(rotation_cache, "CACHE_BYTES", sizes[0] - 1)
        model.rotary_encoding.cache.clear()
        for pixels in images:
            model(pixels)
    assert not entries


def test_copies_and_files_are_without_it(tiny, tmp_path):
    model, pixels = build(tiny, "comrope_ap"), torch.randn(1, 3, 16, 16)
    names = set(model.state_dict())
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
    assert set(model.state_dict()) == names and model.rotary_encoding.cache.stored
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.rotary_encoding.cache.stored
        assert torch.equal(other(pixels).last_hidden_state, expected)


def test_threads_get_the_rotations_of_their_own_size(tiny):
    model = build(tiny, "liere")
    images = [torch.randn(1, 3, size, size) for size in (16, 24, 32, 40)]
    expected = [model(pixels).last_hidden_state for pixels in images]
    wrong = []

    def infer(index):
        with torch.no_grad():
            found = [model(images[index]).last_hidden_state for _ in range(10)]
        wrong.extend(index for states in found if not torch.equal(states, expected[index]))

    threads = [threading.Thread(target=infer, args=(index % 4,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_patched_model_keeps_them_too(computed):
    case = patching_cases.CASES["clip_vision"]
    model, inputs = case.build(), case.inputs()
    hf_liere.patch(model, hf_liere.RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="normal"))
    model.eval()
    with torch.no_grad():
        results = [model(**inputs).last_hidden_state for _ in range(3)]
    assert len(computed) == 1
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld"])
def test_a_replica_of_data_parallel_sees_changed_generators(tiny, encoding):
    """Replicas share the attributes of their module, the cache included, and have tensors instead of parameters."""
    module = build(tiny, encoding).rotary_encoding
    positions = TokenPositions.from_grid((4, 4), (4, 4), "index", 1)
    with torch.no_grad():
        before = module(positions)[0].matrices()
        replica = module._replicate_for_data_parallel()
        for name, parameter in module.named_parameters():
            setattr(replica, name, parameter * 1.5)
            parameter.mul_(1.5)
        found = replica(positions)[0].matrices()
        assert not torch.allclose(found, before)
        assert torch.equal(found, module(positions)[0].matrices())
