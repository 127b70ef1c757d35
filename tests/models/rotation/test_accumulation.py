"""`accumulate_rotations`: the gradients of plain accumulation, with one backward pass of the exponentials per step."""

import contextlib
import gc
import warnings

import pytest
import torch
from rotating import Operators
from torch.multiprocessing.reductions import StorageWeakRef

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


def run(model, batches, held=True, ends=True):
    """The micro-batches of a step; the last one is the last of its step if it `ends`."""
    for index, batch in enumerate(batches):
        is_last = ends and index == len(batches) - 1
        context = accumulate_rotations(model, sync_gradients=is_last) if held else contextlib.nullcontext()
        with context:
            model(**batch).loss.backward()


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
    run(model, images(16, 24, 16), ends=False)
    gc.collect()
    assert not any(rotation.expired() for rotation in seen)
    run(model, images(24))
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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moment", ["between", "inside", "after_forward", "exception"])
def test_a_step_that_is_left_out_leaks_nothing(model, set_to_none, moment):
    left_out, batches = images(16, 24), images(16, 16)
    run(model, images(16, 24))
    model.zero_grad(set_to_none=set_to_none)
    run(model, left_out, ends=False)
    if moment == "between":
        model.zero_grad(set_to_none=set_to_none)
    elif moment == "inside":
        with accumulate_rotations(model, sync_gradients=False):
            model(**left_out[0]).loss.backward()
            model.zero_grad(set_to_none=set_to_none)
    elif moment == "after_forward":
        with accumulate_rotations(model, sync_gradients=False):
            loss = model(**batches[0]).loss
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
    else:
        with pytest.raises(KeyboardInterrupt), accumulate_rotations(model, sync_gradients=False):
            model(**left_out[0])
            raise KeyboardInterrupt
        model.zero_grad(set_to_none=set_to_none)
    run(model, batches[moment == "after_forward" :])
    assert_plain(model, gradients(model), batches)


def test_gradients_survive_what_is_not_zeroing(model):
    """A micro-batch without backward pass, an evaluation and a penalty beside the loss."""
    batches, generators = images(16, 16), model.get_parameter(GENERATORS)

    def interrupted_run(held):
        run(model, batches[:1], held, ends=False)
        with torch.no_grad():
            model.eval()(**batches[0])
        model.train()(**batches[0])
        generators.square().sum().mul(1e-3).backward()
        run(model, batches[1:], held)
        return gradients(model)

    found, expected = interrupted_run(held=True), interrupted_run(held=False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-16)


def test_changed_generators_are_seen(model):
    """Gradients belong to the values that each micro-batch was computed with, as in plain accumulation."""
    batches, generators = images(16, 16), model.get_parameter(GENERATORS)
    before, found = generators.detach().clone(), []
    for held in (True, False):
        generators.data.copy_(before)
        run(model, batches[:1], held, ends=False)
        generators.data.mul_(1.5)
        run(model, batches[1:], held)
        found.append(gradients(model))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-16)


def test_optimizers_do_not_step_too_early(model):
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), images(16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, batches[:1], ends=False)
    with pytest.raises(RuntimeError, match="before the gradients of learned rotations are complete"):
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    # Others are not concerned.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    # The last backward pass may as well run outside of the context.
    model(**batches[1]).loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    model.load_state_dict(before)
    assert_plain(model, found, batches)
    run(model, batches[:1], ends=False)
    optimizer.zero_grad()
    optimizer.step()


def read_norm(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def read_values(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)


def halve(model):
    model.get_parameter(GENERATORS).grad.mul_(0.5)


def move_away(model):
    sums = {name: 0 + parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return sums


def add_up_data(model):
    return model.get_parameter(GENERATORS).grad.data + 1


@pytest.mark.parametrize("change", [read_norm, read_values, halve, move_away, add_up_data])
def test_incomplete_gradients_are_not_read(model, change):
    """The error is that of the line which would compute with them, and the step can go on without it."""
    batches = images(16, 16)
    run(model, batches[:1], ends=False)
    with pytest.raises(RuntimeError, match="complete after the last micro-batch of accumulate_rotations"):
        change(model)
    run(model, batches[1:])
    found = model.get_parameter(GENERATORS).grad
    assert type(found) is torch.Tensor
    model.zero_grad()
    run(model, batches, held=False)
    torch.testing.assert_close(found, model.get_parameter(GENERATORS).grad, rtol=1e-11, atol=1e-16)


def test_gradients_that_are_taken_away_stay_incomplete(model):
    """A step that begins anew leaves what was taken before as it is."""
    batches = images(16, 16)
    run(model, batches[:1], ends=False)
    taken = model.get_parameter(GENERATORS).grad
    model.zero_grad()
    run(model, batches[1:])
    assert_plain(model, gradients(model), batches[1:])
    with pytest.raises(RuntimeError, match="complete after the last micro-batch"):
        taken + 1
    assert taken.shape == model.get_parameter(GENERATORS).shape and "0." in repr(taken)


@pytest.mark.parametrize("moment", ["holding", "last"])
def test_gradients_that_autograd_returns(model, moment):
    batches, parameters = images(16, 16), list(model.parameters())
    run(model, batches[:1], ends=False)
    with accumulate_rotations(model, sync_gradients=moment == "last"):
        loss = model(**batches[1]).loss
        # Other gradients do not concern the sums.
        torch.autograd.grad(loss, [model.classifier.weight], retain_graph=True)
        torch.autograd.grad(model.get_parameter(GENERATORS).square().sum(), [model.get_parameter(GENERATORS)])
        with pytest.raises(RuntimeError, match="torch.autograd.grad returned gradients of learned rotations"):
            torch.autograd.grad(loss, parameters)
    model.zero_grad()
    run(model, batches)
    assert_plain(model, gradients(model), batches)


def test_rotations_are_not_frozen_within_a_step(model):
    batches, generators = images(16, 16, 16), model.get_parameter(GENERATORS)
    run(model, batches[:1], ends=False)
    generators.requires_grad_(False)
    # A micro-batch may leave them out, the last one may not.
    run(model, batches[1:2], ends=False)
    with pytest.raises(RuntimeError, match="frozen .requires_grad=False. between the micro-batches"):
        run(model, batches[2:])
    model.zero_grad()
    generators.requires_grad_(True)
    run(model, batches)
    assert_plain(model, gradients(model), batches)


def test_scaled_and_clipped_gradients_are_complete(model):
    batches, steps = images(16, 16, 16), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for held in (True, False):
        model.load_state_dict(before)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for index, batch in enumerate(batches):
            with accumulate_rotations(model, sync_gradients=index == 2) if held else contextlib.nullcontext():
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


def test_layers_that_rotate_one_by_one_share_the_accumulation():
    rotary = hf_liere.LieRotaryEmbedding(num_heads=2, head_dim=8, num_axes=2, block_size=8, num_layers=2).double()
    states, found = torch.randn(2, 2, 2, 16, 8).double(), []
    for held in (True, False):
        for index in range(3):
            with accumulate_rotations(rotary, sync_gradients=index == 2) if held else contextlib.nullcontext():
                positions = hf_liere.grid_positions((4, 4), coordinates="centred_grid")
                # The last micro-batch does not use the first layer.
                for layer in range(index == 2, 2):
                    query, key = rotary(*states, positions, layer=layer)
                    (query * key.roll(1, 2)).sum().backward()
        found.append(gradients(rotary))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-14)
