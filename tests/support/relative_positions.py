"""Outputs of models with RoPE depend on differences of positions."""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch
from patching_cases import outputs, randomize
from rope_cases import build, find_case
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_liere import patch
from hf_liere.patching.tower_patch import patched_towers


@contextlib.contextmanager
def changed_positions(built, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The rotary modules of a patched model get other positions, or make other coordinates of pixels."""
    handles = []
    for _, tower in patched_towers(built):
        for rope_name, probe in zip(tower.rotary_encoding.rope_names, tower.rotary_encoding.probes):
            rope = tower.get_submodule(rope_name)
            names = list(inspect.signature(type(rope).forward).parameters)[1:]

            def changed(module, args, kwargs, names=names):
                given = {**dict(zip(names, args)), **kwargs}
                return (), {**given, "position_ids": change(given["position_ids"])}

            is_inside = rope_name.rpartition(".")[0] in tower.rotary_patch.attention_names
            if "position_ids" in names and not is_inside:
                handles.append(rope.register_forward_pre_hook(changed, with_kwargs=True))
            else:
                handles.append(probe.register_forward_hook(lambda module, args, output: change(output)))
    yield
    for handle in handles:
        handle.remove()


def without_prefix(module, query, key, value, attention_mask, **kwargs):
    """Attention to all tokens but the first `module.prefix`."""
    key, value = key[:, :, module.prefix :], value[:, :, module.prefix :]
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("without_prefix", without_prefix)


def check_relative(name, config):
    """
    Outputs of a model whose rotations were changed do not change when all positions move together, whatever prefix
    tokens see: these stay where they are.
    """
    case, (built, inputs) = find_case(name), build(name)
    randomize(patch(built, config))
    if case.prefix:
        built.set_attn_implementation("without_prefix")
        for _, module in built.named_modules():
            module.prefix = case.prefix

    def found():
        with torch.no_grad():
            values = outputs(built, inputs)
        return [value[:, case.prefix :] for value in values if value.ndim > 2] if case.prefix else values

    expected = found()
    with changed_positions(built, lambda positions: positions + 64):
        moved = found()
    with changed_positions(built, lambda positions: 2 * positions):
        stretched = found()
    differences = []
    for value, other, far in zip(expected, moved, stretched, strict=True):
        scale = float(value.abs().max())
        # Angles of positions near 64 round to float32, by less than 1e-5, and the layers pass that on.
        torch.testing.assert_close(other, value, rtol=0, atol=1e-4 * scale)
        differences.append(float((far - value).abs().max()) / scale)
    assert max(differences) > 1e-2
