"""training/clip_finetuning.py on a vision tower with RoPE: DINOv3 beside the text tower of CLIP."""

import pytest
import torch
import transformers
from clip_training import ZeroShot, accuracies, but_for_rounding, measured_again, train
from safetensors.torch import load_file
from slow_cases import slow_except
from training_helpers import write_dual_encoder, write_images

from hf_liere import is_patched, load_rotary, rotary_parameters
from training.clip_finetuning import main


ROTATING = "--head zero_shot --rotary_init pretrained --eval_image_sizes 16 24".split()
# Mean and deviation of DINOv3's processor.
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
ENCODINGS = {
    "planes": ["--position_encoding", "rope_mixed", "--block_size", "2"],
    "blocks": ["--position_encoding", "liere"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), 24, 13, 24)


@pytest.fixture(scope="module")
def dual_encoder(tmp_path_factory):
    return write_dual_encoder(tmp_path_factory.mktemp("dual_encoder"))


@pytest.mark.parametrize("kind", slow_except(("blocks",), ENCODINGS))
def test_whole_models_train_reload_and_evaluate(kind, dual_encoder, data, tmp_path):
    results = accuracies(train(tmp_path, dual_encoder, data, *ROTATING, *ENCODINGS[kind]))
    assert list(results) == [("patched", 16), ("patched", 24), ("unpatched", 16), ("unpatched", 24)]
    for name in ("patched", "unpatched"):
        model = transformers.AutoModel.from_pretrained(tmp_path / name)
        assert is_patched(model) == (name == "patched")
        for size in (16, 24):
            assert results[name, size] == measured_again(ZeroShot(model, tmp_path / name, *IMAGENET), data, size)
    before, after = load_file(f"{dual_encoder}/model.safetensors"), load_file(tmp_path / "patched/model.safetensors")
    changed = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert any("rotary_encoding" in name for name in changed) and "visual_projection.weight" in changed
    assert not any(name.startswith("text_") for name in changed)
    flags = ["--do_eval", "--use_cpu", "true", "--disable_tqdm", "true", "--head", "zero_shot", *ROTATING[-3:]]
    folders = ["--model_name_or_path", str(tmp_path / "patched"), "--output_dir", str(tmp_path / "again")]
    again = accuracies(main([*folders, *data, *flags]))
    for size in (16, 24):
        assert again["", size] == but_for_rounding(results["patched", size])


@pytest.mark.parametrize("kind", slow_except(("blocks",), ENCODINGS))
def test_adapters_load_again_by_their_own_libraries(kind, dual_encoder, data, tmp_path):
    peft = pytest.importorskip("peft")
    flags = [*ROTATING, *ENCODINGS[kind], "--trainable", "lora+rotary", "--baseline", "false", "--lora_rank", 2]
    found = accuracies(train(tmp_path, dual_encoder, data, *flags))
    folder = tmp_path / "patched"
    base = transformers.AutoModel.from_pretrained(dual_encoder)
    model = peft.PeftModel.from_pretrained(load_rotary(base, folder / "rotary"), folder / "lora")
    assert found["patched", 16] == measured_again(ZeroShot(model, folder, *IMAGENET), data, 16)
    names = {name for name, _ in rotary_parameters(base)}
    assert names and all(name.startswith("vision_model.rotary_encoding.") for name in names)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rotary_init", "zeros"], "already rotates query and key .*rotary_init='pretrained'"),
        (["--target", "text_model"], "target='text_model' computes no rotations; modules that do: .'vision_model'"),
        (["--position_encoding", "comrope_ld", "--block_size", 16], "rotates .4, 4. planes by its axes"),
        (["--head", "classifier"], "Unrecognized configuration class"),
    ],
)
def test_what_a_tower_with_rope_does_not_take(flags, message, dual_encoder, data, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, dual_encoder, data, *ROTATING, *ENCODINGS["blocks"], *flags)
    assert not list(tmp_path.iterdir())
