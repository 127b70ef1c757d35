"""Models start at the numbers that a start documents, or at the model that was patched; and the seed alone decides."""

import copy
import itertools
import math

import encoding_cases
import patching_cases
import pytest
import reference
import torch
from encoding_cases import LEARNED, NEUTRAL, OWN_PLAIN, ROUNDED, on_axes
from model_cases import MODELS, OWN, PATCHED, own, run
from patching_cases import CASES, same_bits

from hf_liere import LieRotaryEmbedding, RotaryEncoding, RotaryPatchConfig, patch, rotary_parameters
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.patching.vision_towers import find_towers


SCALE = 0.7
# Wrapper → axes and channels of a head. The layer has many numbers to draw.
WRAPPERS = {"image": (2, 24), "video": (3, 24), "points": (3, 24), "layer": (3, 24), "patched": (2, 16)}
WRAPPED = [
    (wrapper, encoding, start)
    for wrapper, (axes, _) in WRAPPERS.items()
    for encoding in on_axes(axes, LEARNED)
    for start in KINDS[encoding].accepted_starts()
    if start != "so3" or wrapper in ("points", "layer")
]


def build(wrapper, encoding, start, seed=0):
    """A model or layer at a start."""
    axes, head_dim = WRAPPERS[wrapper]
    size = 3 if start == "so3" else encoding_cases.block_size(encoding, head_dim, axes)
    if (encoding, start) == ("comrope_ap", "axial"):
        size = head_dim // axes
    fields = {"rotary_init": start, "block_size": size, **({} if start == "so3" else {"rotary_init_scale": SCALE})}
    torch.manual_seed(seed)
    if wrapper == "layer":
        return LieRotaryEmbedding(2, head_dim, axes, encoding, num_layers=100, **fields)
    if wrapper == "patched":
        return patch(CASES["clip_vision"].build(), RotaryPatchConfig(encoding, **fields))
    return own(wrapper, encoding, **fields).make()


def rotary(model):
    return next(module for module in model.modules() if isinstance(module, RotaryEncoding))


def is_drawn(values, cdf):
    """Kolmogorov–Smirnov; 2.5/√n is exceeded by chance once in 100,000 draws."""
    values = values.detach().flatten().sort().values
    shares = torch.arange(1, len(values) + 1) / len(values)
    return (cdf(values) - shares).abs().max() < 2.5 / math.sqrt(len(values))


def normal(deviation):
    return torch.distributions.Normal(0.0, deviation).cdf


def spectrum(expected):
    """
    Whether −Σ_a A_a² of a head has the squares of these numbers as eigenvalues: √(Σ_a f_a²) of the frequencies of every
    plane, twice.
    """

    def check(encoding):
        parameters, config, numbers = dict(encoding.named_parameters()), encoding.config, expected(encoding)
        for layer, head in ((0, 0), (0, 1), (1, 0)):
            matrices = reference.generators(parameters, config, encoding.num_axes, layer, head)
            found = torch.linalg.eigvalsh(-(matrices @ matrices).sum(0))
            wanted = torch.zeros_like(found)
            wanted[: len(numbers)] = torch.tensor(numbers).square()
            # Parameters are rounded to float32.
            torch.testing.assert_close(found, wanted.sort().values, rtol=0, atol=1e-5)
        return True

    return check


def in_groups(encoding):
    """RoPE-Mixed (RoPE-ViT §3.2): θ^(−i/q), for a group of planes on each axis; Spherical RoPE in every triple."""
    theta, planes, axes = encoding.config.rope_theta, encoding.num_planes, encoding.num_axes
    if encoding.config.position_encoding == "spherical_rope":
        # Planes (0, 1) and (1, 2) turn equally fast.
        return [SCALE * theta ** (-i / planes) * each for i in range(planes) for each in (1, math.sqrt(2), 1)]
    count = planes // axes
    return [SCALE * theta ** (-i / count) for i in range(count)] * axes * 2


def geometric(encoding):
    """Golden gate RoPE: magnitudes between 0.1 and 1."""
    last = encoding.num_planes - 1
    return [SCALE * 10 ** (-i / last) for i in range(last + 1)] * 2


def from_patch_to_patch(encoding):
    """Axial RoPE: θ^(−i/q) radians on each axis, from a patch to the next of the training grid."""
    config, count = encoding.config, encoding.config.head_dim // (2 * encoding.num_axes)
    grid = getattr(config, "train_grid", None) or (1,) * encoding.num_axes
    steps = {"train_grid": lambda n: 1 / (n - 1), "unit": lambda n: 1 / n, "index": lambda n: 1}
    step = steps[getattr(config, "coordinates", "index") if grid[0] > 1 else "index"]
    return [SCALE * 100 ** (-i / count) / step(n) for n in grid for i in range(count)] * 2


