"""The example of a small FLUX runs, with every kind of frequencies."""

import json

import numpy as np
import pytest
from PIL import Image

from hf_liere.errors import InputError
from training.engine import flow


pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
from training import diffusion_example
from training.diffusion_example import VARIANTS, main


def test_the_example_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flow, "LEVELS", flow.LEVELS[::4])
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
