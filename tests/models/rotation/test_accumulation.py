"""`accumulate_rotations`: the gradients of plain accumulation, with one backward pass of the exponentials per step."""

import contextlib
import copy
import gc
import pickle
import warnings

import pytest
import torch
from rotating import Operators
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import hf_liere
from hf_liere import accumulate_rotations


GENERATORS = "liere.rotary_encoding.generators"


@pytest.fixture
def model(tiny):
    """In float64: another order of sums changes gradients by about 1e-16 of their size."""
    config = tiny(position_encoding="liere", block_size=8, coordinates="centred_grid")
    return hf_liere.LieREViTForImageClassification(config).double().train()


def images(*sizes, **inputs):
    """A micro-batch of two images for each size."""
    labels = torch.tensor([0, 2])
    return [{"pixel_values": torch.randn(2, 3, n, n).double(), "labels": labels, **inputs} for n in sizes]


def run(model, batches, held=True, between=None):
    """The micro-batches of a step; `between` is called after the first one, with its loss."""
    with accumulate_rotations(model) if held else contextlib.nullcontext() as window:
        for index, batch in enumerate(batches):
            if held and index == len(batches) - 1:
                window.last()
            loss = model(**batch).loss
            loss.backward()
            if between is not None and index == 0:
                between(loss)


