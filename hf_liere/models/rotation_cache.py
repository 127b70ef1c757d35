"""Rotations of the last grids, so that inference on inputs of one size computes them once."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
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

    sources: tuple[torch.Tensor, ...]
    rotations: list[Rotation]

    def num_bytes(self) -> int:
        distinct = {id(rotation): rotation for rotation in self.rotations}.values()
        tensors = [tensor for rotation in distinct for tensor in rotation if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.sources[1:], *tensors))

    def fits(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether the rotations are those of these coordinates and sources of an encoding, by value."""
        return all(torch.equal(known, given) for known, given in zip(self.sources, sources))


class RotationCache:
    """
    The rotations of the last grids that an encoding was called with while gradients were off. It is empty in a copy and
    is not saved.

    Values are compared, not versions of tensors: whatever changes a generator, the rotations are computed again. They
    are those of the encoding's `sources`, not of `parameters()`, which replicas of `DataParallel` do not have.
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
        self, encoding: nn.Module, positions: TokenPositions, states: torch.dtype | None
    ) -> Iterable[Rotation]:
        """
        What `encoding.layer_rotations(positions, states)` returns, or returned before for the same grid, coordinates,
        sources and type. Nothing is stored in training mode.
        """
        coordinates = positions.coordinates
        if encoding.training or torch.is_grad_enabled() or positions.grid is None or values_are_unknown(coordinates):
            return encoding.layer_rotations(positions, states)
        sources = (coordinates, *encoding.sources(coordinates.device))
        if values_are_unknown(*sources):
            return encoding.layer_rotations(positions, states)
        name = (positions.grid, states, encoding.rotation_dtype, *((x.dtype, x.device) for x in sources))
        with self.lock:
            entry = self.entries.get(name)
        if entry is not None and entry.fits(sources):
            return entry.rotations
        rotations = encoding.layer_rotations(positions, states)
        # Above a bound the layers are computed one by one, when they are asked for.
        if isinstance(rotations, list):
            self._store(name, _Entry((coordinates, *(source.clone() for source in sources[1:])), rotations))
        return rotations

    def _store(self, name: tuple, entry: _Entry) -> None:
        with self.lock:
            self.entries.pop(name, None)
            room = CACHE_BYTES - entry.num_bytes()
            while self.entries and sum(stored.num_bytes() for stored in self.entries.values()) > room:
                self.entries.popitem(last=False)
            if room >= 0:
                self.entries[name] = entry
