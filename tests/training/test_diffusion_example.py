"""The example of a small diffusion transformer: its scenes, and that it runs and resumes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hf_liere.errors import InputError
from training.data.scenes import scene


diffusers = pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
from training import diffusion_example  # noqa: E402
from training.diffusion_example import MODEL, VARIANTS, main, to_pictures, to_tokens, train  # noqa: E402


def test_a_scene_is_the_same_at_every_size():
    for index in range(20):
        (small, label), (large, again) = scene("validation", index, 32), scene("validation", index, 64)
        assert label == again and small.min() >= -1 and small.max() <= 1
        # They differ only where an edge crosses a pixel.
        assert np.abs(large.reshape(32, 2, 32, 2, 3).mean((1, 3)) - small).mean() < 0.02


def test_tokens_are_patches_row_by_row():
    pictures = torch.from_numpy(np.stack([scene("train", index, 32)[0] for index in range(2)]))
    tokens = to_tokens(pictures)
    assert torch.equal(tokens[1, 9], pictures[1, 4:8, 4:8].flatten())
    assert np.array_equal(to_pictures(tokens, 32), ((pictures + 1) * 127.5).round().byte().numpy())


def test_an_interrupted_run_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(diffusion_example, "SAVE_EVERY", 1)
    small = MODEL | {"num_single_layers": 1, "num_attention_heads": 1}

    def run(name, stop=None):
        torch.manual_seed(0)
        model = diffusers.FluxTransformer2DModel(**small)

        def scenes(step):
            if step == stop:
                raise KeyboardInterrupt
            return range(2 * step, 2 * step + 2)

        train(model, tmp_path / name, scenes, 32, steps=3, rate=1e-3, seed=0)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=2)
    assert torch.equal(run("stopped"), run("whole"))


def test_the_example_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diffusion_example, "LEVELS", diffusion_example.LEVELS[::4])
    monkeypatch.setattr(diffusion_example, "SAMPLES", 1)
    flags = ["--steps", "2", "--tuning_steps", "2", "--sampling_steps", "1", "--evaluated", "1"]
    means = main([*flags, "--output_dir", str(tmp_path)])
    assert list(means) == list(VARIANTS) and len(set(means.values())) == len(means)
    assert f"  as trained              {means['as trained']:.4f}\n" in capsys.readouterr().out
    losses = json.loads((tmp_path / "losses.json").read_text())["losses"]
    assert np.mean(losses["NTK"]) == pytest.approx(means["NTK"])
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.height > (len(VARIANTS) + 1) * 64
    for name in ("transformer/config.json", "frequencies/rotary.safetensors"):
        assert (tmp_path / name).stat().st_size > 0
    with pytest.raises(InputError, match="contains a run with .*'steps': 2.* accepted: another --output_dir"):
        main([*flags, "--steps", "3", "--output_dir", str(tmp_path)])
