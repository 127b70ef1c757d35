"""Encodings, starts and coordinates of users."""

import importlib
import sys
from pathlib import Path
from typing import TypeVar

import torch

from .kinds import CONVENTIONS, ENCODINGS, STARTS, Convention
from .rotary_encoding import RotaryEncoding
from .starts import Start


Encoding = TypeVar("Encoding", bound=type[RotaryEncoding])
Chosen = TypeVar("Chosen", bound=type[Start])


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
        ValueError: if it has no name, or another class has it.
    """
    ENCODINGS.register(encoding.name, encoding)
    encoding.check = staticmethod(check_entries)
    return encoding


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
    """
    CONVENTIONS.register(name, convention)


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
