"""Conventions of coordinates: where a patch of a grid sits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..parts import Parts


# Value of `coordinates` → its [`Convention`].
CONVENTIONS = Parts("coordinates")


@dataclass(frozen=True)
class Convention:
    """
    A value of `coordinates`, see [`rotary_fields.GridFields`].

    Attributes:
        description: Range of the coordinates, in reports on models.
        place: (index of a patch, size n of its axis, n₀ of training, size of the last axis) → coordinate, for numbers
            and for tensors.
        is_proportional: Whether coordinates are multiples of the index, or of its distance from the middle.
        centre: Coordinate of the centre of any input (of its columns, in `unit_width`); `None` if it depends on the
            size.
        needs_spacing: Whether patches have the extents of [`physical_spacing.physical_extents`]; `place` is then that
            of an input with an extent of one unit.
    """

    description: str
    place: Callable
    is_proportional: bool = False
    centre: float | None = None
    needs_spacing: bool = False


def convention_of(config) -> Convention | None:
    """The convention of a configuration; `None` for tokens, and for models without coordinates."""
    return CONVENTIONS.get(getattr(config, "coordinates", None))


def needs_spacing(config) -> bool:
    """Whether coordinates follow from the spacing of an input, see [`Convention.needs_spacing`]."""
    convention = convention_of(config)
    return convention is not None and convention.needs_spacing


def _at_least_one(size: int | torch.Tensor) -> int | torch.Tensor:
    return size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1)


def _on_train_grid(index, size, trained, width) -> Any:
    return index * (size / trained / _at_least_one(size - 1))


def _around_middle(index, size, *others) -> Any:
    return _on_train_grid(index - (size - 1) / 2, size, *others)


def _in_unit(index, size, trained, width) -> Any:
    return (index + 0.5) / size


CONVENTIONS["index"] = Convention("patch indices 0, 1, 2, …", lambda index, size, trained, width: index, True)
CONVENTIONS["train_grid"] = Convention("0 … 1 over the trained grid", _on_train_grid, True)
CONVENTIONS["centred_grid"] = Convention("−½ … ½ over the trained grid", _around_middle, True, 0.0)
CONVENTIONS["train_index"] = Convention(
    "indices scaled to the trained grid", lambda index, size, trained, width: index * (trained / size), True
)
CONVENTIONS["fixed_grid"] = Convention(
    "0 … 1 from the first to the last patch of any grid",
    lambda index, size, trained, width: index * (1 / _at_least_one(size - 1)),
    True,
    0.5,
)
CONVENTIONS["unit"] = Convention("0 … 1 over any grid", _in_unit, False, 0.5)
CONVENTIONS["unit_width"] = Convention(
    "0 … 1 over the width of any grid", lambda index, size, trained, width: (index + 0.5) / width, False, 0.5
)
CONVENTIONS["physical"] = Convention(
    "lengths about the centre of the input, in physical_unit", _in_unit, False, 0.5, needs_spacing=True
)