CHECKS = {
    "uniform": lambda encoding: is_drawn(encoding.generators, lambda x: (x / SCALE).clamp(0, 1)),
    "normal": lambda encoding: is_drawn(encoding.generators, normal(SCALE)),
    "zeros": lambda encoding: not encoding.generators.any(),
    "tenth": lambda encoding: bool((encoding.generators == torch.tensor(0.1)).all()),
    "frequencies": spectrum(in_groups),
    "golden_gate": spectrum(geometric),
    "axial": spectrum(from_patch_to_patch),
    # Casimir's l(l + 1) of spin 1.
    "so3": spectrum(lambda encoding: [math.sqrt(2)] * 24),
}
# What else encodings learn.
OTHERS = {"multipliers": lambda values: is_drawn(values, normal(1.0)), "skew": lambda values: not values.any()}


@pytest.mark.parametrize("wrapper, encoding, start", WRAPPED)
def test_rotations_start_as_documented(wrapper, encoding, start):
    started = rotary(build(wrapper, encoding, start))
    assert CHECKS[start](started)
    for name, values in started.named_parameters():
        assert name == "generators" or (encoding, start) == ("comrope_ld", "axial") or OTHERS[name](values)


@pytest.mark.parametrize("wrapper, encoding, start", WRAPPED)
def test_the_seed_decides(wrapper, encoding, start):
    first, again = (build(wrapper, encoding, start).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    other = dict(rotary(build(wrapper, encoding, start, seed=1)).named_parameters())
    draws = start in ("uniform", "normal") or start == "frequencies" and encoding != "spherical_rope"
    draws |= "multipliers" in other and start != "axial"
    pairs = [(value, first[key]) for name, value in other.items() for key in first if key.endswith(f".{name}")]
    assert len(pairs) == len(other) and draws != all(itertools.starmap(torch.equal, pairs))


@pytest.mark.parametrize("encoding", [encoding for encoding in LEARNED if encoding in OWN_PLAIN])
@pytest.mark.parametrize("wrapper", ["image", "points"])
def test_loading_draws_nothing(wrapper, encoding, tmp_path):
    if KINDS[encoding].only_axes not in (None, WRAPPERS[wrapper][0]):
        pytest.skip("it is defined on other axes")
    model = build(wrapper, encoding, "normal")
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in loaded.named_parameters())


@pytest.mark.parametrize("kind", OWN)
def test_zeros_are_the_model_without_rotations(kind):
    """The same bits, and a gradient for every generator."""
    torch.manual_seed(0)
    plain, inputs = own(kind, "none", initializer_range=0.2).make().eval(), OWN[kind][4]()
    without = {name: value for name, value in inputs.items() if name != "positions"}
    expected = run(f"{kind} liere", plain, without)
    for encoding in on_axes(OWN[kind][3], NEUTRAL):
        model = own(kind, encoding, rotary_init="zeros", initializer_range=0.2).make().eval()
        missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
        assert not unexpected and all("rotary_encoding." in name for name in missing)
        close_to(run(f"{kind} liere", model, inputs), expected, is_exact=encoding not in ROUNDED)
        sum(value.square().sum() for value in MODELS[f"{kind} liere"].outputs(model, inputs)).backward()
        assert rotary(model).generators.grad.all(), encoding


def close_to(found, expected, is_exact):
    """The same bits, or up to the rounding of float32 in a few layers."""
    assert not is_exact or same_bits(found, expected)
    for value, start in zip(found, expected, strict=True):
        torch.testing.assert_close(value, start, rtol=0, atol=2e-5 * max(1.0, float(start.abs().max())))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.endswith(", blocks") else ()) for name in PATCHED]
)
def test_patches_start_at_their_model(name):
    """Outputs, and gradients of its weights. Rotations by zero and pretrained planes leave the same bits."""
    torch.manual_seed(0)
    case = MODELS[name]
    model, inputs = case.make().eval(), case.inputs()
    expected, gradients = run(name, model, inputs), gradients_of(case, model, inputs)
    patch(model, case.config)
    is_exact = case.config.rotary_init == "zeros" or case.config.position_encoding == "rope_mixed"
    close_to(run(name, model, inputs), expected, is_exact)
    found = gradients_of(case, model, inputs)
    # Blocks take the place of frequencies that a model learns.
    assert gradients.keys() - found.keys() <= {"rope.freqs"}
    assert found.keys() - gradients.keys() == {key for key, _ in rotary_parameters(model)}
    size = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key in found.keys() & gradients.keys():
        torch.testing.assert_close(found[key], gradients[key], rtol=0, atol=1e-4 * size, msg=key)


def gradients_of(case, model, inputs):
    model.zero_grad()
    sum(value.square().mean() for value in case.outputs(model, inputs) if value.requires_grad).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_every_encoding_starts_at_the_tower(name, implementation):
    plain, inputs = patching_cases.build(name, implementation)
    expected, axes = run(f"patched {name}", plain, inputs), len(find_towers(plain)[0].train_grid)
    for encoding in on_axes(axes, NEUTRAL):
        if KINDS[encoding].block_sizes.accepted(16, axes):
            size = encoding_cases.block_size(encoding, 16, axes)
            model = patch(copy.deepcopy(plain), RotaryPatchConfig(encoding, block_size=size))
            close_to(run(f"patched {name}", model, inputs), expected, is_exact=encoding not in ROUNDED)
