"""
The console script `hf-liere`, installed as a package of its own beside `hf_liere`.

`import hf_liere` registers models with the Auto classes, for which torch and transformers are imported: seconds that
`--help`, `--version` and mistyped commands need not wait for. Importing `hf_liere.cli` imports `hf_liere` first, so
this module runs the file by itself; what a command needs is imported when the command runs.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Run the command; returns its exit status."""
    (package,) = importlib.util.find_spec("hf_liere").submodule_search_locations
    spec = importlib.util.spec_from_file_location("hf_liere.cli", Path(package) / "cli.py")
    sys.modules[spec.name] = cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    return cli.main()
