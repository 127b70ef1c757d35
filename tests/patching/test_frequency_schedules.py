"""Schedules of the frequencies of diffusion transformers, and what is refused."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from patching_checks import refused
from torch import nn

from hf_liere import FrequencySchedule, ScheduleInput, patch, set_frequency_schedule, unpatch
from hf_liere.patching.libraries.schedules import METHODS


diffusers = pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
from diffusion_cases import BLOCKS, BY_NAME, CASES, PLANES, ZEROS, run, vary  # noqa: E402


FLUX, LTX = BY_NAME["FluxTransformer2DModel"], BY_NAME["LTXVideoTransformer3DModel"]
SCALED = [case for case in CASES if case.rotates and case is not LTX]
scaled = pytest.mark.parametrize("case", SCALED, ids=lambda case: case.name)
# The timestep of a clean image and that of noise.
CLEAN = {"ZImageTransformer2DModel": (1.0, 0.0)} | dict.fromkeys(("FluxTransformer2DModel",), (0.0, 1.0))
CLEAN |= dict.fromkeys(("Flux2Transformer2DModel", "QwenImageTransformer2DModel"), (0.0, 1.0))


class GivenFrequencies(nn.Module):
    """FLUX's rotary module with any frequencies, and a factor of cos and sin on every axis."""

    def __init__(self, frequencies, factors):
        super().__init__()
        self.frequencies, self.factors = frequencies, factors

    def forward(self, ids):
        axes = zip(ids.double().unbind(-1), self.frequencies)
        angles = torch.cat([torch.outer(p, torch.tensor(spectrum).double()) for p, spectrum in axes], -1)
        angles = angles.repeat_interleave(2, dim=-1)
        channels = torch.tensor([2 * len(spectrum) for spectrum in self.frequencies])
        factors = torch.tensor(self.factors).double().repeat_interleave(channels)
        return (angles.cos() * factors).float(), (angles.sin() * factors).float()


def clamp(value, low, high):
    return min(max(value, low), high)


