"""Who may import whom, read from the source: a checkpoint's code must load without the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_liere


PACKAGE = Path(hf_liere.__file__).parent
TRAVELLING = sorted((PACKAGE / "models").glob("*.py"))
# What a checkpoint's code may import beside its siblings; transformers brings huggingface_hub.
LIBRARIES = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "") if node.level else node.module.partition(".")[0]


def parts_imported(path):
    """The parts (folders of the package, or files at its root) that a file imports from."""
    parts = path.relative_to(PACKAGE).parts
    for name in imports(path):
        depth = len(name) - len(name.lstrip("."))
        if depth == len(parts):
            part = name[depth:].partition(".")[0]
            # `from . import kernels` in a file at the root names no module.
            yield from [part] if part else [found for found in names_of(path, depth) if (PACKAGE / found).is_dir()]


def names_of(path, level):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == level and node.module is None:
            yield from (alias.name for alias in node.names)


def house():
    """For each part those that it imports from."""
    arrows = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        part = parts[0] if len(parts) > 1 else path.stem
        arrows.setdefault(part, set()).update(set(parts_imported(path)) - {part})
    return arrows


@pytest.mark.parametrize("path", TRAVELLING, ids=lambda path: path.stem)
def test_files_that_travel_import_their_siblings_alone(path):
    for name in imports(path):
        if name.startswith("."):
            assert (path.parent / f"{name[1:]}.py").is_file(), f"{path.name}: from {name} import"
        else:
            assert name in LIBRARIES, f"{path.name}: import {name}"


def test_imports_run_one_way():
    """At most seven floors, and no circle: a part stands above every one that it imports from."""
    arrows, floors = house(), {}
    while len(floors) < len(arrows):
        ready = {part for part in arrows.keys() - floors if arrows[part] <= floors.keys()}
        assert ready, {part: sorted(arrows[part] - floors.keys()) for part in arrows.keys() - floors}
        floors |= {part: 1 + max((floors[below] for below in arrows[part]), default=0) for part in ready}
    assert max(floors.values()) <= 7, floors
    assert floors["models"] == 1


def test_only_auto_touches_the_auto_classes():
    for path in PACKAGE.rglob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
            for alias in node.names
        }
        assert path.stem == "auto" or not any(name.startswith("Auto") for name in names), path.name


def test_the_reference_shares_nothing():
    """Else a mistake of the fast path could be in both."""
    assert set(imports(PACKAGE / "reference.py")) == {"collections", "torch"}


def test_package_never_imports_training():
    for path in PACKAGE.rglob("*.py"):
        assert "training" not in set(imports(path)), path.name


def test_import_needs_no_training_library():
    """Beyond what transformers imports by itself."""
    code = (
        "import sys, transformers.modeling_utils, transformers.models.auto.image_processing_auto"
        "; before = set(sys.modules); import hf_liere"
        "; new = {name.partition('.')[0] for name in set(sys.modules) - before}"
        "; print(sorted(new & {'accelerate', 'datasets', 'evaluate', 'matplotlib', 'timm', 'av', 'peft'}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
