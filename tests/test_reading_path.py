"""What a reader of LieRE8 meets, from the classifier of an image to R(p)q: the files that a forward pass enters."""

import sys
from pathlib import Path

import torch

import hf_liere


PACKAGE = Path(hf_liere.__file__).parent


def entered_files():
    """The files of the package in the order in which a forward pass enters them, again after each change of file."""
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
        if event == "call" and path.is_relative_to(PACKAGE) and (not entered or entered[-1] != path):
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


def test_the_way_of_the_data_is_read_in_one_sitting():
    entered = entered_files()
    everything = set(entered)
    # Of what really runs, with the kernels for CPUs.
    found = len(everything), lines(everything), len(entered)
    assert found[0] <= 18 and found[1] <= 3900 and found[2] <= 90, (found, sorted(path.stem for path in everything))
