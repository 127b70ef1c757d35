"""Rotations of the last grids, so that inference on inputs of one size computes them once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from .positions import TokenPositions
from .rotation import Rotation
from .tracing import values_are_unknown


# Enough for LieRE64 of a ViT-B at 224 pixels, 440 MiB.
CACHE_BYTES = 1 << 29


class _Entry(NamedTuple):
    """Rotations, and the values of what they were computed from."""

    coordinates: torch.Tensor
    parameters: list[torch.Tensor]
    rotations: list[Rotation]

    def num_bytes(self) -> int:
        distinct = {id(rotation): rotation for rotation in self.rotations}.values()
        tensors = [*self.parameters, *(tensor for rotation in distinct for tensor in rotation if tensor is not None)]
        return sum(tensor.nbytes for tensor in tensors)

    def fits(self, coordinates: torch.Tensor, parameters: list[torch.Tensor]) -> bool:
        """Whether the rotations are those of these coordinates and parameters, by value."""
        pairs = zip((self.coordinates, *self.parameters), (coordinates, *parameters))
        return all(
            (ours.device, ours.dtype) == (given.device, given.dtype) and torch.equal(ours, given)
            for ours, given in pairs
        )


class RotationCache:
    """
    The rotations of the last grids that a module was called with while gradients were off. It is empty in a copy and
    is not saved.

    Values are compared, not versions of tensors: whatever changes a generator, the rotations are computed again.
    """

    def __init__(self):
        self.entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo) -> "RotationCache":
        return RotationCache()

    def __reduce__(self):
        return RotationCache, ()

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()

    def rotations(
        self, module: nn.Module, positions: TokenPositions, compute: Callable[[TokenPositions], Iterable[Rotation]]
    ) -> Iterable[Rotation]:
        """
        `compute(positions)`, or what it returned before for the same grid, coordinates and parameters of `module`.

        Args:
            module: Nothing is stored while it is in training mode. Parameters of its submodules are constants.
        """
        coordinates, parameters = positions.coordinates, list(module.parameters(recurse=False))
        is_constant = not (module.training or torch.is_grad_enabled() or positions.grid is None)
        if not is_constant or values_are_unknown(coordinates, *parameters):
            return compute(positions)
        name = (positions.grid, coordinates.dtype, coordinates.device)
        with self.lock:
            entry = self.entries.get(name)
        if entry is not None and entry.fits(coordinates, parameters):
            return entry.rotations
        rotations = compute(positions)
        # Above a bound the layers are computed one by one, when they are asked for.
        if isinstance(rotations, list):
            self._store(name, _Entry(coordinates, [parameter.clone() for parameter in parameters], rotations))
        return rotations

    def _store(self, name: tuple, entry: _Entry) -> None:
        with self.lock:
            self.entries.pop(name, None)
            room = CACHE_BYTES - entry.num_bytes()
            while self.entries and sum(stored.num_bytes() for stored in self.entries.values()) > room:
                self.entries.popitem(last=False)
            if room >= 0:
                self.entries[name] = entry
