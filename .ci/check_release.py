"""
What a release needs that tests cannot ask of every commit. `make release-check TAG=v0.1.0` prints what is missing.
"""

import os
import re
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]


def missing(root: Path, tag: str) -> list[str]:
    """Sentences on what keeps the files in `root` from being released under `tag`."""
    version = found(r'__version__ = "(.+)"', root / "hf_liere/version.py")
    released = found(rf"## {re.escape(version or '')} \((\d{{4}}-\d\d-\d\d)\)", root / "CHANGELOG.md")
    cited = found(r"date-released: '?([\d-]+)'?", root / "CITATION.cff")
    repository = found(r'Repository = "https://github.com/(.+)/.+"', root / "pyproject.toml")
    requirements = {
        f"TAG is {tag!r}; accepted: 'v{version}', the version of hf_liere/version.py.": tag == f"v{version}",
        f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'.": released is not None,
        f"date-released of CITATION.cff is {cited}; accepted: {released}, the date in CHANGELOG.md.": cited == released,
        "[project.urls] of pyproject.toml does not name the Repository on GitHub.": repository not in (None, "OWNER"),
    }
    return [sentence for sentence, fulfilled in requirements.items() if not fulfilled]


def found(line: str, path: Path) -> str | None:
    match = re.search(rf"^{line}$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match and match[1]


if __name__ == "__main__":
    sys.exit("\n".join(missing(ROOT, os.environ.get("TAG", ""))) or None)
