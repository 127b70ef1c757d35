"""The site: `make docs` builds it in docs/_build, without network."""

import json
import os
import re
import sys
from pathlib import Path

from docutils.nodes import FixedTextElement, SkipNode, Text, image, inline, literal
from latex2mathml.converter import convert as mathml
from transformers import PreTrainedConfig


DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from hf_liere import __version__  # noqa: E402
from hf_liere.encoding.rotary_fields import RotaryFields  # noqa: E402


project = "hf_liere"
release = __version__
copyright = "the authors of hf_liere"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Notebooks are read as Markdown, see `read_page`.
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
# Types of other libraries, whose pages need a network, and types in signatures, which need no page.
nitpick_ignore_regex = [("py:.*", r"(?!hf_liere).*"), ("py:class", ".*")]

html_theme = "furo"
html_title = "hf_liere"
html_static_path = ["_static"]
# Blocks without a language are diagrams, and commands in reports.
highlight_language = "none"
pygments_dark_style = "monokai"
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 4
# GitHub writes formulas in such blocks.
myst_fence_as_directive = ["math"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Files outside of docs that a page includes: links to them lead to that page.
INCLUDED = {
    ROOT / "training" / "README.md": DOCS / "reference" / "papers.md",
    ROOT / "training/evidence/results/report.md": DOCS / "reference" / "results_tables.md",
    ROOT / "training/evidence/results/archive/report.md": DOCS / "reference" / "results_archive.md",
}
CODE = re.compile(r"\[`([^`]+)`\]|(?<!`)`([^`]+)`(?!`)")
INTERVAL = re.compile(r"([−+]?[\d.]+%? – [−+]?[\d.]+%?)")
LINK = re.compile(r"""(\]\(|src=")(?![a-z]+:|#)([^)"#\s]+)""")

# GitHub shows the picture of the reader's theme; the theme of the site has a class for each.
THEMED = re.compile(
    r"""<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*"""
    r"""<img src="([^"]+)"([^>]*)>\s*</picture>"""
)


def relink(text: str, source: Path, page: Path) -> str:
    """The text of a file as a part of a page: links start at the page."""

    def moved(match: re.Match) -> str:
        target = Path(os.path.normpath(source.parent / match[2]))
        found = INCLUDED.get(target, target)
        # Cards of checkpoints are no pages: readers get the file.
        scheme = "path:" if found.suffix == ".md" and not found.is_relative_to(DOCS) else ""
        return match[1] + scheme + Path(os.path.relpath(found, page.parent)).as_posix()

    text = THEMED.sub(r'<img src="\2" class="only-light"\3>\n\n<img src="\1" class="only-dark"\3>', text)
    return LINK.sub(moved, text)


def read_page(app, name, content):
    page = Path(app.env.doc2path(name))
    text = show_notebook(content[0], page) if page.suffix == ".ipynb" else content[0]
    content[0] = relink(text, page, page)


def show_notebook(text: str, page: Path) -> str:
    """A notebook as Markdown: its texts, its code and the outputs that are stored in it. Nothing is run."""
    installation, *cells = json.loads(text)["cells"]
    parts, heading = [], ""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            heading = source.splitlines()[0].lstrip("# ")
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]).rstrip() + "\n```")
            else:
                picture = "".join(output["data"]["image/png"].split())
                parts.append(f"![{heading}](data:image/png;base64,{picture})")
    download = f"{{download}}`Download this notebook <{page.name}>` and open it in a clone. Its first cell installs:"
    parts[1:1] = [download, f"```python\n{''.join(installation['source'])}\n```"]
    return "\n\n".join(parts) + "\n"


def read_included(app, path, name, content):
    # MyST passes the name of the page without its folder.
    page = Path(app.env.doc2path(app.env.docname))
    content[0] = relink(content[0], Path(os.path.normpath(DOCS / path)), page)


def read_docstring(app, what, name, obj, options, lines):
    """Docstrings are Markdown with the sections of Google's style, as those of transformers."""
    text = re.sub(r"^( *)```(\w+)\n(.*?)^ *```$", code_block, "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|(?:\n|$))+", list_table, text, flags=re.MULTILINE)
    if what == "module":
        text = re.sub(r"\n\n((?: {4}.*\n)+)", r"\n\n.. code-block:: python\n\n\1\n", text)
    # Shapes such as (images, *grid) do not mean emphasis.
    text = re.sub(r"(?<=[(\s])\*(?=\w+[,)])", r"\\*", text)
    lines[:] = CODE.sub(code, text).split("\n")


def code(match: re.Match) -> str:
    """[`Name`] links to the page of a name in any module; names without a page stay code."""
    return f":py:obj:`{match[1]} <.{match[1]}>`" if match[1] else f"``{match[2]}``"


def read_signature(app, what, name, obj, options, signature, returned):
    """The fields of a configuration are in its docstring and on a page, those of transformers in theirs."""
    if what == "class" and issubclass(obj, (PreTrainedConfig, RotaryFields)):
        return "", None
    # Sphinx parses signatures as Python.
    return signature and signature.replace("<factory>", "..."), returned


def list_table(match: re.Match) -> str:
    header, _, *rows = (line.strip("| ").split("|") for line in match[0].splitlines())
    # A row begins with its first cell.
    cells = (
        f"   {' ' if column else '*'} - {cell.strip()}" for row in (header, *rows) for column, cell in enumerate(row)
    )
    return "\n".join([".. list-table::", "   :header-rows: 1", "", *cells, ""])


def code_block(match: re.Match) -> str:
    lines = "".join(f"    {line}\n" for line in match[3].splitlines())
    return f"{match[1]}.. code-block:: {match[2]}\n\n{lines}"


def keep_intervals(app, doctree):
    """An interval such as 86.4 – 90.1 stays on one line."""
    for text in list(doctree.findall(Text)):
        parts = INTERVAL.split(text)
        if len(parts) > 1 and not isinstance(text.parent, (literal, FixedTextElement)):
            nodes = (inline("", part, classes=["interval"] if INTERVAL.fullmatch(part) else []) for part in parts)
            text.parent.replace(text, list(nodes))


def mark_plots(app, doctree):
    for picture in doctree.findall(image):
        if "training/evidence/results/" in picture["uri"]:
            picture["classes"].append("plot")


def inline_math(self, node):
    self.body.append(mathml(node.astext()))
    raise SkipNode


def display_math(self, node):
    self.body.append(f'<div class="math">{mathml(node.astext(), display="block")}</div>')
    raise SkipNode


def setup(app):
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("doctree-read", keep_intervals)
    app.connect("doctree-read", mark_plots)
    # Before napoleon.
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-process-signature", read_signature)
    # Browsers lay out MathML by themselves; MathJax would be fetched from elsewhere.
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
