"""Registers of what fields of a configuration name, and the files in which users register more."""

import ast
import difflib
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple


# For transformers, which refuses files with imports outside of `try` of what is not installed, in other words.
GUARD = "try:\n{}\nexcept ImportError:\n    raise"


class UserFile(NamedTuple):
    """A file in which a user registered something, as it was then: its module, path and text."""

    module: str
    path: Path
    text: str


class Register(dict):
    """What a field of a configuration names."""

    def __init__(self, field: str):
        super().__init__()
        self.field = field
        self._files: dict[str, UserFile | None] = {}

    def add(self, name: str) -> Callable:
        """Decorator of the class with this name."""

        def keep(part: Any) -> Any:
            self[name] = part
            return part

        return keep

    def register(self, name: str, part: Any) -> None:
        """
        Registers a user's class or function. Registering it again, after an edit, replaces it.

        Raises:
            ValueError: if the name is not an identifier, or names something else.
        """
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{part} needs a name for {self.field} that is an identifier, not {name!r}.")
        known, file = self.get(name), _read_file(part)
        # The copy beside a checkpoint has the same text in another module.
        is_copy = file is not None and file.text == getattr(self._files.get(name), "text", None)
        if known is not None and _place(known) != _place(part) and not is_copy:
            raise ValueError(f"{self.field}={name!r} is {' of '.join(_place(known))}; accepted: another name.")
        self[name], self._files[name] = part, file

    def files(self, name: str | None) -> list[UserFile]:
        """
        The file in which a user registered a name; none for names of ours. Raises `ValueError` if it is not one.
        """
        if name not in self._files:
            return []
        if (file := self._files[name]) is None:
            raise ValueError(
                f"{' of '.join(_place(self[name]))} cannot be saved with a model, since whoever loads it could not "
                "import it; accepted: a class in a file of its own, such as my_rotations.py, that is imported and "
                "registered there."
            )
        return [file]

    def check(self, name: str | None, *others: str) -> None:
        """Raises `ValueError` for a name that is neither registered nor among `others`; `None` means a default."""
        if name is not None:
            check_name(self.field, name, (*others, *self))

    def __missing__(self, name: str) -> None:
        check_name(self.field, name, self)


def _place(part: Any) -> tuple[str, str]:
    """Name and module of a class, or of the function of a convention."""
    function = getattr(part, "place", part)
    return function.__qualname__, function.__module__


def _read_file(part: Any) -> UserFile | None:
    """The file of a class or convention; `None` if it is not in a file that can be imported."""
    _, module = _place(part)
    path = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or path is None:
        return None
    lines = Path(path).read_text("utf-8").split("\n")
    for node in reversed(ast.parse("\n".join(lines)).body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.partition(".")[0] == "hf_liere" for name in names):
            span = slice(node.lineno - 1, node.end_lineno)
            lines[span] = GUARD.format("\n".join(f"    {line}" for line in lines[span])).split("\n")
    return UserFile(module, Path(path), "\n".join(lines))


def closest(name: object, accepted: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the accepted names, for the end of a sentence; nothing if none is similar."""
    plain, names = str(name).lower().replace("-", "_"), list(accepted)
    close = [plain] if plain in names else difflib.get_close_matches(plain, names, n=2, cutoff=cutoff)
    return f"; the closest is {' or '.join(map(repr, close))}" if close else ""


def check_name(field: str, name: str | None, accepted: Collection[str]) -> None:
    """Raises `ValueError` for a value of a field that is not accepted."""
    if name not in accepted:
        names = ", ".join(accepted) or "none"
        raise ValueError(
            f"{field}={name!r}{closest(name, accepted)}; accepted are {names}, and what imported files register "
            "(--register FILE)."
        )
