"""Who may import whom, read from the source: a checkpoint's code must load without the package."""

import ast
import sys
from pathlib import Path

import pytest
from fresh_process import run_python

import hf_liere
import training


PACKAGE = Path(hf_liere.__file__).parent
MODELS = PACKAGE / "models"
TRAVELLING = sorted(path for path in MODELS.rglob("*.py") if path.name != "__init__.py")
# Each imports from those before it.
ROOMS = ("fast", "rotation", "probing", "encoding", "transformer", "patched")
TRAINING = Path(next(iter(training.__path__)))
# Floors of `training`: a folder imports from those below its own, a script at the root from any folder and no script.
FLOORS = (
    {"common"},
    {"data"},
    {"engine", "tasks.playground"},
    {"tasks.clip", "tasks.detection", "tasks.language", "evidence.reporting"},
    {"evidence.speed"},
    {"evidence.gpu"},
)
# Folders of folders: the parts are one below.
GROUPS = ("evidence", "tasks", "tools")
# What a checkpoint's code may import beside its siblings; transformers brings huggingface_hub.
LIBRARIES = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "") if node.level else node.module.partition(".")[0]


def part_of(names):
    """The folder, or the file at the root, of a module's names; folders in `GROUPS` are no parts, those in them are."""
    return ".".join(names[: 2 if names[0] in GROUPS else 1]).removesuffix(".py")


def parts_imported(path):
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = folder[: len(folder) - node.level + 1]
            # `from . import kernels` names a folder, or a module beside the file.
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (part_of((*above, *name.split("."))) for name in names)


def house():
    """For each part those that it imports from."""
    arrows = {}
    for path in PACKAGE.rglob("*.py"):
        part = part_of(path.relative_to(PACKAGE).parts)
        arrows.setdefault(part, set()).update(set(parts_imported(path)) - {part})
    return arrows


@pytest.mark.parametrize("path", TRAVELLING, ids=lambda path: path.stem)
def test_files_that_travel_import_each_other_alone(path):
    for name in imports(path):
        if name.startswith("."):
            depth = len(name) - len(name.lstrip("."))
            file = path.parents[depth - 1].joinpath(*name[depth:].split(".")).with_suffix(".py")
            assert file in TRAVELLING, f"{path.name}: from {name} import"
        else:
            assert name in LIBRARIES, f"{path.name}: import {name}"


def test_rooms_of_models_import_those_before_them():
    """Whoever wants to know what a rotation is need not know how it is computed, or what other models rotate."""
    assert len({path.stem for path in TRAVELLING}) == len(TRAVELLING)
    for number, room in enumerate(ROOMS):
        files = [path for path in TRAVELLING if path.parent == MODELS / room]
        assert files
        below = set() if room == "probing" else set(ROOMS[:number])
        for path in files:
            imported = {name[2:].partition(".")[0] for name in imports(path) if name.startswith("..")}
            assert imported <= {*below, "saved_code", "parts"}, f"{path.name}: {sorted(imported)}"
    assert {path.parent for path in TRAVELLING} == {MODELS, *(MODELS / room for room in ROOMS)}


@pytest.mark.parametrize("room", ROOMS)
def test_files_of_a_room_import_in_no_circle_and_on_few_floors(room):
    arrows = {
        path.stem: {name[1:] for name in imports(path) if name.startswith(".") and not name.startswith("..")}
        for path in (MODELS / room).glob("*.py")
        if path.name != "__init__.py"
    }
    assert max(assert_no_circle(arrows).values()) <= 6


def test_imports_run_one_way():
    """At most seven floors, and no circle: a part stands above every one that it imports from."""
    floors = assert_no_circle(house())
    assert max(floors.values()) <= 7, floors
    assert floors["models"] == 1


def assert_no_circle(arrows):
    """The floor of each part, by the parts that it imports from."""
    floors = {}
    while len(floors) < len(arrows):
        ready = {part for part in arrows.keys() - floors if arrows[part] <= floors.keys()}
        assert ready, {part: sorted(arrows[part] - floors.keys()) for part in arrows.keys() - floors}
        floors |= {part: 1 + max((floors[below] for below in arrows[part]), default=0) for part in ready}
    return floors


def test_training_imports_from_the_floors_below():
    folders = set().union(*FLOORS)
    scripts = {path.relative_to(TRAINING) for folder in (".", "evidence") for path in (TRAINING / folder).glob("*.py")}
    files = {path.relative_to(TRAINING) for path in TRAINING.rglob("*.py")}
    assert {part_of(path.parts) for path in files - scripts} == folders
    for path in files:
        part = part_of(path.parts)
        floor = next((number for number, names in enumerate(FLOORS) if part in names), len(FLOORS))
        imported = {part_of(name.split(".")) for name in training_imports(TRAINING / path)} - {part}
        assert imported <= set().union(*FLOORS[:floor]), f"{path}: {sorted(imported)}"


def training_imports(path):
    """Names of the modules, or folders, below `training` that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("training.") for name in names if name.startswith("training."))


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
    for path in sorted((PACKAGE / "plain").glob("*.py")):
        outside = {name.split(".")[0] for name in imports(path) if not name.startswith(".")}
        assert outside <= {"torch", "transformers", *sys.stdlib_module_names}, path.name
        assert {name for name in imports(path) if name.startswith(".")} <= {".encodings", "..version"}, path.name


def test_package_never_imports_training():
    for path in PACKAGE.rglob("*.py"):
        assert "training" not in set(imports(path)), path.name


def test_the_package_does_not_grow():
    """Every feature finds the lines that pay for it: what goes lowers this number, and nothing raises it."""
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")) <= 30_200


def test_import_needs_no_training_library():
    """Beyond what transformers imports by itself."""
    code = (
        "import sys, transformers.modeling_utils, transformers.models.auto.image_processing_auto"
        "; before = set(sys.modules); import hf_liere"
        "; new = {name.partition('.')[0] for name in set(sys.modules) - before}"
        "; print(sorted(new & {'accelerate', 'datasets', 'evaluate', 'matplotlib', 'timm', 'av', 'peft'}))"
    )
    assert run_python("-c", code).stdout.strip() == "[]"
