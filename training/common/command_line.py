"""Command line and recipe of the training scripts.

A recipe is a yaml file whose keys are command-line flags. Its flags are put before those of the command line: both are
parsed in the same way, and the command line wins because it comes last.
"""

import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hf_liere.encoding.registration import import_file
from hf_liere.errors import InputError
from training.common.arguments import ArchitectureArguments, architecture_fields
from training.common.help import asks_for_help, print_help, words_after
from training.common.recipes import read_recipe, require_keys, take_recipe, unknown_message
from training.common.tasks import with_task


NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


class Parser(HfArgumentParser):
    """Raises [`InputError`] for wrong values, where argparse prints how all flags are used and exits."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}.")


def parse_arguments(arguments: list[str] | None, argument_classes: tuple[type, ...]) -> tuple:
    """Instances of the argument classes from a recipe (`--recipe file` or first positional) and flags.

    Args:
        arguments: `None` for those of the process.

    Raises:
        InputError: for an unknown key or flag, with the closest one, and for values that a flag does not take.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if asks_for_help(arguments):
        print_help([(Path(inspect.getfile(kind)), kind.__name__) for kind in argument_classes], arguments)
    recipe, arguments = take_recipe(arguments)
    content = {} if recipe is None else read_recipe(Path(recipe))
    files = _import_files(recipe, content, arguments)
    dataset = [content.get("dataset_name"), *words_after("--dataset_name", arguments)][-1]
    argument_classes = tuple(with_task(kind, dataset) for kind in argument_classes)
    parser = Parser(argument_classes, allow_abbrev=False, add_help=False)
    known = {action.dest for action in parser._actions}
    if recipe is not None:
        require_keys(recipe, content, known)
        named = {word.split("=")[0] for word in arguments}
        if "--num_train_epochs" in named and "--max_steps" not in named:
            # Trainer would follow the steps of the recipe, not the epochs that were asked for.
            content.pop("max_steps", None)
        arguments = to_flags(content, argument_classes) + arguments + ["--recipe", recipe]
    arguments = [*arguments, *(["--register", *files] if files else [])]
    arguments = _join_numbers(arguments, _configuration_fields(argument_classes))
    for flag, following in zip(arguments, [*arguments[1:], "--"]):
        if flag == "--resume_from_checkpoint" and following.startswith("--"):
            raise InputError(f"{flag} needs a value; accepted: last, for the newest checkpoint, or a folder.")
    *parsed, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        raise InputError(unknown_message("flag", unknown[0], known))
    return tuple(parsed)


def _import_files(recipe: str | None, content: dict[str, Any], arguments: list[str]) -> list[str]:
    """Imports the files of --register, those that the recipe names relative to its folder; their paths."""
    named = content.pop("register", [])
    beside = [Path(recipe or "").parent / file for file in ([named] if isinstance(named, str) else named)]
    files = [*map(os.path.normpath, beside), *words_after("--register", arguments)]
    for file in files:
        try:
            import_file(file)
        except ValueError as error:
            raise InputError(f"--register: {error}") from error
    return files


def to_flags(settings: dict[str, Any], argument_classes: tuple[type, ...]) -> list[str]:
    """
    Settings as the words of a command line. A list in a model's configuration is one json value; any other list becomes
    several words.
    """
    whole = _configuration_fields(argument_classes)
    flags = []
    for name, value in settings.items():
        values = value if isinstance(value, list) and name not in whole else [value]
        flags += [
            f"--{name}",
            *("None" if item is None else item if isinstance(item, str) else json.dumps(item) for item in values),
        ]
    return flags


def _configuration_fields(argument_classes: tuple[type, ...]) -> set[str]:
    configurations = [part.config_class for part in argument_classes if issubclass(part, ArchitectureArguments)]
    return {name for config_class in configurations for name in architecture_fields(config_class)}


def _join_numbers(arguments: list[str], fields: set[str]) -> list[str]:
    """The words of a command line; several numbers after a field of the configuration are one json list."""
    joined: list[str] = []
    for word in arguments:
        *_, flag, first = ["", "", *joined]
        if flag[2:] in fields and NUMBER.fullmatch(word) and NUMBER.fullmatch(first.strip("[]").split(",")[-1]):
            joined[-1] = f"[{first.strip('[]')},{word}]"
        else:
            joined.append(word)
    return joined
