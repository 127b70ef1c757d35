"""
The help of the training scripts.

Flags, values, defaults and descriptions are read from the sources of the argument classes and of the configurations.
Nothing of these is imported: torch and transformers take seconds. A field of a configuration is described in one place,
the docstring of its class.
"""

import ast
import contextlib
import functools
import importlib.util
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn


HELP, HELP_ALL = ("-h", "--help"), "--help_all"
DATA, MODEL, ENCODING, TRAINING, FURTHER = "Data", "Model", "Position encoding", "Training", "Further flags"
# The heading of a flag, by the name of the class that defines it.
HEADINGS = {
    "Augmentation": "Augmentation",
    "Condition": "Evaluation under changed conditions",
    "RotaryFields|GridFields|Patch": ENCODING,
    "Config|Checkpoint|Architecture|Detector|LanguageModel|TuningArguments|Lora": MODEL,
    "Run|Training": TRAINING,
    "": DATA,
}
ORDER = (DATA, MODEL, ENCODING, TRAINING, "Augmentation", "Evaluation under changed conditions", FURTHER)
# Fields of the transformer's configuration that place tokens, or use their places.
PLACING = re.compile("position|rotate|prefix|physical|use_absolute")
# Flags that hardly a run chooses: of backbones, and those that must stay as they are.
RARE = "apply_layernorm reshape_hidden_states remove_unused_columns logging_nan_inf_filter recipe".split()
# Fields of configurations that the library alone writes.
WRITTEN = {"folded_grids", "format_version", "shares"}
# What most runs choose, in this order, comes first below a heading; of Trainer's flags, the others are further flags.
TRAINER = "TrainingArguments"
USUAL = """
image_folder video_folder volume_file train_files validation_files dataset_name model_name_or_path position_encoding
block_size
output_dir do_train do_eval resume_from_checkpoint num_train_epochs max_steps per_device_train_batch_size
gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps weight_decay bf16 seed eval_strategy eval_steps
save_strategy save_steps logging_steps report_to dataloader_num_workers use_cpu push_to_hub hub_model_id
""".split()
# What values of a type are called.
KINDS = {"bool": "true|false", "int": "INT", "float": "NUMBER", "str": "TEXT", "dict": "JSON"}
MANY = " ..."
INDENT = " " * 6
UNKNOWN = object()
REMARK = """\
RECIPE is a yaml file of flags, such as those in training/recipes, which the command line overrides. A flag without a
default is not set by default, and --flag true may be written --flag. docs/image_folder.md and docs/training.md have
examples.
"""


@dataclass(frozen=True)
class Flag:
    """A flag; `values` says what it takes. A default that the source does not spell is `UNKNOWN`."""

    name: str
    heading: str
    values: str
    default: Any
    text: str


def answer_help(script: str) -> None:
    """Prints the help of a script and exits, if the command line of this process asks for it."""
    if asks_for_help(sys.argv[1:]):
        # Without transformers there is no help: the imports of the script say what to install.
        with contextlib.suppress(LookupError):
            files = map(Path, words_after("--register", sys.argv[1:]))
            print_help([*classes_of(Path(script)), *tasks_in(filter(Path.is_file, files))], sys.argv[1:])


def asks_for_help(arguments: Iterable[str]) -> bool:
    return not {*HELP, HELP_ALL}.isdisjoint(arguments)


def words_after(flag: str, arguments: list[str]) -> list[str]:
    """The values of a flag in a command line; those that it has last, if it is there several times."""
    values: list[str] = []
    for place, word in enumerate(arguments):
        if word == flag:
            values = list(itertools.takewhile(lambda value: not value.startswith("--"), arguments[place + 1 :]))
        elif word.startswith(f"{flag}="):
            values = [word.partition("=")[2]]
    return values


def print_help(classes: Iterable[tuple[Path, str]], arguments: Iterable[str]) -> NoReturn:
    """Prints the help that a command line asks for, and exits. Raises as [`read_flags`]."""
    print(render(Path(sys.argv[0]).name, read_flags(classes), HELP_ALL in arguments))
    sys.exit(0)


def classes_of(script: Path) -> list[tuple[Path, str]]:
    """The `ARGUMENT_CLASSES` of a script: a file where each can be found, and its name."""
    _, names = _find(script, "ARGUMENT_CLASSES")
    assert isinstance(names, ast.Tuple), "a script lists its argument classes"
    return [(script, ast.unparse(name)) for name in names.elts]


def tasks_in(files: Iterable[Path]) -> list[tuple[Path, str]]:
    """The tasks that files register, whose fields are flags too."""
    return [
        (file, name)
        for file in files
        for name, node in _names(file).items()
        if isinstance(node, ast.ClassDef) and "register_task" in map(ast.unparse, node.decorator_list)
    ]


