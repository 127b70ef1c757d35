"""What a reader of LieRE8 meets, from the classifier of an image to R(p)q: the files that a forward pass enters."""

import sys
from pathlib import Path

import torch

import hf_liere


MODELS = Path(hf_liere.__file__).parent / "models"
# A reader may skip how a result is pooled or kept, and the fields of the configuration.
SKIPPED = {"pooling", "rotation_cache", "configuration_liere"}


def entered_files(monkeypatch):
    """The files of `models` in the order in which a forward pass enters them, again after each change of file."""
    monkeypatch.setenv("HF_LIERE_CPU_KERNELS", "0")
    config = hf_liere.LieREViTConfig(
        position_encoding="liere",
        block_size=8,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    model, entered = hf_liere.LieREViTForImageClassification(config).eval(), []

    def follow(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(MODELS) and (not entered or entered[-1] != path):
            entered.append(path)

    before = sys.getprofile()
    with torch.no_grad():
        sys.setprofile(follow)
        try:
            model(torch.randn(2, 3, 32, 32))
        finally:
            sys.setprofile(before)
    return entered


def lines(paths):
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_the_way_of_the_data_is_read_in_one_sitting(monkeypatch):
    entered = entered_files(monkeypatch)
    path = {file for file in entered if file.parent.name != "fast" and file.stem not in SKIPPED}
    assert {file.stem for file in path} == {
        "modeling_liere",
        "embeddings",
        "placement",
        "positions",
        "rotary_encoding",
        "exponential",
        "layers",
        "rotation",
    }
    assert lines(path) <= 1550
    everything = set(entered)
    assert len(everything) <= 16 and lines(everything) <= 3000 and len(entered) <= 50
