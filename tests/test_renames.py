"""A renamed public name works for one more minor release, and warns."""

import sys
from types import ModuleType

import pytest

import hf_liere
from hf_liere.renames import warn_of_renames


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setitem(sys.modules, "library", module := ModuleType("library"))
    warn_of_renames("library", {"attach": ("hf_liere.patch", "0.3"), "push": ("hf_liere.hub.publishing.push", "0.4")})
    return module


def test_old_names_warn_where_they_are_used(module):
    with pytest.warns(FutureWarning) as warned:
        assert module.attach is hf_liere.patch
        from library import push
    assert push is hf_liere.hub.publishing.push
    assert [str(warning.message) for warning in warned] == [
        "library.attach is now hf_liere.patch; hf_liere 0.3 drops the old name.",
        "library.push is now hf_liere.hub.publishing.push; hf_liere 0.4 drops the old name.",
    ]
    assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize("name", ["library", "hf_liere"])
def test_unknown_names_fail_as_everywhere(module, name):
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'atach'"):
        sys.modules[name].atach  # noqa: B018 (reads it)
    with pytest.raises(ImportError, match="cannot import name 'atach'"):
        exec(f"from {name} import atach")
