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


class Block(NamedTuple):
    """`output` is the block of text right after it, or `None`; `line` is that of its fence, from 1."""

    language: str
    text: str
    output: str | None
    line: int

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


def commands(page: Path) -> list[list[str]]:
    return [words for block in blocks(page) if block.language == "bash" for words in block.commands()]
