"""Encodings in plain PyTorch: those of the layer, with the same parameters, starts and gradients."""

import re
import subprocess
import sys

import pytest
import torch
from encoding_cases import ENCODINGS, OWN_PLAIN, block_size, on_axes

import hf_liere
from hf_liere.plain import PLAIN_ENCODINGS
from hf_liere.plain.encodings import rotate
from hf_liere.tools.cli import main


def start_cases():
    for encoding in ENCODINGS:
        for start in PLAIN_ENCODINGS[encoding].starts or (None,):
            axes, size = (3, 3) if start == "so3" else (2, 8)
            yield encoding, start, axes, block_size(encoding, 16, 2, size)
    # Closed forms.
    yield from (("liere", "uniform", axes, size) for axes in (1, 2, 3) for size in (3, 4))


def both(encoding, start, axes, size, **fields):
    """A plain layer and the package's, made from one seed, with heads of 16 channels."""
    fields |= {"num_key_value_heads": 2} | ({} if start is None else {"rotary_init": start})
    torch.manual_seed(0)
    plain = PLAIN_ENCODINGS[encoding](4, 16, axes, size, **fields)
    torch.manual_seed(0)
    return plain, hf_liere.LieRotaryEmbedding(4, 16, axes, encoding, size, **fields)


@pytest.mark.parametrize("encoding, start, axes, size", list(start_cases()))
def test_plain_layers_start_and_rotate_as_the_package(encoding, start, axes, size):
    plain, layer = both(encoding, start, axes, size)
    assert dict(plain.named_parameters()).keys() == dict(layer.encoding.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        # The spectrum of Golden gate RoPE is computed in another order.
        torch.testing.assert_close(parameter, layer.encoding.get_parameter(name), rtol=1e-6, atol=0)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    # Of the size of states and gradients; torch.matrix_exp rounds small exponents to 1e-10.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        plain, layer = plain.to(dtype), layer.to(dtype)
        layer.encoding.load_state_dict(dict(plain.named_parameters()))
        query, key = torch.randn(2, 4, 9, 16, dtype=dtype), torch.randn(2, 2, 9, 16, dtype=dtype)
        positions = torch.rand(2, 9, axes, dtype=torch.float64)
        found, expected = plain(query, key, positions), layer(query, key, positions)
        for rotated, wanted, states in zip(found, expected, (query, key)):
            assert ((rotated - wanted).norm(dim=-1) <= tolerance * states.norm(dim=-1)).all()
        if list(plain.parameters()):
            of_plain = gradients(plain, found)
            for name, gradient in gradients(layer.encoding, expected).items():
                difference = (of_plain[name] - gradient).norm() / gradient.norm()
                assert difference < tolerance, name


def gradients(module, rotated):
    weighted = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in rotated)
    names, parameters = zip(*module.named_parameters())
    return dict(zip(names, torch.autograd.grad(weighted, parameters)))


