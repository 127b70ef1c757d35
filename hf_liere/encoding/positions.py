"""Positions of tokens: those of a grid, given ones, and those of samples with different grids."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..fast.dispatch import values_are_unknown, working_dtype
from ..fast.scaling_and_squaring import Rays
from ..registers import Register


# Value of `coordinates` → its [`Convention`].
CONVENTIONS = Register("coordinates")


@dataclass(frozen=True)
class Convention:
    """
    A value of `coordinates`, see [`rotary_fields.GridFields`].

    ```python
    from hf_liere import Convention
    Convention("0 … 1 over any grid", lambda index, size, trained, width: (index + 0.5) / size, centre=0.5)
    ```

    Attributes:
        description: Range of the coordinates, in reports on models.
        place: (index i of a patch, size n of its axis, n₀ of training, size w of the last axis) → coordinate, for
            numbers and for tensors.
        is_proportional: Whether coordinates are multiples of the index, or of its distance from the middle.
        centre: Coordinate of the centre of any input (of its columns, in `unit_width`); `None` if it depends on the
            size.
        extents: What computes the extents of patches from the spacing of an input, such as
            [`physical_spacing.physical_extents`]; `place` is then that of an input with an extent of one unit.
    """

    description: str
    place: Callable
    is_proportional: bool = False
    centre: float | None = None
    extents: Callable | None = None

    @functools.cached_property
    def samples(self) -> tuple[float, ...]:
        """The coordinates of patches of a few grids: those of another function are others."""
        sizes = itertools.product((2, 3, 5), (3, 4), (3, 5))  # n, n₀ and w
        return tuple(float(self.place(i, n, *others)) for n, *others in sizes for i in range(n))


def convention_of(config) -> Convention | None:
    """The convention of a configuration; `None` for tokens, and for models without coordinates."""
    return CONVENTIONS.get(getattr(config, "coordinates", None))


def needs_spacing(config) -> bool:
    """Whether coordinates follow from the spacing of an input, not from its grid alone."""
    convention = convention_of(config)
    return convention is not None and convention.extents is not None


def _at_least_one(size: int | torch.Tensor) -> int | torch.Tensor:
    return size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1)


def _on_train_grid(i, n, n0, w) -> Any:
    return i * (n / n0 / _at_least_one(n - 1))


def in_unit(i, n, n0, w) -> Any:
    return (i + 0.5) / n


CONVENTIONS["index"] = Convention("patch indices 0, 1, 2, …", lambda i, n, n0, w: i, True)
CONVENTIONS["train_grid"] = Convention("0 … 1 over the trained grid", _on_train_grid, True)
CONVENTIONS["centred_grid"] = Convention(
    "−½ … ½ over the trained grid", lambda i, n, n0, w: _on_train_grid(i - (n - 1) / 2, n, n0, w), True, 0.0
)
CONVENTIONS["train_index"] = Convention("indices scaled to the trained grid", lambda i, n, n0, w: i * (n0 / n), True)
CONVENTIONS["fixed_grid"] = Convention(
    "0 … 1 from the first to the last patch of any grid", lambda i, n, n0, w: i * (1 / _at_least_one(n - 1)), True, 0.5
)
CONVENTIONS["unit"] = Convention("0 … 1 over any grid", in_unit, False, 0.5)
CONVENTIONS["unit_width"] = Convention("0 … 1 over the width of a grid", lambda i, n, n0, w: (i + 0.5) / w, False, 0.5)


class TokenPositions:
    """
    Where the tokens of an input sit, class and register tokens first.

    Attributes:
        coordinates: (N, A), or (B, N, A) if samples differ, prefix tokens included.
        num_prefix_tokens: Number P of class and register tokens among them.
        grid: Patches per axis, also of a grid on which another model placed them by the shape of its input, or `None`.
        facts: Everything that determines the coordinates, if they are those of a grid.
        heads: Number of heads with coordinates of their own, (B, N, heads · A); 1 if there are none.
        total: (B, heads · A) displacement of the last token, if content moved them, see [`ContentPositions`].
    """

    facts: "GridFacts | None" = None
    heads: int = 1
    total: torch.Tensor | None = None

    def __init__(self, coordinates: torch.Tensor, num_prefix_tokens: int = 0, grid: tuple[int, ...] | None = None):
        self.coordinates = coordinates
        self.num_prefix_tokens = num_prefix_tokens
        self.grid = grid

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates."""
        return tuple(self.coordinates.shape)

    @staticmethod
    def from_grid(
        grid: tuple[int, ...],
        train_grid: tuple[int, ...],
        coordinates: str,
        num_prefix_tokens: int = 0,
        prefix_coordinate: float = 0.0,
        offsets: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> "TokenPositions":
        """
        The patches of a grid, first axis slowest (raster order), after prefix tokens.

        Args:
            grid, train_grid: Patches per axis of the input, and in training; A numbers each.
            coordinates: A convention of [`GridFields`] that needs no spacing.
            prefix_coordinate: Coordinate of prefix tokens on every axis.
            offsets: (N, A) displacements of patches in patch extents.

        Raises:
            ValueError: for any other `coordinates`; for those of a spacing call [`place_patches`].
        """
        rule = CONVENTIONS[coordinates]
        if rule.extents is not None:
            raise ValueError(
                f"coordinates={coordinates!r} follow from the spacing of an input, not from its grid alone."
            )
        device = torch.empty(0).device if device is None else device
        prefix = num_prefix_tokens, float(prefix_coordinate)
        positions = GridPositions(GridFacts(tuple(grid), tuple(train_grid), coordinates, *prefix, device, rule))
        return positions if offsets is None else positions.moved(offsets)

    @staticmethod
    def from_coordinates(
        coordinates: torch.Tensor, num_prefix_tokens: int = 0, prefix_coordinate: float = 0.0
    ) -> "TokenPositions":
        """Patches at any (…, N, A) coordinates, after prefix tokens at `prefix_coordinate` on every axis."""
        coordinates = prepend_prefix(coordinates, num_prefix_tokens, prefix_coordinate)  # (…, P + N, A)
        return TokenPositions(coordinates, num_prefix_tokens)

    def locate(self) -> "TokenPositions":
        """The same positions as plain coordinates."""
        return self

    def on_axes(self, axes: Sequence[int]) -> "TokenPositions":
        """The same tokens with the coordinates of these axes alone; all axes of a grid remain a grid."""
        if list(axes) == list(range(self.shape[-1])):
            return self
        by_head = self.locate().coordinates.unflatten(-1, (self.heads, -1))  # (…, N, heads, A)
        return self._replace(by_head[..., list(axes)].flatten(-2))  # (…, N, heads · axes)

    def unrotate_prefix(self) -> "TokenPositions":
        """The same patches, with prefix tokens at zero, where no encoding rotates them."""
        if (facts := self.facts) is not None:
            return GridPositions(facts._replace(prefix_coordinate=0.0))
        patches = self.coordinates[..., self.num_prefix_tokens :, :]  # (…, N, A)
        return TokenPositions.from_coordinates(patches, self.num_prefix_tokens)

    def by_head(self, values: torch.Tensor) -> torch.Tensor:
        """(A, layers, 1 or heads, …) → (heads · A, layers, heads, …), zero where a head meets another's axes."""
        if self.heads == 1:
            return values
        own = torch.eye(self.heads, dtype=values.dtype, device=values.device)
        own = own.view(self.heads, 1, 1, self.heads, *[1] * (values.ndim - 3))
        return (own * values).flatten(0, 1)

    def to(self, device: torch.device | str) -> "TokenPositions":
        """The same positions on `device`; hooks of accelerate move the arguments of modules with it."""
        if (facts := self.facts) is not None:
            return GridPositions(facts._replace(device=torch.device(device)))
        return self._replace(self.coordinates.to(device))

    def _replace(self, coordinates: torch.Tensor) -> "TokenPositions":
        """The same tokens at other coordinates."""
        placed = TokenPositions(coordinates, self.num_prefix_tokens)
        placed.heads = self.heads
        return placed


class GridFacts(NamedTuple):
    """
    Everything that determines the coordinates of a grid's patches and of the prefix tokens before them.

    Attributes:
        grid: Patches per axis.
        train_grid: Patches per axis in training.
        convention: A key of `CONVENTIONS`.
        num_prefix_tokens: Number P of class and register tokens.
        prefix_coordinate: Coordinate of prefix tokens on every axis.
        device: That of the coordinates.
        rule: What had the name of the convention when the grid was made.
    """

    grid: tuple[int, ...]
    train_grid: tuple[int, ...]
    convention: str
    num_prefix_tokens: int
    prefix_coordinate: float
    device: torch.device
    rule: Convention

    def coordinates(self, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """(P + N, A), with patches displaced by (N, A) `offsets` in patch extents."""
        indices = patch_indices(self.grid, self.device)  # (N, A)
        indices = indices if offsets is None else indices + offsets  # (…, N, A)
        axes = zip(indices.unbind(-1), self.grid, self.train_grid)  # ((N,), n, n₀) for every axis
        patches = torch.stack([self.rule.place(*axis, self.grid[-1]) for axis in axes], dim=-1)
        return prepend_prefix(patches, self.num_prefix_tokens, self.prefix_coordinate)  # (P + N, A)

    def rays(self) -> Rays | None:
        """Rays from the origin, if prefix tokens sit there and the first patch or the middle of the grid does."""
        if not self.rule.is_proportional or (self.prefix_coordinate != 0 and self.num_prefix_tokens):
            return None
        return Rays(self.grid, self.num_prefix_tokens, self.rule.centre == 0)


class GridPositions(TokenPositions):
    """Where the patches of a grid sit, after class and register tokens; [`moved`] displaces patches."""

    def __init__(self, facts: GridFacts):
        self._facts, self.grid, self.num_prefix_tokens = facts, facts.grid, facts.num_prefix_tokens
        self._shown: torch.Tensor | None = None

    @property
    def coordinates(self) -> torch.Tensor:
        """(P + N, A), computed when first read. If they are written into, the grid is refused from then on."""
        if self._shown is None:
            self._shown = self._facts.coordinates()  # (P + N, A)
        return self._shown

    @property
    def facts(self) -> GridFacts | None:  # type: ignore[override]
        """
        Everything that determines the coordinates; `ValueError` if these were changed in place. `None` if they were
        read and a graph would not see a change: they count then, as those of any tokens.
        """
        shown = self._shown
        if shown is None:
            return self._facts
        if values_are_unknown(shown):
            return None
        if shown.requires_grad or not torch.equal(shown, self._facts.coordinates()):
            raise ValueError(
                "The coordinates of a grid were changed in place; accepted: positions.moved(offsets), with offsets in "
                "patch extents, or a tensor of coordinates instead of a grid."
            )
        return self._facts

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the coordinates."""
        return self.num_prefix_tokens + math.prod(self._facts.grid), len(self._facts.grid)

    def moved(self, offsets: torch.Tensor) -> TokenPositions:
        """The same tokens with patches displaced by (…, N, A) `offsets` in patch extents; they are no grid then."""
        if (facts := self.facts) is None:
            raise ValueError("The coordinates of a grid were read in a graph; accepted there: moved(offsets) before.")
        return self._replace(facts.coordinates(offsets))  # (…, P + N, A)

    def locate(self) -> TokenPositions:
        return self._replace(self.coordinates if (facts := self.facts) is None else facts.coordinates())


def patch_indices(grid: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(N, A) indices of the patches of a grid in raster order, in the working type."""
    # arange, unlike linspace, keeps one compiled graph for every size.
    axes = [torch.arange(size, device=device, dtype=working_dtype(device)) for size in grid]  # A × (n,)
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)  # (N, A)


def prepend_prefix(positions: torch.Tensor, num_prefix_tokens: int, coordinate: float) -> torch.Tensor:
    """Put class and register tokens, at `coordinate` on every axis, before the patches: (…, N, A) → (…, P+N, A)."""
    if num_prefix_tokens == 0:
        return positions
    shape = (*positions.shape[:-2], num_prefix_tokens, positions.shape[-1])
    return torch.cat([positions.new_full(shape, coordinate), positions], dim=-2)  # (…, P + N, A)


class GroupedPositions(NamedTuple):
    """
    Where the tokens of a batch of inputs of different sizes sit, padded to the longest.

    Attributes:
        groups: Positions of the tokens of each distinct grid, without padding, the same for all samples of a group.
        samples: For each group, (samples,) their indices in the batch.
    """

    groups: tuple[TokenPositions, ...]
    samples: tuple[torch.Tensor, ...]

    def unrotate_prefix(self) -> "GroupedPositions":
        """As [`TokenPositions.unrotate_prefix`]."""
        return self._replace(groups=tuple(group.unrotate_prefix() for group in self.groups))

    def on_axes(self, axes: Sequence[int]) -> "GroupedPositions":
        """As [`TokenPositions.on_axes`]."""
        return self._replace(groups=tuple(group.on_axes(axes) for group in self.groups))

    def padded(self, num_tokens: int) -> torch.Tensor:
        """(B, num_tokens, A) coordinates of all samples, zero for padding."""
        return pad_rows([group.locate().coordinates for group in self.groups], self.samples, num_tokens)


def pad_rows(groups: Sequence[torch.Tensor], samples: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """
    (B, length, C) rows of all samples, zero for padding. Each group has rows (n, C), shared by the samples whose
    (samples,) indices in the batch are given.
    """
    padded = [torch.nn.functional.pad(rows, (0, 0, 0, length - len(rows))) for rows in groups]  # (length, C)
    expanded = [rows.expand(len(indices), -1, -1) for rows, indices in zip(padded, samples)]  # (samples, length, C)
    return torch.cat(expanded)[torch.cat(tuple(samples)).argsort()]  # (B, length, C)
