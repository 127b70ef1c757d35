"""Parts that modules offer by name, and the check of names in a configuration."""

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any


class Parts(dict):
    """Parts that modules offer by name; a checkpoint's code contains those that its configuration needs."""

    # Where other names are found. The package, which has all of ours, names the files of users.
    elsewhere = " in the code of this checkpoint; the package hf_liere has all others: install it, and import hf_liere"

    def __init__(self, field: str):
        super().__init__()
        self.field = field

    def offer(self, *names: str) -> Callable:
        """Decorator of the class or function with these names."""

        def keep(part):
            self.update(dict.fromkeys(names, part))
            return part

        return keep

    def register(self, name: str, part: Any) -> None:
        """
        Offer what a user defined; again after a change.

        Raises:
            ValueError: if the name is not an identifier, or names something else.
        """
        known = self.get(name)
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{part} needs a name for {self.field} that is an identifier, not {name!r}.")
        if known is not None and _place(known) != _place(part):
            raise ValueError(f"{self.field}={name!r} is {' of '.join(_place(known))}; accepted: another name.")
        self[name] = part

    def check(self, name: str | None, *others: str) -> None:
        """Raises `ValueError` for a name that is neither offered nor among `others`; `None` means a default."""
        if name is not None:
            check_name(self.field, name, (*others, *self))

    def __missing__(self, name: str):
        check_name(self.field, name, self)


def _place(part: Any) -> tuple[str, str]:
    """Name and module of a class, or of the function of a convention."""
    function = getattr(part, "place", part)
    return function.__qualname__, function.__module__


def closest(name: object, accepted: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the accepted names, for the end of a sentence; nothing if none is similar."""
    plain, names = str(name).lower().replace("-", "_"), list(accepted)
    close = [plain] if plain in names else difflib.get_close_matches(plain, names, n=2, cutoff=cutoff)
    return f"; the closest is {' or '.join(map(repr, close))}" if close else ""


def check_name(field: str, name: str | None, accepted: Collection[str]) -> None:
    """Raises `ValueError` for a value of a field that is not accepted."""
    if name not in accepted:
        names = ", ".join(accepted) or "none"
        raise ValueError(f"{field}={name!r}{closest(name, accepted)}; accepted are {names}{Parts.elsewhere}.")
