"""Forward-mode derivatives of rotations are differences of the plain encodings, or refused with a reason."""

from functools import partial

import pytest
import torch
from encoding_cases import ENCODINGS, block_sizes, perturb
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import hf_liere
from hf_liere.plain import PLAIN_ENCODINGS


# Each accepts these sizes, but for those of its axes.
HEAD_DIM = 120
CASES = [(name, size) for name in ENCODINGS for size in block_sizes(name, HEAD_DIM, among=(2, 3, 4, 5, 8))]
# Closed forms, exponentials, eigenbases and planes.
FEW = [("liere", 3), ("liere", 5), ("comrope_ld", 4), ("rope_mixed", 2)]
SMALL = {3: 6, 5: 10, 4: 8, 2: 8}


def functions(encoding, size, head_dim=HEAD_DIM):
    """
    A layer and the plain one of the same parameters in float64, as functions of (query, positions, *parameters), and
    such arguments. The first token is at the origin.
    """
    layer = perturb(hf_liere.LieRotaryEmbedding(1, head_dim, 2, encoding, size).double())
    plain = PLAIN_ENCODINGS[encoding](1, head_dim, 2, size).double()
    names = [name for name, _ in layer.encoding.named_parameters()]
    positions = torch.randn(4, 2, dtype=torch.float64)
    positions[0] = 0

    def of_layer(query, positions, *parameters):
        named = {f"encoding.{name}": value for name, value in zip(names, parameters)}
        return functional_call(layer, named, (query, query.detach(), positions))[0]

    def of_plain(query, positions, *parameters):
        return functional_call(plain, dict(zip(names, parameters)), (query, query, positions))[0]

    parameters = (parameter.detach() for parameter in layer.parameters())
    return of_layer, of_plain, [torch.randn(1, 1, 4, head_dim, dtype=torch.float64), positions, *parameters]


def of_argument(function, arguments, place):
    """The function of one of its arguments alone."""
    return lambda x: function(*arguments[:place], x, *arguments[place + 1 :])


@torch.no_grad()
def difference(function, primal, tangent, step=1e-5):
    """The derivative along a tangent by central differences; of float64, it is right to 1e-9 of its size."""
    return (function(primal + step * tangent) - function(primal - step * tangent)) / (2 * step)


def assert_near(found, expected):
    """Differences of gradients in float64 are right to 1e-7; wrong rules are off by a part of the whole."""
    assert (found - expected).norm() < 1e-6 * expected.norm() + 1e-7


def by_jvp(function, primal, tangent):
    return jvp(function, (primal,), (tangent,))[1]


def by_dual_numbers(function, primal, tangent):
    """Of a leaf that also requires a gradient."""
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(primal.clone().requires_grad_(), tangent))
        return forward_ad.unpack_dual(result).tangent.detach()


def by_jvp_of_batch(function, primal, tangent):
    return jvp(vmap(function), (primal[None],), (tangent[None],))[1][0]


def by_batch_of_jvps(function, primal, tangent):
    return vmap(partial(by_jvp, function))(primal[None], tangent[None])[0]


def by_linearization(function, primal, tangent):
    return linearize(function, primal)[1](tangent)


def by_graph(function, primal, tangent):
    return torch.compile(partial(by_jvp, function), backend="eager", fullgraph=True)(primal, tangent)


def around_graph(function, primal, tangent):
    graph = torch.compile(function, backend="eager")
    torch.testing.assert_close(graph(primal), function(primal))
    return by_dual_numbers(graph, primal, tangent)


@pytest.mark.parametrize("encoding, size", CASES)
@pytest.mark.parametrize("derive", [by_jvp, by_dual_numbers])
def test_tangents(encoding, size, derive):
    of_layer, of_plain, arguments = functions(encoding, size)
    for place, primal in enumerate(arguments):
        tangent = torch.randn_like(primal)
        ours, plain = (of_argument(function, arguments, place) for function in (of_layer, of_plain))
        assert_near(derive(ours, primal, tangent), difference(plain, primal, tangent))


