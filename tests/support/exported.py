"""Patched models to export, and the comparison of what an exported file computes with its model."""

import torch
from patching_cases import CASES, build, randomize
from rope_cases import build as build_rope

import hf_liere
from hf_liere.tools.export import run_exported


# float32 sums in another order; the documented bound for ONNX Runtime is 1e-4.
TOLERANCE = 1e-5


def patched(name, encoding, block_size=None):
    """A case with rotations away from their start, or the case itself, `plain`."""
    model, _ = (build if name in CASES else build_rope)(name)
    if encoding != "plain":
        start = {} if name in CASES else {"rotary_init": "pretrained"}
        config = hf_liere.RotaryPatchConfig(position_encoding=encoding, block_size=block_size, **start)
        randomize(hf_liere.patch(model, config))
    return model


@torch.no_grad()
def named_outputs(model, **inputs):
    found = {}
    for name, value in model.eval()(**inputs).items():
        found |= {f"{name}_{i}": x for i, x in enumerate(value)} if isinstance(value, tuple) else {name: value}
    return found


def check_exported(path, model, *shapes):
    """The file has the outputs of the model, and their names, for inputs of these shapes."""
    for shape in shapes:
        pixels = torch.randn(shape)
        found, expected = run_exported(path, pixels), named_outputs(model, pixel_values=pixels)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE)
