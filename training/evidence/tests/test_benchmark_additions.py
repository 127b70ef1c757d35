"""What the benchmark says an encoding adds: that it is the model's own work, that intervals and limits are right."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from benchmark_cases import TINY, add_shares, read, settings
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_liere
from hf_liere.tools.inspection.costs import count_cost
from training.evidence import benchmark_speed
from training.evidence.speed import measurements, runner, tables
from training.evidence.speed.additions import Addition, States
from training.evidence.speed.intervals import estimate
from training.evidence.speed.limits import Work, needed_work
from training.evidence.speed.models import (
    BenchmarkError,
    Row,
    build_model,
    check_row,
    compile_function,
    register_attention,
)
from training.evidence.speed.peers import PEERS, PeerEncoding


ROWS = ("axial_rope", "rope_mixed", "comrope_ap8", "comrope_ld8", "liere8")
ROWS += ("golden_gate_rope", "cayley_string", "circulant_string", "spherical_rope", "liere_product")


def addition_of(name, training=False, keeps_rotations=True, **overrides):
    """An addition to a model whose attention is PyTorch's."""
    chosen = settings(**{"batch_size": 2, **overrides})
    model = build_model(chosen, Row.parse(name), training)
    return Addition(chosen, model, States(chosen, model.config), keeps_rotations)


def step_of_model(addition):
    """
    Of a training step of the addition's model: for every layer query and key before and after the rotation, and the
    gradients of the latter.
    """
    model, projected, rotated, gradients = addition.encoder, [], [], {}

    def record(module, query, key, *arguments, **kwargs):
        for states in (query, key):
            rotated.append(states)
            states.register_hook(functools.partial(gradients.__setitem__, len(rotated)))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *arguments, **kwargs)

    register_attention("recording", record)
    model.config._attn_implementation = "recording"
    projections = [p for layer in model.layers for p in (layer.attention.q_proj, layer.attention.k_proj)]
    hooks = [p.register_forward_hook(lambda module, inputs, output: projected.append(output)) for p in projections]
    model(addition.settings.pixels()).pooler_output.square().sum().backward()
    for hook in hooks:
        hook.remove()
    heads = model.config.num_attention_heads
    projected = [states.detach().unflatten(-1, (heads, -1)).transpose(1, 2) for states in projected]
    gradients = [gradients[number + 1] for number in range(len(rotated))]
    return [list(zip(states[::2], states[1::2], strict=True)) for states in (projected, rotated, gradients)]


@pytest.mark.parametrize("name", ROWS)
def test_addition_is_the_work_of_the_model(name):
    """From the model's projections and the gradients of its attention come its rotated states and its gradients."""
    addition = addition_of(name, training=True)
    projected, rotated, gradients = step_of_model(addition)
    expected = {key: value.grad.clone() for key, value in addition.encoder.rotary_parameters()}
    states = addition.states
    with torch.no_grad():
        for number, rotation in enumerate(addition.rotations()):
            for own, given in zip(states.layers[number], projected[number]):
                own.copy_(rotation.change_basis(given))
            for own, given in zip(states.gradients[number], gradients[number]):
                own.copy_(given)
    found = [output for output in addition.rotate() if output.numel()]
    for own, given in zip(found, [part for pair in rotated for part in pair], strict=True):
        torch.testing.assert_close(own, given, rtol=0, atol=1e-5)
    addition.run(addition.rotate)
    parameters = dict(addition.encoder.rotary_parameters())
    assert parameters.keys() == expected.keys()
    for key, gradient in expected.items():
        if key.endswith("skew"):
            # Its gradient is made with that of the weights, from the states before the projections.
            continue
        # Float32 sums over tokens and samples in another order.
        torch.testing.assert_close(parameters[key].grad, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())
    assert all(state.grad is None for layer in states.layers for state in layer)


def test_states_are_laid_out_as_in_the_model():
    addition = addition_of("liere8", training=True)
    projected, _, gradients = step_of_model(addition)
    for found, expected in ((addition.states.layers, projected), (addition.states.gradients, gradients)):
        for layer, own in zip(expected, found, strict=True):
            assert [(x.shape, x.stride(), x.dtype) for x in own] == [(x.shape, x.stride(), x.dtype) for x in layer]


@pytest.mark.parametrize("name", [*ROWS, "folded_comrope_ld8"])
def test_basis_of_weights_is_changed_where_the_model_changes_it(name):
    """By projections of no tokens, which have the gradients of nothing."""
    addition = addition_of(name, training=not name.startswith("folded"))
    addition.run(addition.rotate)
    changes = name.startswith(("comrope", "cayley", "circulant", "liere_product"))
    assert addition.changes_basis == changes
    gradients = [layer.attention.q_proj.weight.grad for layer in addition.encoder.layers]
    if changes:
        assert all(gradient.shape == (192, 192) and not gradient.any() for gradient in gradients)
    else:
        assert gradients == [None, None]


