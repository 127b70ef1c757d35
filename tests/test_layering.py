"""Who may import whom, read from the source: a tower of rooms, and what stands beside it."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT
from fresh_process import run_warm

import hf_liere
import training


PACKAGE = Path(hf_liere.__file__).parent
# Each imports from those before it, and from what stands beside them.
TOWER = ("fast", "rotation", "encoding", "transformer", "patching")
BESIDE = ("auto", "errors", "geometry", "kernels", "layer", "plain", "probing", "reading", "registers", "storage")
# How many floors the files of a room may have; 6 without a number.
FLOORS_OF_ROOMS = {"encoding": 5, "patching": 9, "transformer": 7}
TRAINING = Path(next(iter(training.__path__)))
# Floors of `training`: a folder imports from those below its own, a script at the root from any folder and no script.
FLOORS = (
    {"common"},
    {"data"},
    {"engine", "tasks.playground"},
    {"tasks.arrows", "tasks.clip", "tasks.detection", "tasks.language"},
    {"evidence.data", "evidence.encodings", "evidence.peers", "evidence.recounting", "evidence.reporting"},
    {"evidence.speed"},
    {"evidence.gpu"},
)
# Folders of folders: the parts are one below.
GROUPS = ("evidence", "tasks", "tools")


@cache
def parse(path):
    return ast.parse(path.read_text())


def imports(path, nodes=ast.walk):
    for node in nodes(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "") if node.level else node.module.partition(".")[0]


def part_of(names):
    """The folder, or the file at the root, of a module's names; folders in `GROUPS` are no parts, those in them are."""
    return ".".join(names[: 2 if names[0] in GROUPS else 1]).removesuffix(".py")


def parts_imported(path):
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(parse(path)):
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


def test_rooms_of_the_tower_import_those_before_them():
    """Whoever wants to know what a rotation is need not know how it is computed, or what patches do."""
    arrows = house()
    for number, room in enumerate(TOWER):
        assert arrows[room] & set(TOWER) <= set(TOWER[:number]), room
    for room in ("errors", "plain", "probing"):
        assert arrows[room] <= {"version"}, room
    assert "plain" not in arrows["fast"] | arrows["rotation"]


def test_the_library_takes_nothing_of_the_tools():
    """Readers of files belong to the tools; the library has its own lines."""
    arrows = house()
    assert all("tools" not in imported for part, imported in arrows.items() if not part.startswith("tools"))
    count = {
        kind: sum(path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py") if kind == of(path))
        for kind in ("library", "tools")
    }
    assert count["tools"] <= 8_936 and count["library"] <= LIBRARY_LINES, count


LIBRARY_LINES = 22_460


def of(path):
    return "tools" if path.relative_to(PACKAGE).parts[0] in ("tools", "reading", "launcher") else "library"


@pytest.mark.parametrize("room", [*TOWER, "probing", "geometry", "layer", "storage"])
def test_files_of_a_room_import_in_no_circle_and_on_few_floors(room):
    """What a function imports when it is called stands above it."""
    arrows = {
        path.stem: {name[1:] for name in imports(path, ast.iter_child_nodes) if re.match(r"\.[^.]", name)}
        for path in (PACKAGE / room).glob("*.py")
        if path.name != "__init__.py"
    }
    arrows = {name: {below for below in imported if below in arrows} for name, imported in arrows.items()}
    assert max(assert_no_circle(arrows).values()) <= FLOORS_OF_ROOMS.get(room, 6)
    assert room != "encoding" or len(arrows) <= 14


def test_imports_run_one_way():
    """In no circle, the library on at most seven floors: a part stands above every one that it imports from."""
    floors = assert_no_circle(house())
    assert max(floor for part, floor in floors.items() if not part.startswith("tools")) <= 7, floors
    assert {part for part in floors if not part.startswith("tools")} <= {
        *TOWER,
        *BESIDE,
        "",
        "__init__",
        "timm_models",
        "upgrades",
        "version",
        "launcher",
    }


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
    files = {path for path in files if path.parts[:2] != ("evidence", "tests")}
    assert {part_of(path.parts) for path in files - scripts} == folders
    for path in files:
        part = part_of(path.parts)
        floor = next((number for number, names in enumerate(FLOORS) if part in names), len(FLOORS))
        imported = {part_of(name.split(".")) for name in training_imports(TRAINING / path)} - {part}
        assert imported <= set().union(*FLOORS[:floor]), f"{path}: {sorted(imported)}"


def test_nothing_outside_imports_the_laboratory():
    """What users run, and its tests, do without the tasks and tables of our own results."""
    places = ("hf_liere", "training", "tests", ".kernels", ".ci")
    for path in (file for place in places for file in (ROOT / place).rglob("*.py")):
        if not path.is_relative_to(TRAINING / "evidence"):
            assert not {name for name in training_imports(path) if name.split(".")[0] == "evidence"}, path


def training_imports(path):
    """Names of the modules, or folders, below `training` that a file imports."""
    for node in ast.walk(parse(path)):
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
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
            for alias in node.names
        }
        assert path.stem == "auto" or not any(name.startswith("Auto") for name in names), path.name


def test_the_reference_shares_nothing():
    """Else a mistake of the fast path could be in both."""
    for path in sorted((PACKAGE / "plain").glob("*.py")):
        outside = {name.split(".")[0] for name in imports(path) if not name.startswith(".")}
        assert outside <= {"torch", "transformers", *sys.stdlib_module_names}, path.name
        assert {name for name in imports(path) if name.startswith(".")} <= {".encodings", ".model", "..version"}, (
            path.name
        )


def test_package_never_imports_training():
    for path in PACKAGE.rglob("*.py"):
        assert "training" not in set(imports(path)), path.name


def test_the_package_does_not_grow():
    """Every feature finds the lines that pay for it: what goes lowers this number, and nothing raises it."""
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")) <= 31_396


def test_import_needs_no_training_library():
    """Beyond what transformers imports by itself."""
    code = (
        "import sys, transformers.modeling_utils, transformers.models.auto.image_processing_auto"
        "; before = set(sys.modules); import hf_liere"
        "; new = {name.partition('.')[0] for name in set(sys.modules) - before}"
        "; print(sorted(new & {'accelerate', 'datasets', 'evaluate', 'matplotlib', 'timm', 'av', 'peft'}))"
    )
    assert run_warm("-c", code).stdout.strip() == "[]"
