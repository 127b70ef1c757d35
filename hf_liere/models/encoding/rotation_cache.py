"""Rotations of recent grids, so that inference on inputs of one size computes them once."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..fast.dispatch import batches_layers, in_forward_mode, values_are_unknown
from ..rotation.grouped_rotation import Rotation
from .positions import TokenPositions


# Enough for LieRE64 of a ViT-B at 224 pixels, 440 MiB.
CACHE_BYTES = 1 << 29


class _Entry(NamedTuple):
    """Rotations, and copies of the tensors that they were computed from."""

    sources: tuple[torch.Tensor, ...]
    rotations: list[Rotation]

    def num_bytes(self) -> int:
        distinct = {id(rotation): rotation for rotation in self.rotations}.values()
        tensors = [tensor for rotation in distinct for tensor in rotation if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.sources, *tensors))

    def fits(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether the rotations were computed from sources of these values."""
        return all(torch.equal(known, given) for known, given in zip(self.sources, sources))


class RotationCache:
    """
    Rotations of the grids that an encoding in evaluation mode was last called with while gradients were off; those
    stored first go first. Copies start empty, and the cache is not saved.

    It compares values, not versions of tensors, so any change of a generator computes the rotations again. It compares
    the encoding's `sources`, because replicas of `DataParallel` have no `parameters()`.
    """

    def __init__(self):
        self.stored: OrderedDict[tuple, _Entry] = OrderedDict()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo) -> "RotationCache":
        return RotationCache()

    def __reduce__(self):
        return RotationCache, ()

    def clear(self) -> None:
        with self.lock:
            self.stored.clear()

    def rotations(
        self, encoding, positions: TokenPositions, dtype: torch.dtype | None, layers: slice
    ) -> Iterable[Rotation]:
        """`encoding.layer_rotations(positions, dtype, layers)`, or in inference what was stored of a grid."""
        facts = None if encoding.training or torch.is_grad_enabled() else positions.facts
        if facts is None:
            return encoding.layer_rotations(positions, dtype, layers)
        sources = encoding.sources(facts.device, layers)
        # Accelerators would wait for the comparison of values longer than they compute; folded models have constants.
        if in_forward_mode() or batches_layers(facts.device) or values_are_unknown(*sources):
            return encoding.layer_rotations(positions, dtype, layers)
        # Sources may be computed in another type than that of the parameters, which decides that of rotations.
        types = [encoding.model_dtype, *(parameter.dtype for parameter in encoding.parameters())]
        key = (facts, layers.start, dtype, *types, *((source.dtype, source.device) for source in sources))
        rotations = self.find(key, sources)
        if rotations is None:
            rotations = encoding.layer_rotations(positions, dtype, layers)
            # Above a bound they are computed layer by layer, when they are needed.
            if isinstance(rotations, list):
                self.store(key, sources, rotations)
        return rotations

    def find(self, key: tuple, sources: tuple[torch.Tensor, ...]) -> list[Rotation] | None:
        """The rotations stored under this key, if their sources had these values."""
        with self.lock:
            entry = self.stored.get(key)
        return entry.rotations if entry is not None and entry.fits(sources) else None

    def store(self, key: tuple, sources: tuple[torch.Tensor, ...], rotations: list[Rotation]) -> None:
        """Keep rotations, and of those stored before as many as there is room for, the newest."""
        entry = _Entry(tuple(source.clone() for source in sources), rotations)
        with self.lock:
            self.stored.pop(key, None)
            room = CACHE_BYTES - entry.num_bytes()
            while self.stored and sum(each.num_bytes() for each in self.stored.values()) > room:
                self.stored.popitem(last=False)
            if room >= 0:
                self.stored[key] = entry