def frequencies_of(peer):
    """A peer's frequencies as (A, layers, heads, planes), and (N, A) positions of its class token and patches."""
    found = (peer.rope.inv_freq if hasattr(peer.rope, "inv_freq") else peer.rope.freqs).detach()
    positions = hf_liere.grid_positions(peer.grid, "index", num_prefix_tokens=1).coordinates
    if found.ndim == 4:
        # timm's axes are columns and rows.
        return found.flip(0), positions
    if peer.package == "x_transformers":
        return found[None, None, None].repeat(1, 2, 3, 1), torch.arange(len(positions), dtype=torch.float64)[:, None]
    axes = torch.block_diag(found[None], found[None])  # (A, planes)
    return axes[:, None, None].repeat(1, 2, 3, 1), positions


@pytest.mark.parametrize("name", PEERS)
def test_peers_rotate_as_the_package_does_with_their_frequencies(name):
    """The same rotated states, and gradients of states and of learned frequencies."""
    pytest.importorskip(PEERS[name].package)
    addition = addition_of(name, training=True, image_size=64)
    peer = addition.encoder.rotary_encoding
    frequencies, positions = frequencies_of(peer)
    rotary = hf_liere.LieRotaryEmbedding(3, 64, len(frequencies), "rope_mixed", num_layers=2, frequencies=frequencies)
    incoming = [state for layer in addition.states.gradients for state in layer]
    results = []
    for rotations in (addition.rotations(), rotary.rotations(positions)):
        states = [tuple(state.detach().requires_grad_() for state in layer) for layer in addition.states.layers]
        rotated = [out for rotation, layer in zip(rotations, states) for out in rotation.rotate(*layer)]
        torch.autograd.backward(rotated, incoming)
        results.append([*rotated, *(state.grad for layer in states for state in layer)])
    for found, expected in zip(*results, strict=True):
        # Peers round angles of up to 16 radians to float32, an error of 1e-6 each.
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    (ours,) = rotary.parameters()
    for learned in (parameter for parameter in peer.parameters() if parameter.requires_grad):
        expected = ours.grad.squeeze(-1).flip(0)
        if learned.ndim == 1:
            # One frequency serves every layer and head, and a plane of each axis.
            expected = sum(axis.unflatten(-1, (2, -1))[..., 1 - i, :].sum((0, 1)) for i, axis in enumerate(expected))
        torch.testing.assert_close(learned.grad, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_peers_that_are_not_installed_are_refused(monkeypatch):
    """By the command that installs them; the default rows leave them out."""

    class Absent(PeerEncoding):
        package = "absent_package"

    monkeypatch.setitem(PEERS, "rope_by_absent_package", Absent)
    with pytest.raises(BenchmarkError, match="`pip install absent-package` installs it"):
        check_row(settings(), Row.parse("rope_by_absent_package"))
    options = benchmark_speed.parse_arguments([*TINY, "--table", "added"])
    names = {row.name for row in benchmark_speed.read_rows(options)}
    assert names & PEERS.keys() == {name for name in PEERS if Row.parse(name).is_installed}


@pytest.mark.parametrize("keeps_rotations", [True, False])
@pytest.mark.parametrize("name", ["rope_mixed", "comrope_ld8", "liere8"])
def test_rotations_are_kept_or_made(name, keeps_rotations):
    addition = addition_of(name, keeps_rotations=keeps_rotations)
    encoding, made = addition.encoder.rotary_encoding, []
    make = encoding.layer_rotations
    encoding.layer_rotations = lambda *arguments: made.append(arguments) or make(*arguments)
    for _ in range(3):
        addition.step()
    assert len(made) == (0 if keeps_rotations else 3)


@pytest.mark.parametrize("name", ["comrope_ld8", "liere8"])
@pytest.mark.parametrize("training", [True, False])
def test_half_types(name, training):
    """States are in the half type, weights in training in float32, generators always."""
    addition = addition_of(name, training, dtype="bfloat16")
    addition.run(addition.rotate)
    assert {state.dtype for layer in addition.states.layers for state in layer} == {torch.bfloat16}
    parameters = [parameter for _, parameter in addition.encoder.rotary_parameters()]
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    assert all((parameter.grad is not None) == training for parameter in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_compiled_addition(name):
    """One graph, forward and backward, with the gradients of the plain one."""
    gradients = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        addition = addition_of(name, training=True, compile=in_graph)
        addition.step()
        gradients.append([parameter.grad for _, parameter in addition.encoder.rotary_parameters()])
    for plain, in_graph in zip(*gradients, strict=True):
        torch.testing.assert_close(in_graph, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())


@pytest.mark.slow
def test_every_model_is_compiled():
    """Also those after the eight that the compiler takes by itself."""

    def of(number):
        return lambda x: x + number + 100 * torch.compiler.is_compiling()

    found = [compile_function(settings(compile=True), of(number))(torch.zeros(3)) for number in range(10)]
    assert [value.unique().item() for value in found] == [100.0 + number for number in range(10)]


@pytest.mark.parametrize("count, first, last", [(6, 1, 6), (9, 2, 8), (10, 2, 9), (20, 6, 15), (50, 18, 33)])
def test_ranks_of_intervals(count, first, last):
    """The ranks of the tables in textbooks (Conover, Practical Nonparametric Statistics)."""
    values = np.random.default_rng(0).permutation(np.arange(1.0, count + 1)).tolist()
    found = estimate(values)
    assert (found.low, found.high, found.width) == (first, last, last - first)
    assert found.median == (count + 1) / 2


def test_intervals_contain_the_median_and_shrink():
    """Of a skewed distribution, in at least 95% of samples, up to three standard errors of this simulation."""
    generator, widths = np.random.default_rng(0), []
    for count in (6, 15, 60):
        found = [estimate(generator.exponential(size=count).tolist()) for _ in range(2000)]
        covered = np.mean([each.low <= np.log(2) <= each.high for each in found])
        assert covered > 0.95 - 3 * np.sqrt(0.05 * 0.95 / 2000)
        widths.append(np.mean([each.width for each in found]))
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("values", [[0.03] * 5, [0.03]])
def test_few_values_have_no_interval(values):
    assert estimate(values).width == float("inf") and not estimate(values).is_resolved


@pytest.mark.parametrize("name", ["rope_mixed", "comrope_ld8", "liere4", "liere8", "liere64"])
def test_limit_of_inference(name):
    """
    What is applied is what the inspection counts in a run, and what is moved is in the tensors. Exponentials take about
    the products of a run, of which the inspection misses two each, in place, and counts others for bounds of norms. It
    counts plain operations, which make an exponential for every token; the work needs those of coprime indices, 60%.
    """
    kept, first = (addition_of(name, keeps_rotations=kept) for kept in (True, False))
    pixels = kept.settings.pixels()
    cost = count_cost(build_model(kept.settings, Row.parse(name), training=False), pixels)
    work = needed_work(kept)
    rotations = [rotation[0] for rotation in kept.rotations()]
    states = [state for layer in kept.states.layers for state in layer]
    assert work.bytes == sum(2 * state.nbytes for state in states) + sum(tensor.nbytes for tensor in rotations)
    assert work.double_products == 0
    making = needed_work(first)
    if name.startswith("liere"):
        assert work.products == cost.rotating_operations
        assert making.bytes - work.bytes == sum(tensor.nbytes for tensor in rotations)
        if name == "liere4":
            # In closed form: four products for each entry, and fewer than as many again for cos and sin.
            entries = sum(tensor.numel() for tensor in rotations)
            assert making.double_products == 0 and 4 < (making.products - work.products) / entries < 8
        else:
            assert 0.6 * 0.6 < making.double_products / cost.rotation_operations < 1.2 * 0.6
    else:
        assert work.products == sum(2 * state.numel() for state in states)
        assert making.bytes > work.bytes and making.double_products == 0


def test_limit_of_training():
    """Backward at least as much as forward; fixed rotations have no gradient; folded ones are not made."""
    for name in ROWS:
        forward, step = (needed_work(addition_of(name, training, False)) for training in (False, True))
        assert step.bytes > 1.5 * forward.bytes and step.products >= 2 * forward.products - 1e4
        assert step.double_products == forward.double_products
    fixed, learned = (needed_work(addition_of(name, training=True)) for name in ("axial_rope", "rope_mixed"))
    assert fixed.bytes < learned.bytes
    folded = (needed_work(addition_of("folded_liere8", keeps_rotations=kept)) for kept in (True, False))
    assert len(set(folded)) == 1


def test_seconds_of_work():
    rates = {"bandwidth": {"cpu": 10.0}, "float32": {"cpu": 2.0}, "float64": {"cpu": 1.0}}
    assert (Work(20, 4, 3) + Work(bytes=10)).seconds(rates, "cpu") == 3 + 2 + 3


def prepared(path, *arguments):
    """Records of one case without measurements, and the arguments to print the table of them."""
    arguments = [*TINY, "--table", "added", "--whole_rounds", "0", "--rounds", "6", *arguments]
    case = benchmark_speed.read_cases(benchmark_speed.parse_arguments(arguments))[0]
    return measurements.Records(path, runner.machine("cpu"), resume=False), case, [*arguments, "--output", str(path)]


def test_shares_limits_and_contradictions(tmp_path, capsys):
    records, case, arguments = prepared(tmp_path / "speed.jsonl", "--rows", "rope_mixed", "liere8", "folded_liere8")
    for name in ("rope_mixed", "liere8", "folded_liere8"):
        shares = {"added_inference": [0.011, 0.012, 0.013, 0.012, 0.012, 0.0119], "added_first": [0.05] * 6}
        if not name.startswith("folded"):
            shares["added_training"] = [0.04, 0.05, 0.06, 0.07, 0.05, 0.05] if name == "liere8" else [0.02] * 6
        add_shares(records, case, name, **shares)
    rates = {name: {"wall": 100.0, "cpu": 1.0} for name in ("bandwidth", "float32", "float64")}
    records.add(case=case.key, quantity="rates", row="absolute", value=rates)
    work = dataclasses.asdict(Work(bytes=0.4))
    records.add(case=case.key, quantity="work", row="rope_mixed", of="added_inference", value=work)
    add_shares(records, case, "rope_mixed", training=[1.07, 1.08, 1.09, 1.07, 1.08, 1.08])
    assert benchmark_speed.main([*arguments, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "| rope_mixed | 1.2% (1.1 – 1.3%) | 5.0% (5.0 – 5.0%) | 2.0% (2.0 – 2.0%) |" in printed
    assert "| liere8 | 1.2% (1.1 – 1.3%) | 5.0% (5.0 – 5.0%) | 4.0 – 7.0% |" in printed
    assert "| folded_liere8 | 1.2% (1.1 – 1.3%) | 5.0% (5.0 – 5.0%) | – |" in printed
    # 0.4 bytes at 100 a second beside steps of one second.
    assert "| rope_mixed | inference | 1.2% (1.1 – 1.3%) | 0.40% | 3.0 | not measured |" in printed
    assert "rope_mixed, training step: whole models differ by 7.0 – 9.0%, the added share is 2.0 – 2.0%." in printed


@pytest.mark.parametrize(
    "shares, reason",
    [
        ([0.01, 0.05, 0.02, 0.03, 0.04, 0.03], "4.0 percentage points wide, the largest difference of shares 3.0"),
        ([0.03] * 5, "6 rounds"),
    ],
)
def test_noise_is_no_table(tmp_path, capsys, monkeypatch, shares, reason):
    """An interval that is wider than all differences, or none."""
    # Nothing is measured here: the rounds that lack are those of the case.
    monkeypatch.setattr(benchmark_speed.CaseRounds, "measure", lambda self: None)
    records, case, arguments = prepared(tmp_path / "speed.jsonl", "--rows", "rope_mixed", "liere8")
    for name in ("rope_mixed", "liere8"):
        add_shares(records, case, name, added_inference=shares)
    assert benchmark_speed.main([*arguments, "--resume"]) == 1
    printed = capsys.readouterr().out
    assert "No table" in printed and reason in printed and "|" not in printed
    assert tables.noise(records, [case], "wall")


@pytest.mark.slow
def test_added_shares_of_a_run(tmp_path, capsys):
    """Until a share is resolved or the rounds are over; a resumed run that lacks nothing prints the same."""
    output = tmp_path / "speed.jsonl"
    peers = {name: 3 for name in ("rope_mixed_by_timm",) if Row.parse(name).is_installed}
    rows = ["rope_mixed", "comrope_ld8", "folded_liere4", *peers]
    arguments = [*TINY, "--table", "added", "--rounds", "7", "--whole_rounds", "1", "--output", str(output)]
    assert benchmark_speed.main([*arguments, "--rows", *rows]) in (0, 1)
    first, lines = capsys.readouterr().out, read(output)
    for row, quantities in {"absolute": 0, "rope_mixed": 3, "comrope_ld8": 3, "folded_liere4": 2, **peers}.items():
        own = [line for line in lines if line.get("row") == row]
        rounds = {}
        for line in own:
            rounds.setdefault(line["quantity"], []).append(line.get("round"))
        added = {name: numbers for name, numbers in rounds.items() if name.startswith("added")}
        assert len(added) == quantities and all(numbers in ([*range(6)], [*range(7)]) for numbers in added.values())
        whole = {"inference"} if row.startswith("folded") else {"inference", "training"}
        assert set(rounds) - set(added) - {"rates", "work"} == whole
    rates = next(line["value"] for line in lines if line.get("quantity") == "rates")
    assert all(rate[clock] > 0 for rate in rates.values() for clock in ("wall", "cpu"))
    assert benchmark_speed.main([*arguments, "--rows", *rows, "--resume"]) in (0, 1)
    assert read(output) == lines and capsys.readouterr().out == first
