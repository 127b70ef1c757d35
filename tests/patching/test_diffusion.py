"""Learned rotations in the transformers of diffusers."""

import pytest
import torch

from hf_liere import is_patched, patch, rotary_parameters, unpatch


diffusers = pytest.importorskip("diffusers", reason="the extra `diffusers` is not installed")
from diffusion_cases import BLOCKS, BY_NAME, CASES, PLANES, ZEROS, run  # noqa: E402


ROTATING = [case for case in CASES if case.rotates]
PLAIN = [case for case in CASES if not case.rotates]
FLUX, COGVIDEOX = BY_NAME["FluxTransformer2DModel"], BY_NAME["CogVideoXTransformer3DModel"]
CONFIGS = [(case, config) for case in CASES for config in ((PLANES, BLOCKS) if case.rotates else (ZEROS,))]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
rotating = pytest.mark.parametrize("case", ROTATING, ids=lambda case: case.name)
patched = pytest.mark.parametrize(
    ("case", "config"), CONFIGS, ids=[f"{case.name}-{config.position_encoding}" for case, config in CONFIGS]
)


def gradients(model, inputs):
    model.zero_grad()
    run(model, inputs).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def randomize(model, scale=0.05):
    generator = torch.Generator().manual_seed(5)
    for _, parameter in rotary_parameters(model):
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@patched
def test_start_gradients_and_unpatching(case, config):
    """
    Learned frequencies and rotations that start at zero leave the same bits, and blocks are within rounding; so are
    the gradients of the weights, which proves that nothing between them changed.
    """
    model, inputs = case.build(), case.inputs()
    kind, before, plain = type(model), run(model, inputs), gradients(model, inputs)
    patch(model, config)
    after, learned = run(model, inputs), gradients(model, inputs)
    if config is BLOCKS:
        assert (after - before).abs().max() < 1e-5
    else:
        assert torch.equal(after, before)
    for name, gradient in plain.items():
        # The angles of LTX reach 15,000 radians, so that its own float32 is off by 1e-3 where blocks are exact.
        tolerance = 1e-2 if case.name.startswith("LTX") and config is BLOCKS else 1e-4
        assert (learned.pop(name) - gradient).abs().max() <= tolerance * gradient.abs().max() + 1e-7, name
    assert learned.keys() == {name for name, _ in rotary_parameters(model)}
    for gradient in learned.values():
        if "ZImage" in case.name:
            # The second attention module sees the text alone, whose positions are on the first axis.
            text = gradient[1] if config is PLANES else gradient[:, 1].movedim(0, -1)
            first = case.axes[0] // 2 if config is PLANES else 1
            assert text[..., :first].any() and not text[..., first:].any()
            gradient = gradient[[0, 2, 3]] if config is PLANES else gradient[:, [0, 2, 3]]
        assert gradient.isfinite().all() and gradient.any(-1).all()
    randomize(model)
    assert (run(model, inputs) - before).abs().max() > 1e-4
    unpatch(model)
    assert type(model) is kind and not is_patched(model) and torch.equal(run(model, inputs), before)


@rotating
def test_learned_frequencies_are_those_of_another_base(case):
    """The model with δ = ln(ω′/ω) computes what diffusers computes with θ′, whose frequencies are ω′."""
    model, other, inputs, start = case.build(), case.build(), case.inputs(), case.frequencies()
    patch(model, PLANES)
    table = model.rotary_patch.table
    own = torch.tensor(table.frequencies, dtype=torch.float64)[table.num_unrotated :]
    assert torch.allclose(own, start, rtol=1e-6, atol=0)
    with torch.no_grad():
        before, expected = run(model, inputs), run(other, case.set_base(other, inputs, 500.0))
        model.rotary_encoding.log_factors.copy_((case.frequencies(500.0) / start).log())
        # Angles of LTX are rounded to float32 by diffusers, see above.
        tolerance = 1e-4 if case.name.startswith("LTX") else 1e-5
        assert (run(model, inputs) - expected).abs().max() < tolerance < 1e-3 < (before - expected).abs().max()
