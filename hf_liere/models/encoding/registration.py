"""Encodings, starts and coordinates of users."""

from typing import TypeVar

from .kinds import CONVENTIONS, ENCODINGS, STARTS, Convention
from .rotary_encoding import RotaryEncoding
from .starts import Start


Encoding = TypeVar("Encoding", bound=type[RotaryEncoding])
AnyStart = TypeVar("AnyStart", bound=type[Start])


def register_encoding(encoding: Encoding) -> Encoding:
    """
    Make a rotary encoding a value of `position_encoding`: in models, patches and the layer, in cards and commands. A
    checkpoint contains its code, so that it also loads without the package.

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
    return encoding


def register_start(start: AnyStart) -> AnyStart:
    """
    As [`register_encoding`], for a value of `rotary_init`.

    Args:
        start: A subclass of [`Start`] with a `name`; `encodings` names the encodings that accept it.
    """
    STARTS.register(start.name, start)
    return start


def register_coordinates(name: str, convention: Convention) -> None:
    """As [`register_encoding`], for a value of `coordinates`; the file is that of `convention.place`."""
    CONVENTIONS.register(name, convention)
