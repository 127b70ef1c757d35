"""Guarantees of `.github/SECURITY.md` that the source shows; `test_environment.py` and `hub` test those of tokens."""

import ast

import pytest
from checkout import ROOT


FILES = sorted(path for part in ("hf_liere", "training") for path in (ROOT / part).rglob("*.py"))
# What reads a file that can contain a pickle, and the argument that forbids its code.
READERS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
# The only file that always lets code of a checkpoint run, in a process without tokens: what `push` wrote, or what
# `verify --run` was asked to run.
RUNS_CODE = ROOT / "hf_liere" / "tools" / "hub" / "reload_check.py"


def settings(tree: ast.AST):
    """Names with the values that calls and literal dictionaries give them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            yield node.arg, node.value
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values)
            yield from ((key.value, value) for key, value in pairs if isinstance(key, ast.Constant))


def refusals(code: str) -> list[str]:
    """Where code reads pickles that may run code, or allows code of a checkpoint."""
    tree = ast.parse(code)
    found = [f"{name}={ast.unparse(value)}" for name, value in settings(tree) if name == "trust_remote_code"]
    found = [setting for setting in found if setting.endswith("=True")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (reader := ast.unparse(node.func)) in READERS:
            name, safe = READERS[reader]
            given = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
            if given.get(name) is not safe:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("pickle.load", "pickle.loads"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("part", ["hf_liere", "training"])
def test_pickles_are_read_as_tensors_and_no_code_of_checkpoints_runs(part):
    for path in FILES:
        if path.is_relative_to(ROOT / part):
            expected = ["trust_remote_code=True"] if path == RUNS_CODE else []
            assert refusals(path.read_text()) == expected, path


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pickle.loads(content)",
        "load(path, trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
    ],
)
def test_unsafe_code_is_found(code):
    assert len(refusals(code)) == 1
