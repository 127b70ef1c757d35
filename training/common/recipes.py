"""Recipes, and messages about keys and flags that do not exist. Imports neither torch nor transformers."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from training.common.alone import import_alone


InputError = import_alone("hf_liere.errors").InputError
closest = import_alone("hf_liere.registers").closest

RECIPES = Path(__file__).parents[1] / "recipes"


def take_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe of a command line, if it names one, and its other words."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    for position, argument in enumerate(arguments):
        if argument == "--recipe" and position + 1 < len(arguments):
            return arguments[position + 1], arguments[:position] + arguments[position + 2 :]
        if argument.startswith("--recipe="):
            return argument.split("=", 1)[1], arguments[:position] + arguments[position + 1 :]
    return None, arguments


def read_recipe(recipe: Path) -> dict[str, Any]:
    """The flags of a recipe. Raises [`InputError`] for a file that is not there."""
    if not recipe.is_file():
        near = closest(recipe.stem, [file.stem for file in RECIPES.glob("*.yaml")])
        raise InputError(
            f"There is no recipe {str(recipe)!r}{near}; accepted: a yaml file, such as {RECIPES.name}/arrows_mini.yaml."
        )
    return {key: value for key, value in read_yaml(recipe).items() if value is not None}


def require_keys(recipe: str, content: Iterable[str], known: Collection[str]) -> None:
    """Raises [`InputError`] for a key of a recipe that is no flag."""
    for key in content:
        if key not in known:
            raise InputError(unknown_message(f"key in {Path(recipe).name}", str(key), known))


def read_yaml(file: Path) -> dict[str, Any]:
    """The content of a yaml file. Raises [`InputError`] with the position of what is not `name: value` yaml."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{file.name}{place}: this is not yaml ({getattr(error, 'problem', error)}).") from error
    if not isinstance(content, dict):
        raise InputError(f"{file.name} contains a {type(content).__name__}; accepted: `name: value` lines.")
    return content


def unknown_message(kind: str, name: str, known: Collection[str]) -> str:
    """What to say of a flag or key that does not exist."""
    if kind == "flag" and not name.startswith("-"):
        return f"{name!r} follows a flag that takes no further value; --help lists what flags take."
    near = closest(name.split("=")[0].lstrip("-"), known) or "; --help and --help_all list what is accepted"
    return f"There is no {kind} {name!r}{near}."