def read_flags(classes: Iterable[tuple[Path, str]]) -> list[Flag]:
    """The flags of argument classes. Raises `LookupError` for a class that is not in its file, nor imported there."""
    flags: dict[str, Flag] = {}
    for file, name in classes:
        flags |= _flags_of(*_find(file, name))
    return list(flags.values())


def render(program: str, flags: list[Flag], everything: bool) -> str:
    """The text of a help, with all flags and whole descriptions, or without further flags."""
    width = max(80, min(shutil.get_terminal_size().columns, 120))
    lines = [f"usage: python training/{program} [RECIPE] [--FLAG VALUE ...]", "", *textwrap.wrap(REMARK, width)]
    hidden = [] if everything else [flag for flag in flags if flag.heading == FURTHER]
    for heading in ORDER:
        shown = [flag for flag in flags if flag.heading == heading and flag not in hidden]
        shown.sort(key=lambda flag: USUAL.index(flag.name) if flag.name in USUAL else len(USUAL))
        lines += ["", f"{heading}:"] if shown else []
        # Flags that share a description stand together.
        for _, alike in itertools.groupby(shown, key=lambda flag: replace(flag, name="") if flag.text else flag):
            lines += _describe(list(alike), width)
    return "\n".join([*lines, "", f"{HELP_ALL} prints {len(hidden)} further flags."] if hidden else lines)


def _describe(flags: list[Flag], width: int) -> list[str]:
    """Flags of one description: on one line with it, or on a line above."""
    flag = flags[0]
    is_set = flag.default is not UNKNOWN and flag.default not in (None, "")
    text = f"{flag.text} (default: {_spell(flag.default)})" if is_set else flag.text
    head = "  " + ", ".join(f"--{other.name} {other.values}" for other in flags)
    if len(head) > width:
        head, text = f"  --{flag.name} NAME", f"{text} Accepted: {flag.values.replace('|', ', ')}."
    if len(head) + 2 + len(text) <= width:
        return [f"{head}  {text.strip()}"]
    return [head, *textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT, break_on_hyphens=False)]