def climb_ramp(spectrum, slowed, channels, trained, kappa, low, high, turns_around):
    """
    One ramp of YaRN in the code of DyPE: over ranks from `low` to `high` rotations, frequencies change from the slowed
    to those of the spectrum. `turns_around` as there, where both ends of a ramp are on one side of all planes.
    """

    def find_rank(rotations):
        if kappa * rotations == 0:
            return math.inf
        return channels * math.log(trained / (2 * math.pi * kappa * rotations)) / (2 * math.log(10000))

    first, last = find_rank(high), find_rank(low)
    if turns_around:
        first, last = max(math.floor(first), 0), min(math.ceil(last), channels // 2)
    else:
        first = math.floor(clamp(first, 0, channels // 2))
        last = math.ceil(clamp(last, 0, channels // 2))
    last += 0.001 * (first == last)
    ramp = [1 - clamp((i - first) / (last - first), 0, 1) for i in range(channels // 2)]
    return [(1 - kept) * slow + kept * fast for kept, slow, fast in zip(ramp, slowed, spectrum)]


def reference(method, channels, size, trained, kappa, turns_around=False):
    """The frequencies of one axis, by the formulas of the papers; κ of DyPE, 1 without it for YaRN."""
    spectrum = [10000 ** (-i / channels) for i in range(0, channels, 2)]
    if trained is None or size <= trained:
        return spectrum
    scale = size / trained
    if "yarn" not in method:
        scale **= kappa
    interpolated = [w / scale for w in spectrum]
    base = 10000 * scale ** (channels / (channels - 2))
    ntk = [base ** (-i / channels) for i in range(0, channels, 2)]
    if method == "vision_yarn":
        given = (channels, trained, kappa)
        slowed = climb_ramp(ntk, interpolated, *given, 0.75, 1.25, turns_around)
        return climb_ramp(spectrum, slowed, *given, 2, 16, turns_around)
    if method == "yarn":
        low, high = 0.1 * kappa, 0.4 * kappa
        ramp = [clamp((trained * w / (2 * math.pi) - low) / (high - low), 0, 1) for w in spectrum]
        return [(1 - kept) * slow + kept * w for kept, slow, w in zip(ramp, interpolated, spectrum)]
    return interpolated if method == "position_interpolation" else ntk


# DyPE's main variant for FLUX.1, axes of text, rows and columns: trained at 64 tokens, the size is 256 × 160.
FLUX_CHANNELS, FLUX_SIZES, FLUX_TRAINED = (16, 56, 56), (1, 256, 160), (None, 64, 64)


def multipliers(schedule, noise_level, channels=FLUX_CHANNELS, sizes=FLUX_SIZES):
    """Those of a schedule, with the spectra they multiply, and the factor of cos and sin; by axis."""
    spectra = [reference("ntk", width, 1, None, 1) for width in channels]
    axes = torch.tensor([axis for axis, spectrum in enumerate(spectra) for _ in spectrum])
    given = ScheduleInput(
        frequencies=torch.tensor(sum(spectra, []), dtype=torch.float64),
        axes=axes,
        ranks=torch.cat([torch.arange(len(spectrum)) for spectrum in spectra]),
        channels=torch.tensor(channels)[axes],
        size=torch.tensor(sizes, dtype=torch.float64),
        noise_level=torch.tensor(noise_level, dtype=torch.float64),
        layer=0,
    )
    found, factor = schedule(given)
    return found, given.frequencies, factor


@pytest.mark.parametrize("noise_level", [1.0, 0.7, 0.31, 0.05])
def test_vision_yarn_is_that_of_dype(noise_level):
    """At FLUX.1's sizes, in float64: κ(t) = t² times the bounds of both ramps; cos and sin by the scale of the axis."""
    schedule = FrequencySchedule("vision_yarn", FLUX_TRAINED, dype=(1.0, 2.0))
    found, spectrum, factor = multipliers(schedule, noise_level)
    facts = list(zip(FLUX_CHANNELS, FLUX_SIZES, FLUX_TRAINED))
    expected = sum((reference("vision_yarn", *each, noise_level**2, turns_around=True) for each in facts), [])
    factors = [[0.1 * math.log(max(size / (trained or size), 1)) + 1] * (width // 2) for width, size, trained in facts]
    # Rounding of float64.
    for one, other in ((found * spectrum, expected), (factor, sum(factors, []))):
        torch.testing.assert_close(one, torch.tensor(other, dtype=torch.float64), rtol=1e-14, atol=0)
    static, _, _ = multipliers(FrequencySchedule("vision_yarn", FLUX_TRAINED), noise_level)
    assert torch.equal(static, found) == (noise_level == 1)


@pytest.mark.parametrize("method", ["yarn", "vision_yarn"])
def test_yarn_with_dype_ends_at_the_pretrained_frequencies(method):
    """Also where the ramps of DyPE's code turn around; and on an axis of one plane."""
    schedule = FrequencySchedule(method, FLUX_TRAINED, dype=(1.0, 2.0))
    for noise_level in (0.0, 1e-9):
        assert multipliers(schedule, noise_level)[0].eq(1).all()
    for width, level in ((2, 0.0), (2, 0.5), (2, 1.0), (4, 0.5)):
        found, _, _ = multipliers(schedule, level, channels=(width, width, width))
        assert found.isfinite().all() and (found > 0).all() and (found <= 1).all()


@pytest.mark.parametrize(
    ("method", "dype"),
    [(method, None) for method in METHODS]
    + [("position_interpolation", (2.0, 2.0)), ("ntk", (2.0, 1.0)), ("yarn", (1.0, 2.0)), ("vision_yarn", (1.0, 2.0))],
)
@torch.no_grad()
def test_published_schedules(method, dype):
    model, other, inputs = FLUX.build(), FLUX.build(), FLUX.inputs()
    patch(model, PLANES)
    before = run(model, inputs)
    schedule = FrequencySchedule(method, trained_size=(None, 2, 3), dype=dype, ramp=(0.1, 0.4))
    set_frequency_schedule(model, schedule)
    # FLUX's inputs are 3 × 4 tokens at the noise level 0.7.
    kappa = dype[0] * 0.7 ** dype[1] if dype else 1
    sizes = zip(FLUX.axes, (2, 3, 4), schedule.trained_size)
    spectra = [reference(method, channels, size, trained, kappa) for channels, size, trained in sizes]
    rows, columns = (0.1 * math.log(scale) + 1 for scale in (3 / 2, 4 / 3))
    factors = {"yarn": [rows] * 3, "vision_yarn": [1, rows, columns]}
    other.pos_embed = GivenFrequencies(spectra, factors.get(method, [1] * 3))
    expected = run(other, inputs)
    assert (run(model, inputs) - expected).abs().max() < 1e-5 < 1e-4 < (before - expected).abs().max()
    set_frequency_schedule(model, None)
    assert torch.equal(run(model, inputs), before)


@scaled
@torch.no_grad()
def test_schedules_change_nothing_at_the_trained_size(case):
    model, inputs = case.build(), case.inputs()
    before, axes = run(model, inputs), patch(model, PLANES).rotary_patch.planes.num_axes
    for method in METHODS:
        set_frequency_schedule(model, FrequencySchedule(method, [64] * axes))
        assert torch.equal(run(model, inputs), before)
        set_frequency_schedule(model, FrequencySchedule(method, [1] * axes, layers=[]))
        assert torch.equal(run(model, inputs), before)
        set_frequency_schedule(model, FrequencySchedule(method, [1] * axes))
        everywhere = run(model, inputs)
        set_frequency_schedule(model, FrequencySchedule(method, [1] * axes, layers=[0]))
        assert not torch.equal(everywhere, before)
        assert not any(torch.equal(run(model, inputs), one) for one in (before, everywhere))
    assert torch.equal(run(unpatch(model), inputs), before)


@scaled
@torch.no_grad()
def test_dype_ends_at_the_pretrained_frequencies(case):
    """κ(0) = 0 leaves the frequencies, and κ(1) = λ_s = 1 is the schedule without it."""
    model, inputs = case.build(), case.inputs()
    patch(model, PLANES)
    name, axes = ("t" if "t" in inputs else "timestep"), model.rotary_patch.planes.num_axes
    clean, noise = CLEAN.get(case.name, (0, 1000))
    dype = FrequencySchedule("ntk", [1] * axes, dype=(1.0, 2.0))
    if case.name.startswith("Cosmos"):
        with pytest.raises(ValueError, match="pass noise_level"):
            set_frequency_schedule(model, dype)
        clean, noise = 0.0, 1.0
    for value, schedule in ((clean, None), (noise, FrequencySchedule("ntk", [1] * axes))):
        inputs[name] = torch.full((2,), value)
        set_frequency_schedule(model, schedule)
        expected = run(model, inputs)
        set_frequency_schedule(model, dype, noise_level=torch.abs if case.name.startswith("Cosmos") else None)
        assert torch.equal(run(model, inputs), expected)
        # Another process gets the schedule with the model.
        assert torch.equal(run(pickle.loads(pickle.dumps(model)), inputs), expected)
    inputs[name] = torch.tensor([clean, noise])
    with pytest.raises(RuntimeError, match="different noise levels"):
        run(model, inputs)


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_sees_that_noise_levels_differ():
    """It looks at them when it runs, and an exported one, which cannot fail so, returns no numbers."""
    model, inputs = FLUX.build(), FLUX.inputs()
    patch(model, PLANES)
    set_frequency_schedule(model, FrequencySchedule("ntk", [1] * 3, dype=(1.0, 2.0)))
    compiled = torch.compile(model, backend="eager")
    program = torch.export.export(model, (), inputs | {"timestep": torch.tensor([0.5, 0.5])}, strict=False).module()
    for level in (0.5, 0.25):
        same = inputs | {"timestep": torch.tensor([level, level])}
        wanted = run(model, same)
        for graph in (compiled, program):
            torch.testing.assert_close(graph(**same).sample, wanted, rtol=0, atol=1e-5)
    different = inputs | {"timestep": torch.tensor([0.5, 0.25])}
    with pytest.raises(RuntimeError, match=r"different noise levels, \[0.5, 0.25"):
        compiled(**different)
    assert program(**different).sample.isnan().all()


@torch.no_grad()
def test_a_function_as_schedule():
    """It is given facts about the input and the layer, and decides for every plane."""
    model, other, inputs, seen = FLUX.build(), FLUX.build(), FLUX.inputs(), []

    def schedule(given):
        seen.append((given.layer, given.size.tolist(), round(given.noise_level.item(), 4)))
        return torch.where(given.axes == 2, 0.5, 1.0).double(), 1.0

    patch(model, PLANES)
    set_frequency_schedule(model, schedule)
    spectra = [
        [10000 ** (-i / channels) / (1 + (axis == 2)) for i in range(0, channels, 2)]
        for axis, channels in enumerate(FLUX.axes)
    ]
    other.pos_embed = GivenFrequencies(spectra, [1] * 3)
    assert (run(model, inputs) - run(other, inputs)).abs().max() < 1e-5
    assert seen == [(layer, [2.0, 3.0, 4.0], 0.7) for layer in range(4)]


def test_refused_schedules():
    model, ltx, blocks = patch(FLUX.build(), PLANES), patch(LTX.build(), PLANES), patch(FLUX.build(), BLOCKS)
    for target, arguments, message in (
        (model, ("ntk", (None, 64)), "must have 3 entries"),
        (ltx, ("ntk", (1, 64, 64)), "rope_interpolation_scale"),
        (blocks, ("ntk", (None, 64, 64)), "accepted: rope_mixed"),
        (FLUX.build(), ("ntk", (None, 64, 64)), "call patch"),
    ):
        with pytest.raises(ValueError, match=message):
            set_frequency_schedule(target, FrequencySchedule(*arguments))
    for arguments, message in (
        ({"method": "linear"}, "method='linear'; accepted are position_interpolation, ntk, yarn, vision_yarn"),
        ({"method": "ntk", "trained_size": (0,)}, "trained_size"),
        ({"method": "yarn", "ramp": (2.0, 1.0)}, "ramp"),
    ):
        with pytest.raises(ValueError, match=message):
            FrequencySchedule(**({"trained_size": (1,)} | arguments))


def test_refused_models():
    with pytest.raises(ValueError, match="no configuration of diffusers"):
        unpatch(patch(FLUX.build(), PLANES), keep_frequencies=True)
    with pytest.raises(ValueError, match="pass pipeline.transformer"):
        patch(diffusers.DiffusionPipeline(), PLANES)
    sd3, wan, cogvideox = (
        BY_NAME[f"{name}Transformer{kind}Model"] for name, kind in (("SD3", "2D"), ("Wan", "3D"), ("CogVideoX", "3D"))
    )
    other_base = wan.build()
    wan.set_base(other_base, {}, 500.0)
    # A table of positions instead of rotations.
    table = diffusers.CogVideoXTransformer3DModel(
        **(cogvideox.config | {"use_rotary_positional_embeddings": False, "sample_frames": 9})
    )
    for model, config, message in (
        (
            diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=1),
            PLANES,
            "accepted: FluxTransformer2DModel",
        ),
        (FLUX.build(), ZEROS, "accepted: pretrained"),
        (sd3.build(), PLANES, "accepted: zeros"),
        (other_base, PLANES, "other rotations"),
        (table, PLANES, "does not rotate"),
        (FLUX.build().to("meta"), PLANES, "before they are offloaded"),
        (vary(wan.name, wan.inputs, attention_head_dim=8).build(), PLANES, "repeat after 6.28 tokens"),
        (LTX.build(), replace(BLOCKS, position_encoding="comrope_ld"), "multiples of one matrix"),
    ):
        with refused(model, message):
            patch(model, config)


@torch.no_grad()
def test_calls_that_would_be_wrong_are_refused():
    sd3, cogvideox = BY_NAME["SD3Transformer2DModel"], BY_NAME["CogVideoXTransformer3DModel"]
    # Fused projections make queries that no hook sees, if there is no norm behind them.
    model = patch(vary(sd3.name, sd3.inputs, qk_norm=None).build(), ZEROS)
    model.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match="fused projections"):
        run(model, sd3.inputs())
    model, inputs = patch(cogvideox.build(), PLANES), cogvideox.inputs()
    cos, sin = inputs["image_rotary_emb"]
    with pytest.raises(RuntimeError, match="not those of one coordinate"):
        run(model, inputs | {"image_rotary_emb": (cos.flip(-1), sin.flip(-1))})
    with pytest.raises(RuntimeError, match="would not rotate"):
        run(model, inputs | {"image_rotary_emb": None})
    model = patch(FLUX.build(), PLANES)
    attention = model.transformer_blocks[0].attn
    rotations = (torch.ones(3, 16), torch.zeros(3, 16))
    with pytest.raises(RuntimeError, match="do not come from the patched model"):
        attention(torch.zeros(1, 2, 32), torch.zeros(1, 1, 32), image_rotary_emb=rotations)
    attention = patch(model := FLUX.build(), BLOCKS).transformer_blocks[0].attn
    with pytest.raises(RuntimeError, match="ran outside its attention module"):
        attention.norm_q(torch.zeros(1, 3, 2, 16))
    # Nor after a pass that failed, as for want of memory.
    with attention.norm_k.register_forward_pre_hook(lambda module, args: 1 / 0), pytest.raises(ZeroDivisionError):
        run(model, FLUX.inputs())
    with pytest.raises(RuntimeError, match="ran outside its attention module"):
        attention.norm_q(torch.zeros(1, 12, 2, 16))
