"""Encodings, starts and coordinates of users."""

import contextlib
import importlib
import itertools
import math
import sys
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..rotation.exponential import skew
from ..rotation.model_basis import rotate_one
from .kinds import ENCODINGS, STARTS, Start
from .positions import CONVENTIONS, Convention, TokenPositions, in_unit
from .rotary_encoding import RotaryEncoding
from .rotary_fields import EncodingConfig


Encoding = TypeVar("Encoding", bound=type[RotaryEncoding])
Chosen = TypeVar("Chosen", bound=type[Start])
# Largest deviation, relative for generators, that rounding explains: code of users may compute in float32.
CLAIM_ROUNDING = 1e-5


def register_encoding(encoding: Encoding) -> Encoding:
    """
    Make a rotary encoding a value of `position_encoding`: in models, patches and the layer, in cards and commands. A
    checkpoint contains its code, so that it also loads without the package.

    ```python
    from hf_liere import LieRotaryEmbedding, RotaryEncoding, register_encoding

    @register_encoding
    class Diagonal(RotaryEncoding):
        name = "diagonal"
        description = "Diagonal: planes with one learned frequency for all axes"
        rotary_inits = ("normal", "zeros")

        def __init__(self, config, num_axes):
            super().__init__(config, num_axes)
            self.generators = self.new_parameter(1, self.layers, self.heads, self.num_planes)

        def entries(self, device):
            return self.to_blocks(self.generators.expand(self.num_axes, -1, -1, -1))

    rotary = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=2, position_encoding="diagonal")
    ```

    Args:
        encoding: A subclass of [`RotaryEncoding`] with a `name`, in a file that can be imported and itself imports
            torch and `hf_liere` only. Its parameters come from `new_parameter`; `entries` computes the generators from
            them. The attributes of [`RotaryEncoding`] are its defaults and rules.

    Returns:
        The class, so that this is a decorator too.

    Raises:
        ValueError: if it has no name, another class has it, or generators at random parameters are not as it says.
    """
    known = {encoding.name: ENCODINGS[encoding.name]} if encoding.name in ENCODINGS else {}
    ENCODINGS.register(encoding.name, encoding)
    try:
        check_claims(encoding.name, encoding)
    except ValueError:
        del ENCODINGS[encoding.name]
        ENCODINGS.update(known)
        raise
    encoding.check = staticmethod(check_entries)
    return encoding


@torch.no_grad()
def check_claims(name: str, kind: type[RotaryEncoding]) -> None:
    """
    Measures what an encoding says of itself for small heads, and whether it commutes if it does not say. Raises
    `ValueError` for a wrong claim.
    """
    found: list[dict[str, torch.Tensor]] = []
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for axes, head_dim in itertools.product([kind.only_axes] if kind.only_axes else [3, 2], (24, 64)):
            for size in kind.block_sizes.accepted(head_dim, axes)[:3]:
                # Code of users may fail for these sizes in any way; for others it is refused when a model is built.
                with contextlib.suppress(Exception):
                    sizes: dict[str, Any] = {"block_size": size, "num_axes": axes, "head_dim": head_dim}
                    config = EncodingConfig(position_encoding=name, num_hidden_layers=1, num_attention_heads=2, **sizes)
                    found.append(_deviations(kind(config, axes).double().eval()))
    largest = {claim: max(float(each[claim]) for each in found) for claim in (found[0] if found else ())}
    if "commutes" not in vars(kind):
        kind.commutes = largest.get("commutes", 1.0) < CLAIM_ROUNDING
    for claim, deviation in largest.items():
        value, holds = getattr(kind, claim), deviation < CLAIM_ROUNDING
        if not holds if value or claim == "product" else holds and claim == "commutes":
            raise ValueError(
                f"{kind.__name__} has {claim} = {value}, but at random parameters its generators or rotations differ "
                f"from those with {claim} = {value or claim != 'product'} by {deviation:.2g} of their size; "
                f"accepted: {claim} = {not value}, or other entries."
            )


def _deviations(encoding: RotaryEncoding) -> dict[str, torch.Tensor]:
    """By claim, how far an encoding is from it at random parameters, relative to the size of its generators."""
    for parameter in encoding.parameters():
        parameter.normal_()
    check_entries(encoding)
    entries = encoding.entries(torch.device("cpu")).double()
    rows = entries.flatten(1, 3)  # (A, blocks of all heads, b(b−1)/2)
    blocks = skew(rows, encoding.block_size)  # (A, blocks of all heads, b, b)
    products, size = blocks.unsqueeze(1) @ blocks, blocks.abs().max()  # (A, A, blocks of all heads, b, b)
    places, head_dim = torch.randn(3, encoding.num_axes, dtype=torch.float64), encoding.config.head_dim  # (N, A)
    turns: Any = encoding(TokenPositions(places), torch.float64)
    states = wanted = torch.randn(1, 2, 3, head_dim, dtype=torch.float64)
    for factor in reversed(places.diag_embed().unbind(1) if encoding.product else [places]):
        # What follows from the entries alone.
        alone: Any = RotaryEncoding.rotations_from(encoding, TokenPositions(factor), entries, torch.float64)
        wanted = rotate_one(alone[0], wanted, 2)
    return {
        "commutes": (products - products.transpose(0, 1)).abs().max() / size**2,
        "proportional": torch.linalg.svdvals(rows.transpose(0, 1))[:, 1:].norm() / size,
        "serves_one_axis": rows.norm(dim=-1).sort(dim=0).values[:-1].norm() / size,
        "product": (rotate_one(next(iter(turns)), states, 2) - wanted).abs().max(),
    }


