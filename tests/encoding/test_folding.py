"""Folded models compute what the model they were made from computes, and are for inference only."""

import accelerate
import pytest
import torch
from encoding_cases import FOLDABLE, block_size, perturb
from fresh_process import run_code
from huggingface_hub.errors import StrictDataclassError
from torch.nn.utils.prune import l1_unstructured
from transformers import AutoModelForImageClassification

import hf_liere


CASES = [
    *((encoding, {"block_size": block_size(encoding)}) for encoding in FOLDABLE),
    ("comrope_ld", {"block_size": 8, "rotary_init": "zeros", "qkv_bias": False}),
    ("liere", {"block_size": 8, "rotate_prefix": True, "num_register_tokens": 2}),
    ("liere", {"block_size": 5, "share_heads": True, "share_layers": True, "rotate_values": True}),
]


def model_of(tiny, encoding, fields, cls=hf_liere.LieREViTForImageClassification):
    torch.manual_seed(0)
    # What acts in training is not in the way of folding.
    training = {"position_perturbation": 0.2, "position_shift": 0.1, "position_jitter": 1.5, "position_rescale": 2.0}
    model = cls(tiny(position_encoding=encoding, initializer_range=0.1, **training, **fields))
    return (model if fields.get("rotary_init") == "zeros" else perturb(model)).eval()


@pytest.mark.parametrize("encoding, fields", CASES)
def test_folded_models_give_the_same_logits(tiny, encoding, fields, tmp_path):
    model = model_of(tiny, encoding, fields)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = model.fold_rotations(grids=[(4, 4), (2, 3)])
    assert model.config.folded_grids is None and model.config.position_perturbation == 0.2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert folded.config.position_perturbation == 0.0 and folded.config.position_rescale is None
    assert not any(p.requires_grad for p in folded.parameters())

    folded.save_pretrained(tmp_path)
    reloaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    # Two grids that were asked for, another one, and other positions.
    for size, given in (((16, 16), {}), ((8, 12), {}), ((20, 4), {}), ((16, 16), {"positions": torch.rand(16, 2)})):
        pixel_values = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected = model(pixel_values, **given).logits
            for other in (folded, reloaded):
                # Two layers in float32, rotated in another basis.
                torch.testing.assert_close(other(pixel_values, **given).logits, expected, rtol=0, atol=1e-5)


def test_constants_are_used_for_the_grids_that_were_asked_for(tiny, monkeypatch):
    folded = model_of(tiny, "liere", {"block_size": 8}).fold_rotations()
    assert folded.config.folded_grids == [[4, 4]]

    def refuse(*args):
        raise AssertionError("rotations were computed")

    monkeypatch.setattr("hf_liere.encoding.rotary_encoding.layer_block_rotations", refuse)
    folded(torch.randn(1, 3, 16, 16))
    with pytest.raises(AssertionError, match="were computed"):
        folded(torch.randn(1, 3, 16, 20))


@pytest.mark.parametrize("encoding", FOLDABLE)
def test_bases_fold_into_the_weights_and_leave_cosines(tiny, monkeypatch, encoding):
    folded = model_of(tiny, encoding, {"block_size": block_size(encoding)}).fold_rotations()
    assert folded.config.folded_grids == []
    monkeypatch.setattr("hf_liere.encoding.rotary_encoding.layer_block_rotations", None)
    for name in ("commuting_encodings.eigenbasis", "string_encodings.cayley_map", "string_encodings.fourier_basis"):
        monkeypatch.setattr(f"hf_liere.encoding.{name}", None)
    assert torch.isfinite(folded(torch.randn(1, 3, 8, 24)).logits).all()


@pytest.mark.slow
def test_a_folded_checkpoint_loads_by_its_file(tiny, tmp_path):
    folded = model_of(tiny, "comrope_ld", {"block_size": 8}).fold_rotations()
    folded.save_pretrained(tmp_path / "model")
    pixel_values = torch.randn(1, 3, 16, 16)
    torch.save({"pixel_values": pixel_values, "logits": folded(pixel_values).logits}, tmp_path / "expected.pt")
    code = """
        import torch
        from transformers import AutoModelForImageClassification
        model = AutoModelForImageClassification.from_pretrained("model", trust_remote_code=True)
        expected = torch.load("expected.pt", weights_only=True)
        torch.testing.assert_close(model(expected["pixel_values"]).logits, expected["logits"], rtol=0, atol=1e-6)
        assert model.config.folded_grids == [] and not model.training
    """
    run_code(code, tmp_path, package=None)


@pytest.mark.parametrize("change", [{"coordinates": "index"}, {"num_prefix_tokens": 0}, {"train_grid": (2, 2)}])
def test_constants_are_of_the_positions_of_the_model_alone(tiny, change):
    model = model_of(tiny, "liere", {"block_size": 8})
    positions = hf_liere.grid_positions(**{"grid": (4, 4), "num_prefix_tokens": 1, **change})
    moved = hf_liere.grid_positions((4, 4), num_prefix_tokens=1).moved(torch.randn(16, 2, dtype=torch.float64))
    folded = model.fold_rotations([(4, 4)]).liere.rotary_encoding
    for given in (positions, moved):
        expected = next(iter(model.liere.rotary_encoding(given))).blocks
        # The same exponentials, of a grid or of as many points.
        torch.testing.assert_close(next(iter(folded(given))).blocks, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld"])
def test_constants_of_a_loaded_model_learn_nothing(tiny, tmp_path, encoding):
    model_of(tiny, encoding, {"block_size": 8}).fold_rotations().save_pretrained(tmp_path)
    folded = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path)
    folded(torch.randn(1, 3, 16, 16)).logits.sum().backward()
    assert folded.classifier.weight.grad is not None
    assert all(parameter.grad is None for parameter in folded.liere.rotary_encoding.parameters())


def test_folded_models_do_not_train(tiny):
    folded = model_of(tiny, "comrope_ld", {"block_size": 8}).fold_rotations()
    with pytest.raises(ValueError, match=r"folded_grids=\[\]\), which is for inference"):
        folded.train()
    assert not folded.eval().training and not type(folded)(folded.config).training


def test_bad_input(tiny):
    folded = model_of(tiny, "comrope_ld", {"block_size": 8}).fold_rotations()
    with pytest.raises(ValueError, match=r"nothing to fold .*folded_grids=\[\]"):
        folded.fold_rotations()
    absolute = hf_liere.LieREViTForImageClassification(tiny(position_encoding="absolute"))
    with pytest.raises(ValueError, match="nothing to fold .*'absolute'"):
        absolute.fold_rotations()
    with pytest.raises(StrictDataclassError, match=r"\[4, 4, 4\] must be 2 numbers"):
        model_of(tiny, "liere", {"block_size": 8}).fold_rotations([(4, 4, 4)])
    adapted = model_of(tiny, "comrope_ld", {"block_size": 8})
    adapted.liere.layers[1].attention.k_proj = torch.nn.Sequential(adapted.liere.layers[1].attention.k_proj)
    with pytest.raises(ValueError, match="not into Sequential: merge adapters"):
        adapted.fold_rotations()
    with pytest.raises(ValueError, match="weights are offloaded .*fold before offloading"):
        accelerate.cpu_offload(model_of(tiny, "liere", {"block_size": 8})).fold_rotations()
    pruned = model_of(tiny, "liere", {"block_size": 8})
    l1_unstructured(pruned.classifier, "weight", amount=0.5)
    pruned(torch.randn(1, 3, 16, 16))
    with pytest.raises(ValueError, match="cannot be copied to be folded.*make pruning and parametrizations permanent"):
        pruned.fold_rotations()
