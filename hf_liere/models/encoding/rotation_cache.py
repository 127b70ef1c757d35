"""Rotations of the last grids, so that inference on inputs of one size computes them once."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..rotation.dispatch import values_are_unknown
from ..rotation.rotation import Rotation
from .positions import GridPositions, TokenPositions


# Enough for LieRE64 of a ViT-B at 224 pixels, 440 MiB.
CACHE_BYTES = 1 << 29


class _Entry(NamedTuple):
    """Rotations, and the values of what they were computed from."""

    sources: tuple[torch.Tensor, ...]
    rotations: list[Rotation]

    def num_bytes(self) -> int:
        distinct = {id(rotation): rotation for rotation in self.rotations}.values()
        tensors = [tensor for rotation in distinct for tensor in rotation if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.sources, *tensors))

    def fits(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether the rotations are those of these sources of an encoding, by value."""
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
        self,
        encoding: nn.Module,
        positions: TokenPositions,
        dtype: torch.dtype | None,
        layers: slice = slice(None),
    ) -> Iterable[Rotation]:
        """
        What `encoding.layer_rotations(positions, dtype, layers)` returns, or returned before for the same facts of a
        grid, sources and type. Nothing is stored in training mode.

        Args:
            positions: That are settled; only those of a grid are kept.
        """
        if encoding.training or torch.is_grad_enabled() or not isinstance(positions, GridPositions):
            return encoding.layer_rotations(positions, dtype, layers)
        sources = encoding.sources(positions.facts.device, layers)
        if values_are_unknown(*sources):
            return encoding.layer_rotations(positions, dtype, layers)
        types = ((x.dtype, x.device) for x in sources)
        name = (positions.facts, layers.start, dtype or encoding.rotation_dtype, encoding.rotation_dtype, *types)
        with self.lock:
            entry = self.entries.get(name)
        if entry is not None and entry.fits(sources):
            return entry.rotations
        rotations = encoding.layer_rotations(positions, dtype, layers)
        # Above a bound the layers are computed one by one, when they are asked for.
        if isinstance(rotations, list):
            self._store(name, _Entry(tuple(source.clone() for source in sources), rotations))
        return rotations

    def _store(self, name: tuple, entry: _Entry) -> None:
        with self.lock:
            self.entries.pop(name, None)
            room = CACHE_BYTES - entry.num_bytes()
            while self.entries and sum(stored.num_bytes() for stored in self.entries.values()) > room:
                self.entries.popitem(last=False)
            if room >= 0:
                self.entries[name] = entry
