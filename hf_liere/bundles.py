"""Makes one file of several modules: the code that is saved with a checkpoint, and the layer for people who copy."""

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .models.saved_code import MARK, MODELS
from .version import __version__


HEAD = f"{MARK}{__version__}; `pip install .` in a clone of it adds fast kernels and all encodings.\n"
PACKAGE = MODELS.parent
GUIDE = """
# How a token is rotated, in the order of a forward pass; the rest computes this fast, with gradients, and saves it.
# Definitions come before their use: read from the end upwards.
#
#     LieREPixelModel.forward   cuts the image into patches; place_input gives each of the N tokens its coordinates p,
#                               those of a grid by GridFacts.coordinates
#     RotaryEncoding.forward    R(p) = exp(Σ_a p_a A_a) for all layers at once: layer_rotations (LieRE has its own)
#                               makes the A_a from the parameters by skew, and calls layer_block_rotations or planes;
#                               RotationCache keeps R(p) of recent grids in inference
#     LieREAttention.forward    q ← R(p) q and k ← R(p) k, by BlockRotation.rotate or PlaneRotation.rotate
#
# In plain PyTorch, for one layer (A axes, H heads, K blocks of size b in a head):
#
#     R = torch.matrix_exp(torch.einsum("na,ahkij->hnkij", p, A))  # (H, N, K, b, b)
#     q = torch.einsum("hnkij,bhnkj->bhnki", R, q.unflatten(-1, (K, b))).flatten(-2)  # and k alike, (B, H, N, K b)
"""


class Module(NamedTuple):
    """
    A file of `models`.

    Attributes:
        siblings: Names of the modules that it imports from `models`.
        libraries: Its other imports, by the name that each binds.
        statements: The names that each other statement binds, and its lines with the comments and space before.
    """

    path: Path
    docstring: str
    siblings: list[str]
    libraries: dict[str, str]
    statements: list[tuple[list[str], str]]


def make_code(code_file: str, classes: Iterable[str], parts: Iterable = ()) -> str:
    """
    The code of a checkpoint: the configuration, then room by room, as they import each other.

    Args:
        code_file: The name of the file without its end, and of one of the modules in it.
        classes: Names of classes that it contains, that of the configuration first; others are left out.
        parts: What the configuration needs, see [`parts.Parts`].

    Raises:
        ValueError: if two of the modules that it needs use a name for different things, or a part is of a user and not
            in a file that can be imported, see [`registration.register_encoding`].
    """
    parts = list(parts)
    modules, head = read_modules(), HEAD + GUIDE * code_file.startswith("modeling_liere")
    place = {name: module for module, read in modules.items() for names, _ in read.statements for name in names}
    of_users = {part.__module__: part for part in parts if part.__module__.partition(".")[0] != PACKAGE.name}
    modules = modules | {name.rpartition(".")[2]: _read_users(part, place) for name, part in of_users.items()}
    needed = [*(place[name] for name in classes if name in place), code_file]
    needed += [part.__module__.rpartition(".")[2] for part in parts]
    siblings = {name: module.siblings for name, module in modules.items()}
    rooms: dict[Path, list[Path]] = {}
    for module in modules.values():
        below = [modules[name].path.parent for name in module.siblings]
        rooms.setdefault(module.path.parent, []).extend(room for room in below if room != module.path.parent)
    order = in_order(rooms, rooms)
    by_room = sorted(in_order(siblings, needed), key=lambda name: order.index(modules[name].path.parent))
    return _join([modules[name] for name in dict.fromkeys([*in_order(siblings, needed[:1]), *by_room])], head)


def in_order(graph: Mapping[Any, Iterable], starts: Iterable) -> list:
    """All nodes that can be reached from `starts`, each after those that it leads to (topological order)."""
    ordered: dict[Any, None] = {}

    def visit(node: Any) -> None:
        if node not in ordered:
            for below in graph[node]:
                visit(below)
            ordered[node] = None

    for start in starts:
        visit(start)
    return list(ordered)