@torch.no_grad()
def check_entries(encoding: RotaryEncoding) -> None:
    """Raises `ValueError` if an encoding of a user does not start its parameters, or makes no generators of them."""
    kind, rates = type(encoding).__name__, next(encoding.parameters(), None)
    if rates is not None and not encoding.learned:
        raise ValueError(f"{kind} has parameters and no rotary_inits that start them, such as ('normal', 'zeros').")
    found = encoding.entries(torch.device("cpu") if rates is None else rates.device)
    wanted = (encoding.num_axes, encoding.layers, encoding.heads, encoding.num_blocks, encoding.num_entries)
    if getattr(found, "shape", None) != wanted:
        raise ValueError(
            f"entries of {kind} returned {getattr(found, 'shape', found)}; needed is the shape {wanted} of axes, "
            "layers, heads, blocks and entries of a block below its diagonal."
        )


def register_start(start: Chosen) -> Chosen:
    """
    As [`register_encoding`], for a value of `rotary_init`.

    ```python
    import torch
    from hf_liere import LieRotaryEmbedding, Start, register_start

    @register_start
    class Small(Start):
        name = "small"
        encodings = ("liere",)

        @classmethod
        def parameters(cls, encoding):
            return {"generators": 0.01 * torch.randn_like(encoding.generators)}

    rotary = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=2, rotary_init="small")
    ```

    Args:
        start: A subclass of [`Start`] with a `name`; `encodings` names the encodings that accept it.
    """
    STARTS.register(start.name, start)
    return start


def register_coordinates(name: str, convention: Convention) -> None:
    """
    As [`register_encoding`], for a value of `coordinates`; the file is that of `convention.place`.

    ```python
    from hf_liere import Convention, LieREViTConfig, register_coordinates
    register_coordinates("halves", Convention("0, ½, 1, …", lambda index, size, trained, width: index / 2, True))
    config = LieREViTConfig(coordinates="halves")
    ```

    Raises:
        ValueError: as [`register_encoding`], or if patches of small grids are not where the convention says.
    """
    check_convention(name, convention)
    CONVENTIONS.register(name, convention)


def check_convention(name: str, convention: Convention) -> None:
    """Raises `ValueError` if patches of small grids are not where a convention says."""
    for sizes in itertools.product((1, 2, 3, 6), (2, 3), (1, 2, 3, 6)):
        (size, _, width), place, centre = sizes, convention.place, convention.centre
        index = torch.arange(size, dtype=torch.float64)
        found = index.new_tensor([math.nan])
        # Some have no place for a single patch.
        with contextlib.suppress(ZeroDivisionError):
            found = place(index, *sizes)  # (n,)
        if size == 1 and not found.isfinite().all():
            continue
        multiples = index - index.mean() if centre == 0 else index  # (n,)
        has_centre = centre is not None and size == width > 1
        for is_claimed, claim, places in (
            (True, "place of numbers", index.new_tensor([place(i, *sizes) for i in range(size)])),
            (True, "place of tensors", place(index, *(index.new_tensor([each]) for each in sizes))),
            (convention.is_proportional, "is_proportional=True", multiples * (found[-1] - found[0]) / max(size - 1, 1)),
            (True, f"centre={centre}", found - place(index.mean(), *sizes) + centre if has_centre else found),
            (convention.extents is not None, "extents", in_unit(index, *sizes)),
        ):
            if is_claimed and not torch.allclose(found, places.to(found), rtol=0, atol=CLAIM_ROUNDING):
                raise ValueError(
                    f"coordinates={name!r}: with (size, trained, width) = {sizes} patches are at {found.tolist()}, and "
                    f"with {claim} they would be at {places.tolist()}. Accepted: the centre of every input, or None; "
                    "is_proportional for multiples of the index or, with centre=0, of the distance from the middle."
                )


def import_file(file: str | Path) -> None:
    """
    Import a file that registers something, as `import my_rotations` does in the folder of `my_rotations.py`. Raises
    `ValueError` if there is no such file, or Python imports another one by this name.
    """
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{file} is not a Python file; accepted: one that registers encodings (my_rotations.py).")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.import_module(path.stem).__file__
    if found is None or Path(found).resolve() != path:
        raise ValueError(f"{file} has the name of {found}, which Python imports; accepted: any other name.")