@pytest.mark.parametrize("encoding", on_axes(3))
def test_options_mean_the_same(encoding):
    """Shared heads, a scale, keys of other tokens, and the same positions for all samples."""
    fields = {"share_heads": True, "rotary_init_scale": 0.3}
    fields |= {"num_key_value_heads": 2, "head_dim": 24, "num_axes": 3, "block_size": block_size(encoding, 24, 3)}
    plain = PLAIN_ENCODINGS[encoding](4, **fields)
    layer = hf_liere.LieRotaryEmbedding(4, position_encoding=encoding, **fields)
    layer.encoding.load_state_dict(dict(plain.named_parameters()))
    query, key = torch.randn(2, 4, 5, 24), torch.randn(2, 2, 7, 24)
    places = torch.rand(5, 3), torch.rand(7, 3)
    torch.testing.assert_close(plain(query, key, *places), layer(query, key, *places), rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", [name for name in on_axes(2) if name in OWN_PLAIN and name != "shares"])
def test_shares_have_as_many_channels(encoding):
    """Also where a part of the head is no whole number of blocks for every axis."""
    for share in (0.1, 0.2, 0.25, 0.3, 0.55, 1.0):
        shares = [[encoding, {"share": share, "axes": [0, 2], "block_size": block_size(encoding, 6, 2)}]]
        plain = PLAIN_ENCODINGS["shares"](2, 24, 3, shares=shares)
        layer = hf_liere.LieRotaryEmbedding(2, 24, 3, shares)
        assert [part.head_dim for part in plain.parts] == layer.encoding.widths, share


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_wrong_input_is_refused(encoding):
    kind = PLAIN_ENCODINGS[encoding]
    for given, named in (
        ({"block_size": 17}, "block_size=17"),
        ({"rotary_init": "ones"}, "rotary_init='ones'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ):
        with pytest.raises(ValueError, match=named):
            kind(**{"num_heads": 4, "head_dim": 16, "num_axes": 2, **given})
    with pytest.raises(TypeError, match="temperature"):
        kind(4, 16, 2, temperature=3)
    rotary, states = kind(4, 16, 2), torch.randn(1, 4, 9, 16)
    with pytest.raises(ValueError, match=r"positions of shape \(8, 2\)"):
        rotary(states, states, torch.rand(8, 2))
    with pytest.raises(ValueError, match="int64"):
        rotary(states, states, torch.ones(9, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(1, 3, 9, 16\)"):
        rotary(states[:, :3], states, torch.rand(9, 2))


RUN = """
import sys
sys.modules |= dict.fromkeys(("hf_liere", "transformers", "numpy", "huggingface_hub"))
sys.path[:0] = ["."]
import importlib, torch
for name, (kind, state, query, positions) in torch.load("given.pt", weights_only=True).items():
    rotary = getattr(importlib.import_module(name), kind)(2, 32, 2)
    rotary.load_state_dict(state)
    rotated, _ = rotary(query, query, positions)
    loss = rotated.mul(torch.linspace(-1, 1, rotated.numel()).view_as(rotated)).sum()
    gradients = torch.autograd.grad(loss, list(rotary.parameters())) if state else []
    torch.save([rotated.detach(), *gradients], name + ".pt")
"""


def test_the_layer_for_people_who_copy_needs_torch_alone(tmp_path):
    """The values and gradients of the package, in a process without it, transformers and numpy."""
    given, wanted, query, positions = {}, {}, torch.randn(1, 2, 6, 32), torch.rand(6, 2)
    for encoding in OWN_PLAIN:
        path = tmp_path / f"{encoding}.py"
        assert main(["bundle", "layer", str(path), "--position_encoding", encoding]) == 0
        code = path.read_text(encoding="utf-8")
        foreign = re.search(r"^(?:from|import) (?!torch|itertools|math|collections|typing)", code, re.M)
        assert len(code.splitlines()) <= 900 and not foreign
        layer = hf_liere.LieRotaryEmbedding(2, 32, 2, encoding)
        given[encoding] = PLAIN_ENCODINGS[encoding].__name__, layer.encoding.state_dict(), query, positions
        rotated = layer(query, query, positions)
        wanted[encoding] = [
            rotated[0],
            *(gradients(layer.encoding, rotated[:1]).values() if given[encoding][1] else ()),
        ]
    torch.save(given, tmp_path / "given.pt")
    subprocess.run([sys.executable, "-I", "-c", RUN], cwd=tmp_path, check=True)
    for encoding in OWN_PLAIN:
        found = torch.load(tmp_path / f"{encoding}.pt", weights_only=True)
        for value, expected in zip(found, wanted[encoding], strict=True):
            assert (value - expected).norm() <= 1e-5 * expected.norm(), encoding


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_plain_rotations_compile_into_one_graph(backend):
    """With the attention of a model whose heads are longer than a block, forward and backward."""
    torch.manual_seed(0)
    rotary = PLAIN_ENCODINGS["liere"](2, 12, 2, num_layers=2)
    query, positions = torch.randn(1, 2, 6, 12), torch.rand(6, 2)

    def attend():
        rotated = [rotate(query, rotation) for rotation in rotary.rotations(positions)]
        return torch.nn.functional.scaled_dot_product_attention(*rotated, query)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    found, wanted = ((each, gradients(rotary, [each])) for each in (compiled(), attend()))
    # Sums of float32 in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_written_is_refused(tmp_path, capsys):
    path = tmp_path / "lie_rotary.py"
    assert main(["bundle", "layer", str(path), "--position_encoding", "lier"]) == 1
    assert "the closest is 'liere'" in capsys.readouterr().err and not path.exists()
    path.write_text("mine")
    assert main(["bundle", "layer", str(path)]) == 1 and path.read_text() == "mine"