@pytest.mark.parametrize("encoding, size", FEW)
@pytest.mark.parametrize(
    "derive",
    [
        by_jvp_of_batch,
        by_batch_of_jvps,
        *(pytest.param(derive, marks=pytest.mark.slow) for derive in (by_linearization, by_graph, around_graph)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tangents_through_other_transforms(fresh_compiler, encoding, size, derive):
    test_tangents(encoding, size, derive)


def weighted(of_layer, of_plain, arguments, place):
    """Sums of sines of both, as functions of one argument, so that no second derivative is zero."""
    weight = torch.randn_like(arguments[0])
    return [of_argument(lambda *x, f=f: (f(*x).sin() * weight).sum(), arguments, place) for f in (of_layer, of_plain)]


def gradient(function, x):
    """By the engine, without transforms."""
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0]


@pytest.mark.parametrize("encoding, size", FEW)
def test_gradients_of_tangents_by_parameters(encoding, size):
    """As training takes them that differentiates a tangent, and through the other result of `jvp`, as MeanFlow."""
    of_layer, of_plain, (*moving, parameter) = functions(encoding, size, SMALL[size])
    tangents, weight = [torch.randn_like(x) for x in moving], torch.randn_like(moving[0])

    def ours(place, parameter):
        return (jvp(lambda *x: of_layer(*x, parameter), tuple(moving), tuple(tangents))[place] * weight).sum()

    def plain(step, parameter):
        return (of_plain(*(x + step * tangent for x, tangent in zip(moving, tangents)), parameter) * weight).sum()

    assert_near(gradient(partial(ours, 0), parameter), gradient(partial(plain, 0), parameter))
    ahead, behind = (gradient(partial(plain, step), parameter) for step in (1e-5, -1e-5))
    assert_near(gradient(partial(ours, 1), parameter), (ahead - behind) / 2e-5)
    assert_near(grad(partial(ours, 1))(parameter), (ahead - behind) / 2e-5)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("encoding, size", FEW)
def test_second_derivatives_are_right_in_forward_mode_and_refused_in_reverse(encoding, size, place):
    of_layer, of_plain, arguments = functions(encoding, size, SMALL[size])
    tangent = torch.randn_like(primal := arguments[place])
    ours, plain = weighted(of_layer, of_plain, arguments, place)
    expected = difference(partial(gradient, plain), primal, tangent)
    assert_near(jvp(grad(ours), (primal,), (tangent,))[1], expected)
    assert_near(grad(lambda x: jvp(ours, (x,), (tangent,))[1])(primal), expected)
    assert_near(torch.tensordot(hessian(ours)(primal), tangent, tangent.ndim), expected)
    assert_near(torch.tensordot(jacfwd(jacfwd(ours))(primal), tangent, tangent.ndim), expected)
    for refused in (
        lambda: jacrev(jacrev(ours))(primal),
        lambda: grad(lambda x: grad(ours)(x).sum())(primal),
        lambda: torch.autograd.functional.hessian(ours, primal),
        lambda: torch.autograd.functional.jvp(ours, primal, tangent),
    ):
        with pytest.raises(RuntimeError, match="cannot be differentiated a second time"):
            refused()


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("encoding, size", FEW)
def test_gradients_that_have_tangents(encoding, size, place):
    """Gradients are linear in those that come in, so a result from outside of the forward mode has its tangent."""
    of_layer, of_plain, arguments = functions(encoding, size, SMALL[size])
    incoming, tangent = torch.randn(2, *arguments[0].shape, dtype=torch.float64)
    primal = arguments[place]
    ours, plain = (of_argument(function, arguments, place) for function in (of_layer, of_plain))
    expected = gradient(lambda x: (plain(x) * tangent).sum(), primal)
    leaf = primal.clone().requires_grad_()
    result = ours(leaf)
    with forward_ad.dual_level():
        (found,) = torch.autograd.grad(result, leaf, forward_ad.make_dual(incoming, tangent))
        assert_near(forward_ad.unpack_dual(found).tangent, expected)
    backward = vjp(ours, primal)[1]
    assert_near(jvp(lambda g: backward(g)[0], (incoming,), (tangent,))[1], expected)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("encoding, size", FEW)
def test_batches_of_gradients(encoding, size, place):
    of_layer, of_plain, arguments = functions(encoding, size, SMALL[size])
    gradients = torch.randn(3, *arguments[0].shape, dtype=torch.float64)
    primal = arguments[place]
    ours, plain = (of_argument(function, arguments, place) for function in (of_layer, of_plain))
    expected = torch.stack([gradient(lambda x, g=g: (plain(x) * g).sum(), primal) for g in gradients])
    leaf = primal.clone().requires_grad_()
    assert_near(torch.autograd.grad(ours(leaf), leaf, gradients, is_grads_batched=True)[0], expected)
    jacobian = torch.autograd.functional.jacobian(ours, primal, vectorize=True)
    assert_near(torch.tensordot(gradients, jacobian, 4), expected)


def test_rotations_in_an_eigenbasis_are_computed_inside():
    layer = hf_liere.LieRotaryEmbedding(1, 8, 2, "comrope_ld", 4)
    query, rotations = torch.randn(1, 1, 4, 8), layer.rotations(torch.rand(4, 2))
    with pytest.raises(NotImplementedError, match="inside one jvp or dual_level"):
        by_jvp(lambda x: layer.rotate(x, rotations), query, query)


@pytest.mark.parametrize("encoding", ["liere", "comrope_ap", "cayley_string"])
@torch.no_grad()
def test_models_after_a_pass_that_inference_keeps(tiny, encoding):
    """By pixels and by the parameter of the rotations, in evaluation, where rotations of a grid are kept."""
    model = perturb(hf_liere.LieREViTModel(tiny(position_encoding=encoding, block_size=4)).double().eval())
    model.set_attn_implementation("eager")
    name, parameter = next(iter(model.rotary_parameters()))
    pixels = torch.randn(1, 3, 16, 16, dtype=torch.float64)

    def run(pixels, parameter):
        return functional_call(model, {name: parameter}, (pixels,)).last_hidden_state

    arguments = [pixels, parameter.clone()]
    for place, primal in enumerate(arguments):
        function, tangent = of_argument(run, arguments, place), torch.randn_like(primal)
        expected = difference(function, primal, tangent)
        for derive in (by_jvp, by_dual_numbers):
            assert_near(derive(function, primal, tangent), expected)
