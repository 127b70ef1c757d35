"""What the package replaces in other libraries, and that nothing stays of it."""

import importlib
import json
import re
import types
import warnings

import pytest
from checkout import ROOT, SUPPORT
from fresh_process import run_warm

from hf_liere.patching import guards
from hf_liere.patching.guards import GUARDS, Guard


NAMES = sorted(f"{guard.module}:{guard.name}" for guard in GUARDS)
ROW = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)` \| (.+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    found = {}
    for value in ("1", "0"):
        folder = tmp_path_factory.mktemp("saved")
        arguments = (SUPPORT / "guarded_process.py", folder, *NAMES)
        lines = run_warm(*arguments, variables={"HF_LIERE_GUARDS": value}).stdout.splitlines()
        found[value] = json.loads(lines[-1]) | {"folder": folder}
    return found


def test_what_is_replaced_is_restored(reports):
    """No function of the table and of timm stays another, and every gradient has the bits of the plain model."""
    report = reports["1"]
    assert report["imported"] == report["patched"] == report["again"] == NAMES
    assert report["uninstalled"] == [] and report["gradients"] and report["trained"]
    # Learned frequencies start at the model's, and generators at zero.
    assert report["start"] == 0
    # Loading needs no guards, but saving does.
    assert report["restored"] and not reports["0"]["restored"]


def test_nothing_is_replaced_without_guards(reports):
    report = reports["0"]
    assert report["imported"] == report["patched"] == report["uninstalled"] == report["again"] == []
    assert report["gradients"] and report["trained"]


def test_saves_that_need_a_guard_say_so(reports):
    for value, report in reports.items():
        for name, messages in report["warned"].items():
            assert bool(messages) == (value == "0"), (value, name, messages)
            assert all("save_pretrained does not save how" in one and "save_rotary" in one for one in messages)
            has_rotations = (report["folder"] / name / "rotary_config.json").exists()
            assert has_rotations == (value == "1" and name != "transformers")
    config = json.loads((reports["1"]["folder"] / "transformers" / "config.json").read_text())
    assert config["model_type"] == "rotary_llama"


def test_the_page_has_the_table():
    rows = ROW.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert rows == [(guard.module, guard.name, guard.why) for guard in GUARDS]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_wrappers_exist(guard):
    module, _, name = guard.wrapper.partition(".")
    assert callable(getattr(importlib.import_module(f"hf_liere.patching.{module}"), name))


@pytest.fixture
def library(monkeypatch):
    """A module of another library, whose guard doubles what `f` returns."""
    module = types.ModuleType("library_with_guard")
    module.f = lambda x: x
    monkeypatch.setitem(importlib.sys.modules, module.__name__, module)
    wrapper = lambda wrapped, instance, args, kwargs: 2 * wrapped(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(guards, "doubled", wrapper, raising=False)
    return module


def test_functions_that_others_have_wrapped_stay_theirs(library):
    original = library.f
    guard = Guard(library.__name__, "f", "guards.doubled", "it doubles")
    guard.install()
    guard.install()
    assert library.f(3) == 6
    ours = library.f
    library.f = theirs = lambda x: ours(x) + 1
    guard.uninstall()
    assert library.f is theirs and library.f(3) == 4
    guard.install()
    assert library.f is theirs and library.f(3) == 7
    library.f = ours
    guard.uninstall()
    assert library.f is original


def test_a_release_without_the_function_is_named(library):
    with pytest.warns(UserWarning, match="no library_with_guard.A.g, which hf_liere replaces so that it counts. Save"):
        Guard(library.__name__, "A.g", "guards.doubled", "it counts").install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Guard(library.__name__, "f", "guards.doubled", "it doubles").install()


def test_functions_that_were_imported_before_are_replaced_too(library, monkeypatch):
    """`from library import f`, in a script that imports this package later; and what it has by this name otherwise."""
    original, script, other = library.f, types.ModuleType("script_before"), types.ModuleType("script_with_another")
    script.f, other.f = original, len
    for module in (script, other):
        monkeypatch.setitem(importlib.sys.modules, module.__name__, module)
    guard = Guard(library.__name__, "f", "guards.doubled", "it doubles")
    guard.install()
    assert script.f(3) == library.f(3) == 6 and other.f is len
    guard.uninstall()
    assert script.f is library.f is original