def _spell(value: Any) -> str:
    """A value as a command line gives it."""
    if isinstance(value, list):
        return " ".join(map(_spell, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flags_of(file: Path, node: ast.AST) -> dict[str, Flag]:
    """The flags of a class and of those that it extends, with the descriptions of the class that says most of it."""
    assert isinstance(node, ast.ClassDef), "flags are fields of a class"
    flags: dict[str, Flag] = {}
    if node.name == "PreTrainedConfig":
        # What every model of transformers has is not a flag.
        return flags
    for base in reversed(node.bases):
        flags |= _flags_of(*_find(file, ast.unparse(base)))
    if not node.decorator_list:
        # Only decorators make fields.
        return flags
    texts, configured = read_arguments(ast.get_docstring(node)), {}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "config_class":
            configured = _flags_of(*_find(file, ast.unparse(statement.value)))
            flags |= configured
        if not isinstance(statement, ast.AnnAssign) or _is_internal(statement):
            continue
        name = ast.unparse(statement.target)
        default, settings = _settings(file, statement.value)
        values = "|".join(settings.get("choices", ())) or _values(file, statement.annotation)
        text = " ".join([settings.get("help", ""), configured[name].text if name in configured else ""])
        if not text.strip() and name in flags:
            text = flags[name].text
        flags[name] = Flag(name, _heading(node.name, name), values, default, text)
    return {name: replace(flag, text=_plain(texts.get(name, flag.text))) for name, flag in flags.items()}


def _is_internal(field: ast.AnnAssign) -> bool:
    """Whether this is not a field, or one that only the library writes."""
    name = ast.unparse(field.target)
    return name.startswith("_") or name in WRITTEN or ast.unparse(field.annotation).startswith("ClassVar")


def _heading(kind: str, name: str) -> str:
    if name in RARE or (kind == TRAINER and name not in USUAL):
        return FURTHER
    heading = next(heading for pattern, heading in HEADINGS.items() if re.search(pattern, kind))
    return ENCODING if heading == MODEL and PLACING.search(name) else heading


def _settings(file: Path, value: ast.expr | None) -> tuple[Any, dict[str, Any]]:
    """The default of a field, and what its metadata say."""
    if not isinstance(value, ast.Call):
        return (UNKNOWN if value is None else _evaluate(file, value)), {}
    given = {word.arg: word.value for word in value.keywords if word.arg}
    if ast.unparse(value.func) == "flag":
        default, given["help"] = value.args
    else:
        default, metadata = given.get("default"), given.get("metadata")
        if isinstance(metadata, ast.Dict):
            given |= {
                key.value: entry for key, entry in zip(metadata.keys, metadata.values) if isinstance(key, ast.Constant)
            }
    settings = {name: _evaluate(file, given[name]) for name in ("help", "choices") if name in given}
    known = {name: setting for name, setting in settings.items() if setting is not UNKNOWN}
    return (UNKNOWN if default is None else _evaluate(file, default)), known


def _evaluate(file: Path, node: ast.AST) -> Any:
    """A literal, a name of one, or a list of either; `UNKNOWN` for any other expression."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "list":
        node = node.args[0]
    try:
        if isinstance(node, ast.Name):
            return _evaluate(*_find(file, node.id))
        return ast.literal_eval(node)
    except (LookupError, ValueError):
        return UNKNOWN


def _values(file: Path, annotation: ast.AST) -> str:
    """The values that a flag of this type takes."""
    if isinstance(annotation, ast.BinOp):
        parts = [_values(file, annotation.left), _values(file, annotation.right)]
        plain = ("", KINDS["str"])
        # A list of numbers includes one of them, a number an integer, and text the names of an enumeration.
        return max(parts, key=lambda part: (part.endswith(MANY), part == KINDS["float"], part not in plain, part))
    if isinstance(annotation, ast.Subscript):
        kind, inner = ast.unparse(annotation.value), annotation.slice
        if kind == "Literal":
            values = ast.literal_eval(inner)
            return "|".join(map(str, values if isinstance(values, tuple) else [values]))
        first = _values(file, inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
        return KINDS["dict"] if first.endswith(MANY) or kind == "dict" else f"{first}{MANY}"
    name = ast.unparse(annotation)
    return KINDS.get(name) or _members(file, name)


def _members(file: Path, name: str) -> str:
    """The values of an enumeration, as choices; nothing for any other class."""
    try:
        _, kind = _find(file, name)
    except LookupError:
        return ""
    if not isinstance(kind, ast.ClassDef):
        return ""
    values = [statement.value for statement in kind.body if isinstance(statement, ast.Assign)]
    return "|".join(str(value.value) for value in values if isinstance(value, ast.Constant))


def read_arguments(docstring: str | None) -> dict[str, str]:
    """The descriptions in the section `Args` of a docstring, without its indentation, by name."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{docstring}\n", re.MULTILINE)
    texts = {}
    for entry in re.split(r"^ {4}(?=\w)", section[1] if section else "", flags=re.MULTILINE)[1:]:
        names, _, text = entry.partition(":")
        texts |= dict.fromkeys(re.findall(r"\w+", names.partition("(")[0]), text)
    return texts


def _plain(text: str) -> str:
    """Without the marks of Markdown and of argparse."""
    text = re.sub(r"`([^`]*)`", lambda code: code[1].replace('"', ""), " ".join(text.split()))
    return re.sub(r"\[(\w+)\]|\*\*([\w ]+)\*\*", r"\1\2", text).replace("%%", "%")


def _find(file: Path, name: str) -> tuple[Path, ast.AST]:
    """
    What a file calls by this name: a class, or the expression of a constant, and the file that defines it.

    Raises:
        LookupError: if the file has no such name, or takes it from a library that is not installed.
    """
    found = _names(file).get(name)
    if found is None:
        raise LookupError(f"{file} has no {name}")
    if isinstance(found, ast.ImportFrom):
        (origin,) = [alias.name for alias in found.names if name == (alias.asname or alias.name)]
        return _find(_file_of(file, found.level, found.module or ""), origin)
    return file, found


@functools.cache
def _names(file: Path) -> dict[str, ast.AST]:
    """The names that a file defines and imports: classes, expressions of constants, and statements of imports."""
    names: dict[str, ast.AST] = {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    # Imports for type checkers are in a block of their own.
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node in itertools.chain(*blocks):
        if isinstance(node, ast.ImportFrom):
            names |= dict.fromkeys([alias.asname or alias.name for alias in node.names], node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names |= dict.fromkeys(map(ast.unparse, node.targets), node.value)
    return names


def _file_of(origin: Path, level: int, module: str) -> Path:
    """
    The file of a module, in whose name `level` dots stand for folders of the file that imports it.

    Raises:
        LookupError: if it is not installed.
    """
    names = module.split(".") if module else []
    if level:
        folder = origin.parents[level - 1]
    else:
        package = importlib.util.find_spec(names.pop(0))
        if package is None or not package.submodule_search_locations:
            raise LookupError(f"{module} is not installed")
        folder = Path(next(iter(package.submodule_search_locations)))
    place = folder.joinpath(*names)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        # A folder by the name of a library that is not installed, such as training/recipes/accelerate.
        raise LookupError(f"{module} is not installed")
    return file
