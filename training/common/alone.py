"""Modules of the package that need only the standard library, without the package, whose import takes seconds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_alone(name: str) -> ModuleType:
    """Imports a module such as `hf_liere.errors`; a later import of the package takes the same module."""
    if name in sys.modules:
        return sys.modules[name]
    package, *inside = name.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is beside the scripts or installed"
    file = Path(found.submodule_search_locations[0], *inside).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
