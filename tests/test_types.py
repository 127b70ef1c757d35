"""The type checker of `make test`: what it refuses."""

import pytest
from checkout import ROOT
from fresh_process import run_python


@pytest.mark.parametrize("arguments, errors", [("x: int) -> int", 0), ("x)", 1)])
def test_a_function_without_types_is_refused(tmp_path, arguments, errors):
    path = tmp_path / "double.py"
    path.write_text(f"def double({arguments}:\n    return 2 * x\n")
    options = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", tmp_path)
    # Called here, mypy would keep what it has read, and unfreeze what the tests freeze.
    found = run_python("-m", "mypy", *options, path, status=errors).stdout
    assert found.count("[no-untyped-def]") == errors == found.count("error:")
