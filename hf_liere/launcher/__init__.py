"""
The console script `hf-liere`, installed as a separate package beside `hf_liere`; it imports only the standard library.

`import hf_liere` imports torch and transformers to register models with the Auto classes. `--help`, `--version` and
mistyped commands should not wait for that, but importing `hf_liere.tools.cli` would import `hf_liere` first. So this
module runs `tools/cli.py` as a file; each command imports what it needs when it runs. Start reading there.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Run the command; returns its exit status."""
    package = importlib.util.find_spec("hf_liere")
    assert package is not None and package.submodule_search_locations, "hf_liere is not installed"
    (folder,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("hf_liere.tools.cli", Path(folder) / "tools" / "cli.py")
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    sys.modules[spec.name] = cli = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cli)
    return cli.main()
