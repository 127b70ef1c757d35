"""
The pages of the reference that are made from the code: fields of configurations, and the command line.

    python tests/support/reference_pages.py

writes them again. A test compares them with the code.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hf_liere import LieRETokensConfig, LieREVideoConfig, LieREViTConfig, RotaryPatchConfig  # noqa: E402
from hf_liere.encoding.kinds import ENCODINGS, STARTS  # noqa: E402
from hf_liere.encoding.positions import CONVENTIONS  # noqa: E402
from hf_liere.encoding.rotary_fields import RANGES, UNROTATED, GridFields, RotaryFields  # noqa: E402
from hf_liere.encoding.shares import Shares  # noqa: E402
from hf_liere.tools.cli import PARSER  # noqa: E402
from hf_liere.transformer.configuration_liere import LieREConfig, LieREPixelConfig  # noqa: E402
from hf_liere.transformer.validation import ARCHITECTURE_RANGES  # noqa: E402
from training.common.help import read_arguments  # noqa: E402


FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Made by tests/support/reference_pages.py; a test compares it with the code. -->"
FIELDS = f"""# Fields with choices

{MADE}

What you choose comes first, then what only [training](#training) uses, and what only
[compatibility](#compatibility) with other models needs. Each field is also a flag of the scripts in `training/`
(`--block_size 8`). `None` means that the encoding or the model decides. The [classes](../api/models.md) explain each
field in full, and `print(config)` shows the fields that are not the default.

## Encodings

| `position_encoding` | `block_size` | `rotary_init`, the default first | `coordinates` | scores are relative |
|---|---|---|---|---|
"""
LISTS = """
A list of them, each with its own fields, [shares a head](../orientations_and_poses.md#orientations-and-time-or-places).
"""
COMMANDS = f"""# Command line

{MADE}

The package installs the command `hf-liere`. `hf-liere COMMAND --help` prints the options below. Before the command,
`--register FILE` imports a Python file that registers [encodings of yours](../own_encoding.md). The scripts in
`training/` list their flags with `--help` as well.

| command | what it does |
|---|---|
"""
# In place of the first sentence of a docstring, where that does not stand alone.
MEANINGS = {
    "position_encoding": "How attention sees positions: not at all, by a learned table, or by rotations",
    "rotary_init": "Where learned rotations start; the table above shows what each encoding accepts",
    "coordinates": "[The coordinate of a patch](../positions.md#images-and-clips-of-any-size)",
    "position_perturbation": "In training, deviation σ of a patch from its place, in patch extents (ComRoPE eq. 11)",
    "position_shift": "In training, largest common shift of all patches, in halves of the input (DINOv3)",
    "position_jitter": "In training, largest factor that stretches each axis (DINOv3)",
    "position_rescale": "In training, largest factor that stretches all axes (DINOv3)",
    "unrotated_share": "Share of planes that do not rotate in the spectrum of `rope_theta`",
    "final_norm": "What the last layer norm is applied to: all tokens, the pooled output, or nothing",
    "pooling": "What a classifier reads: class token, mean of patches, or mean of all tokens",
    "position_table_size": "Entries of the learned table on each axis; `None` means one for each training patch",
    "physical_unit": 'The length in mm or s that counts as 1 in `coordinates="physical"`, for all axes or one per axis',
    "position_origin": "Coordinates are (positions − origin) · scale",
}
OF_PATCHES = {"position_encoding": tuple(ENCODINGS), "rotary_init": (*STARTS, "pretrained")}
OPEN = {
    "position_encoding": (*UNROTATED, *ENCODINGS),
    "rotary_init": tuple(STARTS),
    "coordinates": tuple(CONVENTIONS),
}
KINDS = {int: "whole number", float: "number", str: "text", list: "list", tuple: None, type(None): None}
# Fields that one rarely chooses, with what they are for.
GROUPS = {
    "Training": (
        "Displacements of positions, dropouts, and how weights start.",
        (
            *("position_perturbation", "position_shift", "position_jitter", "position_rescale", "patch_dropout_prob"),
            *("hidden_dropout_prob", "mlp_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"),
            *("initializer_range", "layerscale_value"),
        ),
    ),
    "Compatibility": (
        "For checkpoints of other code, such as those of the papers. Conversions and folding set them.",
        (
            *("unrotated_share", "axial_layout", "hidden_act", "token_initializer_range", "layer_norm_eps", "qkv_bias"),
            *("use_pre_layernorm", "final_norm", "classifier_hidden_size", "position_table_size", "prefix_coordinate"),
            *("position_table_resize", "apply_layernorm", "reshape_hidden_states", "folded_grids"),
        ),
    ),
}
SECTIONS = (
    ("Position encoding", RotaryFields, "models, patches and the layer"),
    ("Coordinates of patches", GridFields, "models of images and videos, and patches"),
    ("Transformer", LieREConfig, "all models"),
    ("Images and videos", LieREPixelConfig, "models of images and videos"),
    ("Images", LieREViTConfig, "models of images"),
    ("Videos and volumes", LieREVideoConfig, "models of videos and volumes"),
    ("Tokens", LieRETokensConfig, "models of tokens"),
    ("Patches", RotaryPatchConfig, "`RotaryPatchConfig`"),
)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def names(values) -> str:
    return ", ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in values)


def describe_arguments(owner: type) -> dict[str, str]:
    """The first sentence about each argument in a docstring."""
    return {
        argument: re.split(r"(?<=[^.…])[.;:](?:\s|$)", " ".join(meaning.split()), maxsplit=1)[0].rstrip(".")
        for argument, meaning in read_arguments(inspect.getdoc(owner)).items()
    }


def accepted(name: str, hint: Any, owner: type) -> str:
    """What a field accepts besides `None`."""
    listed = OPEN | OF_PATCHES if owner is RotaryPatchConfig else OPEN
    if name in listed:
        return names(listed[name])
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = []
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            found.append(names(typing.get_args(part)))
        elif part is bool:
            found.append("`True`, `False`")
        else:
            found.append(KINDS[typing.get_origin(part) or part])
    # A number may be whole.
    found = [kind for kind in dict.fromkeys(found) if kind and not (kind == "whole number" and "number" in found)]
    rules = [wording for fields, _, wording in (*RANGES, *ARCHITECTURE_RANGES) if name in fields]
    rules = [re.sub(r"^(be|lie) |, or None$| and finite in float32", "", rule) for rule in rules]
    return ", ".join([" or ".join(found), *rules])


def own_fields(owner: type) -> list[dataclasses.Field]:
    """Those that a class adds to its bases, or whose default it changes."""
    return [
        field
        for field in dataclasses.fields(owner)
        if field.name in inspect.get_annotations(owner)
        and not field.name.startswith("_")
        and field.name != "format_version"
    ]


def make_fields() -> str:
    lines = []
    for name, encoding in ENCODINGS.items():
        if encoding is Shares:
            continue
        default = encoding.block_sizes.default
        size = f"{default or 'the whole head'}{'' if encoding.block_sizes.varies else ', no other'}"
        relative = "yes" if encoding.commutes else "in one coordinate" if encoding.product else "with blocks of 2"
        starts = names(encoding.accepted_starts()) or "nothing is learned"
        lines.append(f"| `{name}` | {size} | {starts} | {names([encoding.coordinates])} | {relative} |")
    page = FIELDS + "\n".join(lines) + "\n" + LISTS
    grouped = {name: group for group, (_, names) in GROUPS.items() for name in names}
    rows: dict[str, list[str]] = {title: [] for title in (*(title for title, _, _ in SECTIONS), *GROUPS)}
    for title, owner, where in SECTIONS:
        hints, meanings = inspect.get_annotations(owner), describe_arguments(owner) | MEANINGS
        for field in own_fields(owner):
            values = accepted(field.name, hints[field.name], owner)
            cells = [f"`{field.name}`", cell(values), names([field.default]), cell(meanings[field.name])]
            group = grouped.get(field.name, title)
            rows[group].append(f"| {' | '.join(cells if group == title else [*cells, where])} |")
    for title, _, where in SECTIONS:
        if rows[title]:
            page += f"\n## {title}\n\nIn {where}:\n\n" + table(["field", "accepts", "default", "meaning"], rows[title])
    for group, (purpose, _) in GROUPS.items():
        head = ["field", "accepts", "default", "meaning", "in"]
        page += f"\n## {group}\n\n{purpose}\n\n" + table(head, rows[group])
    return page


def table(head: list[str], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]) + "\n"


def make_commands() -> str:
    (subparsers,) = (action for action in PARSER._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in subparsers._choices_actions}
    page = COMMANDS + "\n".join(f"| [`{name}`](#{name}) | {cell(text)} |" for name, text in helps.items()) + "\n"
    for name, parser in subparsers.choices.items():
        page += f"\n## {name}\n\n{cell(parser.description)}\n"
        actions = [action for action in parser._actions if action.dest != "help"]
        if actions:
            page += "\n| argument | meaning |\n|---|---|\n"
        for action in actions:
            value = action.metavar or ("" if action.nargs == 0 or not action.option_strings else action.dest.upper())
            words = [", ".join(action.option_strings) or action.metavar or action.dest]
            words += [value] if action.option_strings and value else []
            needed = " (required)" if action.required and action.option_strings else ""
            choices = f": {', '.join(f'`{choice}`' for choice in action.choices)}" if action.choices else ""
            meaning = cell(action.help % {"default": action.default})
            page += f"| `{cell(' '.join(words))}` | {meaning}{choices}{needed} |\n"
    return page


PAGES = {"fields.md": make_fields, "command_line.md": make_commands}


def main(folder: Path = FOLDER) -> None:
    for name, make in PAGES.items():
        (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
