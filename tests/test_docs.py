"""Every Python block of the pages in docs, page by page, each page in one namespace."""

import re
from pathlib import Path

import pytest


PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": page.stem}
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page.name} has no Python block"
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        # Line numbers of the page, also in tracebacks.
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
