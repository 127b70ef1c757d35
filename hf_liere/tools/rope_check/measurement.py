"""Measures a rotary module on this machine against float64, in the dtypes and calls in which models use it."""

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from ...probing.coordinate_probe import TOKENS, frequency_buffers
from ...probing.module_inspection import CACHES, cache_name, forward_arguments
from .diagnosis import Diagnosis, Vectors, diagnose
from .reading import CALL_ERRORS, FoundRotation
from .rotation import choose_positions


# An image of some patches, and others that a module may confuse with it: larger, and with as many patches.
GRID, OTHER_GRIDS = (6, 4), ((9, 7), (4, 6))


@dataclass
class Measurement:
    """
    Attributes:
        loaded: What the module computes as it is, for states in float32; an error of it is an alarm.
        conversions: By name of a way to use half types, what it computes then; an error of it is a hazard.
        alarms: Further faults of the module as it is: results that depend on other tokens or calls, and positions that
            coincide.
    """

    loaded: Diagnosis
    conversions: dict[str, Diagnosis] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.loaded.is_right and not self.alarms


def measure(found: FoundRotation, others: dict | None = None) -> Measurement:
    """
    Compare a rotary module with float64 at positions up to the longest, as it is and converted to half types. `others`
    are the other rotations of the model, by name.
    """
    with torch.device("cpu"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measurement = Measurement(_compare(found, copy.deepcopy(found.rope), torch.float32, others))
        measurement.alarms = list((_compare_images if found.reads_pixels else _compare_sequences)(found))
        for name, rope, dtype, context in _convert(found.rope):
            with context:
                try:
                    measurement.conversions[name] = _compare(found, rope, dtype, others)
                except CALL_ERRORS as error:
                    failure = [f"fails: {error}".splitlines()[0]]
                    measurement.conversions[name] = Diagnosis(found.rotation.name, is_right=False, remarks=failure)
    return measurement


def _convert(rope: nn.Module) -> Iterator[tuple[str, nn.Module, torch.dtype, contextlib.AbstractContextManager]]:
    """(name, module, dtype of the states, context of the call) of every way to use half types."""
    plain, autocast = contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)
    yield "states in a half type (bfloat16)", copy.deepcopy(rope), torch.bfloat16, plain
    yield "under autocast (bfloat16)", copy.deepcopy(rope), torch.float32, autocast
    yield "after model.to(dtype) (bfloat16)", copy.deepcopy(rope).to(torch.bfloat16), torch.bfloat16, plain
    yield "after model.half() (float16)", copy.deepcopy(rope).half(), torch.float16, plain


def find_positions_of(found: FoundRotation) -> torch.Tensor:
    """(N, A) positions at which a rotation is compared: chosen ones, or an image's for modules that read pixels."""
    if found.reads_pixels:
        return found.coordinates_of_image(found.image_size(GRID))
    return choose_positions(found.rotation.planes.num_axes, found.rotation.longest)


def _compare(found: FoundRotation, rope: nn.Module, dtype: torch.dtype, others: dict | None) -> Diagnosis:
    positions = find_positions_of(found)
    cos, sin = found.compute(found.image_size(GRID) if found.reads_pixels else positions, rope, dtype)  # 2 × (N, D)
    return diagnose(Vectors(found.rotation, positions, {}, {"cos": cos, "sin": sin}), others)


def _compare_images(found: FoundRotation) -> Iterator[str]:
    rope = copy.deepcopy(found.rope)
    size, *other_sizes = map(found.image_size, (GRID, *OTHER_GRIDS))
    first = found.compute(size, rope)
    for other in other_sizes:
        changed, fresh = (found.compute(other, module) for module in (rope, copy.deepcopy(found.rope)))
        if not _are_equal(changed, fresh):
            yield f"an image of {other} px gets other rotations after one of {size} px than alone"
    if not _are_equal(first, found.compute(size, rope)):
        yield f"an image of {size} px gets other rotations after other images"


def _compare_sequences(found: FoundRotation) -> Iterator[str]:
    rope = copy.deepcopy(found.rope)
    positions = find_positions_of(found)
    whole = found.compute(positions, rope)  # 2 × (N, D)
    order = positions.amax(1).argsort()  # the nearest first
    half = order[: len(order) // 2].sort().values
    wanted = [x[half] for x in whole]
    for module, length in ((copy.deepcopy(found.rope), "in"), (rope, "after")):
        if not _are_equal(found.compute(positions[half], module), wanted):
            yield f"the same positions get other rotations {length} a longer sequence"
    # As a cache passes them: one token in each call.
    for token in (0, int(order[len(order) // 2]), int(order[-1])):
        alone = found.compute(positions[token : token + 1], rope)
        if not _are_equal(alone, [x[token : token + 1] for x in whole]):
            yield f"position {positions[token].tolist()} alone, as with a cache, gets another rotation"
            break
    read = positions[:, sorted(set(found.rotation.planes.axes))].unique(dim=0)
    if (distinct := len(torch.cat(whole, 1).unique(dim=0))) < len(read):
        yield f"{len(read) - distinct} of {len(read)} positions have the same rotation as another"


def _are_equal(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    # A processor may round differently at the end of a row.
    return all(torch.allclose(x, y, rtol=0, atol=1e-6) for x, y in zip(first, second, strict=True))


def find_cache_faults(model: PreTrainedModel) -> list[str]:
    """Compares the last token of a full pass with that of a pass with a cache, for models that generate."""
    if not model.can_generate() or "input_ids" not in forward_arguments(model):
        return []
    rotations: dict[str, tuple[torch.Tensor, ...]] = {}
    tokens = torch.arange(3, 3 + 2 * TOKENS, device=model.device).unsqueeze(0)  # (1, N)
    try:
        with torch.no_grad(), contextlib.ExitStack() as hooks:
            for name, module in model.named_modules():
                if frequency_buffers(module):
                    hooks.enter_context(
                        module.register_forward_hook(lambda _, __, output, name=name: rotations.update({name: output}))
                    )
            full = model(input_ids=tokens, use_cache=False).logits[:, -1].float()  # (1, vocabulary)
            wanted = dict(rotations)
            first = model(input_ids=tokens[:, :-1], use_cache=True)
            name = cache_name(first) or CACHES[0]
            cached = model(input_ids=tokens[:, -1:], use_cache=True, **{name: first[name]}).logits[:, -1].float()
    except CALL_ERRORS as error:
        return [f"a pass with a cache fails: {str(error).splitlines()[0]}"]
    faults = [
        f"{name} rotates the last token otherwise with a cache than in a full pass"
        for name, whole in wanted.items()
        if any(not torch.allclose(x[..., -1, :], y[..., -1, :]) for x, y in zip(whole, rotations[name]))
    ]
    # Sums in another order round differently, and layers pass that on.
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * float(full.abs().max())
    if float((full - cached).abs().max()) > tolerance:
        faults.append(f"logits differ by {float((full - cached).abs().max()):.2g} with a cache")
    return faults
