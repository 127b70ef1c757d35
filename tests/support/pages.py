"""The pages of the documentation for tests: their blocks of code, the output they state, and their commands."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT


TRAINING = ROOT / "training" / "README.md"
SITE = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES = [ROOT / "README.md", TRAINING, *SITE]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


# What a line prints, as a comment below it or at its end; and the shape of what a line assigns, at its end: numbers, or
# names of the axes.
PRINTED = re.compile(r"^print\(.*\)\n((?:# .*\n?)+)", re.MULTILINE)
PRINTED_AT_END = re.compile(r"^print\(.*\)  # ((?:[\[({\d]|True|False|None).*)$", re.MULTILINE)
AXIS = r"\w+(?: [+·] \w+)?"
SHAPE = re.compile(rf"^(\w+(?:, \w+)*) = .*  # \(((?:{AXIS}, )*{AXIS}),?\)", re.MULTILINE)
FILE = re.compile(r"^```(?:python|yaml)\n(# (\w+\.(?:py|yaml))\n.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """`output` is the block of text right after it, or `None`; `line` is that of its fence, from 1."""

    language: str
    text: str
    output: str | None
    line: int

    def printed(self) -> list[str]:
        """The lines that comments on `print` quote: below it lists, tuples and dictionaries, at its end values too."""
        lines = [line[2:] for found in PRINTED.findall(self.text) for line in found.splitlines()]
        return [line for line in lines if line[:1] in "[({"] + PRINTED_AT_END.findall(self.text)

    def shapes(self) -> list[tuple[str, tuple[int | None, ...]]]:
        """The names assigned once in the block, with the shapes at the ends of these lines; `None` for a named axis."""
        stated = [
            (target, tuple(int(axis) if axis.isdigit() else None for axis in shape.split(", ")))
            for targets, shape in SHAPE.findall(self.text)
            for target in targets.split(", ")
        ]
        assigned = re.findall(r"^(\w+(?:, \w+)*) = ", self.text, re.MULTILINE)
        names = [target for targets in assigned for target in targets.split(", ")]
        return [(target, shape) for target, shape in stated if names.count(target) == 1]

    def commands(self) -> list[list[str]]:
        """The words of every command of a block of bash."""
        lines = self.text.replace("\\\n", "").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    return find_blocks(page.read_text(encoding="utf-8"))


def find_blocks(text: str) -> list[Block]:
    """Those of a page or of a docstring."""
    return [Block(*found.groups(), text.count("\n", 0, found.start()) + 1) for found in BLOCK.finditer(text)]


def write_files(page: Path, folder: Path) -> set[str]:
    """Save the blocks that begin with the name of a file, as their reader does; the texts of these blocks."""
    found = FILE.findall(page.read_text(encoding="utf-8"))
    for text, file in found:
        (folder / file).write_text(text, encoding="utf-8")
    return {text for text, _ in found}


def commands(page: Path) -> list[list[str]]:
    return [words for block in blocks(page) if block.language == "bash" for words in block.commands()]
