"""The type checker of `make test`: what it refuses."""

import pytest
from checkout import ROOT
from mypy import api


@pytest.mark.parametrize("arguments, errors", [("x: int) -> int", 0), ("x)", 1)])
def test_a_function_without_types_is_refused(tmp_path, arguments, errors):
    path = tmp_path / "double.py"
    path.write_text(f"def double({arguments}:\n    return 2 * x\n")
    found, *_ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path), str(path)])
    assert found.count("[no-untyped-def]") == errors == found.count("error:")