@cache
def read_modules() -> dict[str, Module]:
    """The modules of `models` by name."""
    return {path.stem: _read(path) for path in sorted(MODELS.rglob("*.py")) if path.name != "__init__.py"}


def _read_users(part: Any, place: Mapping[str, str]) -> Module:
    """The file of a registered class or function, which imports names from the modules that `place` tells."""
    name, what = part.__module__, f"{part.__qualname__} of {part.__module__}"
    path = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or path is None:
        raise ValueError(
            f"{what} cannot be saved with a model, since whoever loads it could not import it; accepted: a class in a "
            "file of its own, such as my_rotations.py, that is imported and registered there."
        )
    module, known = _read(Path(path)), {"torch", *sys.stdlib_module_names} - {"__future__"}
    ours = {each: text for each, text in module.libraries.items() if text.startswith("from hf_liere")}
    others = {each: text for each, text in module.libraries.items() if each not in ours}
    refused = [text for each, text in ours.items() if each not in place]
    refused += [text for text in others.values() if text.split()[1].partition(".")[0] not in known]
    if refused:
        raise ValueError(
            f"{what} cannot be saved with a model: {path} has {', '.join(refused)}; accepted: imports of torch, of "
            "Python's own modules and, without other names for them, of classes and functions from hf_liere."
        )
    if name.rpartition(".")[2] in read_modules():
        raise ValueError(f"{path} has the name of a module of hf_liere; accepted: any other.")
    return module._replace(siblings=[place[each] for each in ours], libraries=others)


def _read(path: Path) -> Module:
    text = path.read_text("utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    docstring = ast.get_docstring(tree)
    nodes, module = tree.body[docstring is not None :], Module(path, docstring or "", [], {}, [])
    end = nodes[0].lineno - 1
    for node in nodes:
        start, end = end, node.end_lineno or end
        if isinstance(node, ast.ImportFrom) and node.level:
            module.siblings.append(str(node.module).rpartition(".")[2])
            assert not any(alias.asname for alias in node.names), f"{path.name}: one file has one name for a thing"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            module.libraries.update((_bound(alias), f"{source}import {ast.unparse(alias)}") for alias in node.names)
        else:
            module.statements.append((list(_names(node)), "\n".join(lines[start:end])))
    return module


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _names(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds there."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.If):
        for inner in (*node.body, *node.orelse):
            yield from _names(inner)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from map(_bound, node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


def _join(modules: list[Module], head: str) -> str:
    # What each name is and where; a module may mean the builtin whose name another one has.
    known: dict[str, tuple[str, str]] = dict.fromkeys(vars(builtins), ("", "Python"))
    imports: dict[str, set[str]] = {}
    sections = []
    for module in modules:
        for name, statement in module.libraries.items():
            source, _, what = statement.rpartition("import ")
            _bind(known, name, statement, module)
            imports.setdefault(source, set()).add(what)
        kept = [code for names, code in module.statements if all(_bind(known, name, code, module) for name in names)]
        ours = module.path.is_relative_to(PACKAGE)
        place = Path("hf_liere", module.path.relative_to(PACKAGE)).as_posix() if ours else module.path.name
        comment = "\n".join(f"# {line}".rstrip() for line in [f"From {place}:", *module.docstring.splitlines()])
        sections.append(f"{comment}\n\n" + "\n".join(kept).strip("\n") + "\n")
    lines = [f"import {what}" for what in sorted(imports.pop("", ()))]
    lines += [f"{source}import {', '.join(sorted(names))}" for source, names in sorted(imports.items())]
    return "\n\n".join([head + "\n" + "\n".join(lines) + "\n", *sections])


def _bind(known: dict[str, tuple[str, str]], name: str, code: str, module: Module) -> bool:
    """Whether a name is new; a statement that two modules have, such as that of a logger, counts once."""
    same, place = known.setdefault(name, (code, module.path.name))
    if same.strip() != code.strip():
        raise ValueError(f"{place} and {module.path.name} go to one file, and {name} is a name of something in both.")
    return place == module.path.name