def gradients(model):
    """The gradients, which are then removed."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def assert_plain(model, found, batches):
    """`found` are the gradients of plain accumulation over these micro-batches."""
    model.zero_grad()
    run(model, batches, held=False)
    expected = gradients(model)
    assert expected[GENERATORS].abs().max() > 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}])
@pytest.mark.parametrize("last", [16, 24, 32])
def test_gradients_are_those_of_plain_accumulation(model, checkpointing, last):
    """Also where the last micro-batch has a size that others do not have, or not theirs."""
    if checkpointing:
        with warnings.catch_warnings():
            # Later releases have another name for it.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(checkpointing)
    batches = images(16, 16, 24, last)
    with Operators() as operators:
        run(model, batches)
    for name in ("block_rotations", "block_rotations_backward"):
        distinct = {batch["pixel_values"].shape for batch in batches}
        assert operators.names.count(name) == len(distinct), name
    assert_plain(model, gradients(model), batches)


def test_nothing_stays_in_memory_after_a_step(model):
    seen = []
    remember = model.liere.rotary_encoding.register_forward_hook(
        lambda module, inputs, rotations: seen.extend(StorageWeakRef(one.blocks.untyped_storage()) for one in rotations)
    )

    def all_are_kept(loss):
        gc.collect()
        assert seen and not any(rotation.expired() for rotation in seen)

    run(model, images(16, 24, 16), between=all_are_kept)
    gc.collect()
    assert all(rotation.expired() for rotation in seen)
    remember.remove()


@pytest.mark.parametrize("last", ["given", "grid"])
def test_given_positions_take_part(model, last):
    """They are not kept, since other micro-batches hardly have the same ones."""
    given, grid = images(16, positions=torch.randn(2, 16, 2).double()), images(16, 16)
    batches = grid + given if last == "given" else grid[:1] + given + grid[1:]
    run(model, batches)
    assert_plain(model, gradients(model), batches)


def test_a_step_that_is_left_out_leaks_nothing(model):
    """An exception ends the step; copies of the model, made in its middle, take no part in it."""
    batches, copies = images(16, 16), []

    def stop(loss):
        copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        run(model, images(16, 24), between=stop)
    for each in (model, *copies):
        each.zero_grad()
        run(each, batches)
        assert_plain(each, gradients(each), batches)


def test_gradients_survive_other_passes(model):
    """A micro-batch without backward pass, an evaluation and a penalty beside the loss."""
    batches, generators = images(16, 16), model.get_parameter(GENERATORS)

    def interrupt(loss):
        with torch.no_grad():
            model.eval()(**batches[0])
        model.train()(**batches[0])
        generators.square().sum().mul(1e-3).backward()

    found = []
    for held in (True, False):
        run(model, batches, held, between=interrupt)
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-16)


def test_backward_passes_after_the_context_are_complete(model):
    batches = images(16, 16)
    with accumulate_rotations(model):
        losses = [model(**batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    assert_plain(model, gradients(model), batches)


def test_changed_generators_are_seen(model):
    """Gradients belong to the values that each micro-batch was computed with, as in plain accumulation."""
    batches, generators = images(16, 16), model.get_parameter(GENERATORS)
    before, found = generators.detach().clone(), []
    for held in (True, False):
        generators.data.copy_(before)
        run(model, batches, held, between=lambda loss: generators.data.mul_(1.5))
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-16)


CHANGES = {
    "norm": lambda model, loss: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    "values": lambda model, loss: torch.nn.utils.clip_grad_value_(model.parameters(), 0.5),
    "halved": lambda model, loss: model.get_parameter(GENERATORS).grad.mul_(0.5),
    "moved": lambda model, loss: model.zero_grad(),
    "zeroed": lambda model, loss: model.zero_grad(set_to_none=False),
    "frozen": lambda model, loss: model.get_parameter(GENERATORS).requires_grad_(False),
    "returned": lambda model, loss: torch.autograd.grad(model(**images(16)[0]).loss, list(model.parameters())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_do_not_change_before_they_are_complete(model, change):
    batches = images(16, 16)
    with pytest.raises(RuntimeError, match="before they were complete.*only backward.. is accepted"):
        run(model, batches, between=lambda loss: CHANGES[change](model, loss))
    model.requires_grad_(True)
    model.zero_grad()
    run(model, batches)
    assert_plain(model, gradients(model), batches)


def test_the_last_gradients_that_autograd_returns_are_refused(model):
    batch = images(16)[0]
    with pytest.raises(RuntimeError, match="torch.autograd.grad"), accumulate_rotations(model) as window:
        model(**batch).loss.backward()
        window.last()
        loss = model(**batch).loss
        # Other gradients do not concern the sums.
        torch.autograd.grad(loss, [model.classifier.weight], retain_graph=True)
        torch.autograd.grad(model.get_parameter(GENERATORS).square().sum(), [model.get_parameter(GENERATORS)])
        torch.autograd.grad(loss, list(model.parameters()))


def test_a_last_micro_batch_must_be_announced(model):
    with pytest.raises(RuntimeError, match="call last.. before the forward pass"), accumulate_rotations(model):
        model(**images(16)[0]).loss.backward()


def test_gradients_of_others_are_left_alone(model):
    """To the bit, also zeros with a sign, and without hooks that stay."""
    batches, parameters = images(16, 16), dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, -0.0)
    before = {name: gradient for name, parameter in parameters.items() if (gradient := parameter.grad) is not None}
    with accumulate_rotations(model):
        model(**batches[0])
    for name, parameter in parameters.items():
        assert parameter.grad is before[name] and parameter.grad.signbit().all()
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks


def test_scaled_and_clipped_gradients_are_complete(model):
    batches, steps = images(16, 16, 16), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for held in (True, False):
        model.load_state_dict(before)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with accumulate_rotations(model) if held else contextlib.nullcontext() as window:
            for index, batch in enumerate(batches):
                if held and index == 2:
                    window.last()
                scaler.scale(model(**batch).loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        scaler.step(optimizer)
        steps.append({name: value - before[name] for name, value in model.state_dict().items()})
        optimizer.zero_grad()
    # Differences of weights of about one are rounded to 1e-16.
    torch.testing.assert_close(*steps, rtol=1e-11, atol=1e-15)
    assert steps[0][GENERATORS].abs().max() > 1e-8


def test_compiled_encodings_accumulate_as_before(model, fresh_compiler):
    batches = images(16, 16)
    model.liere.rotary_encoding.compile(backend="aot_eager")
    run(model, batches)
    assert_plain(model, gradients(model), batches)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_that_rotate_one_by_one_share_the_accumulation(checkpointing):
    """Also where each layer is computed again in the backward pass."""
    rotary = hf_liere.LieRotaryEmbedding(num_heads=2, head_dim=8, num_axes=2, block_size=8, num_layers=2).double()
    states, found = torch.randn(2, 2, 2, 16, 8).double(), []

    def rotate(layer, positions):
        query, key = rotary(*states, positions, layer=layer)
        return (query * key.roll(1, 2)).sum()

    for held in (True, False):
        with accumulate_rotations(rotary) if held else contextlib.nullcontext() as window:
            for index in range(3):
                if held and index == 2:
                    window.last()
                positions, losses = hf_liere.grid_positions((4, 4), coordinates="centred_grid"), []
                # The last micro-batch does not use the first layer.
                for layer in range(index == 2, 2):
                    if held and checkpointing:
                        losses.append(checkpoint(rotate, layer, positions, use_reentrant=False))
                    else:
                        losses.append(rotate(layer, positions))
                sum(losses).backward()
        found.append(gradients(rotary))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-14)
