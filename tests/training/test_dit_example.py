"""The small diffusion transformers: their scenes, and that a run goes on, moves positions and draws."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from hf_liere.errors import InputError
from training import dit_example
from training.data.scenes import scene
from training.dit_example import DiT, main
from training.engine import flow
from training.engine.flow import to_pictures, to_tokens


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
    monkeypatch.setattr(flow, "SAVE_EVERY", 1)

    def run(name, stop=None):
        torch.manual_seed(0)
        model = DiT(position_rescale=2.0)

        def scenes(step):
            if step == stop:
                raise KeyboardInterrupt
            return range(2 * step, 2 * step + 2)

        flow.train(model, tmp_path / name, 6, 0, scenes)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=5)
    assert torch.equal(run("stopped"), run("whole"))


def test_positions_move_in_training_alone():
    torch.manual_seed(0)
    model = DiT(position_shift=0.5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    inputs = torch.randn(1, 64, 48), torch.tensor([2]), torch.tensor([0.5])
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


def test_the_example_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flow, "LEVELS", flow.LEVELS[::4])
    monkeypatch.setattr(dit_example, "SAMPLES", 1)
    flags = ["--steps", "5", "--sampling_steps", "1", "--evaluated", "1", "--output_dir", str(tmp_path)]
    losses = main(flags)
    assert list(losses) == ["continued", "fitted"] and len(set(losses.values())) == 2
    assert f"  fitted      {losses['fitted']:.4f}\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.height > 3 * 64
    with pytest.raises(InputError, match="contains a run with .*2.0.* accepted: another --output_dir"):
        main([*flags, "--position_rescale", "1.5"])
