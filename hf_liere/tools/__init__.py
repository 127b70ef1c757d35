"""
Tools for checkpoints and models from outside: the command `hf-liere` (`cli.py`), conversion, export, inspection,
checks of rotary embeddings, model cards and the Hub. No room of the library imports it.

Its modules stood in `hf_liere` itself before. Those import paths still lead here, with a warning, until version 0.2.
"""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


MOVED = ("cli", "conversion", "convert", "environment", "export", "hub", "inspection", "rope_check")


class MovedModules(MetaPathFinder, Loader):
    """Finds `hf_liere.export` and the like. It comes first, or modules of a moved folder would load twice."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        return ModuleSpec(name, self) if package == "hf_liere" and rest.partition(".")[0] in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.replace("hf_liere", __name__, 1)
        warnings.warn(f"{module.__name__} has moved to {name}; the old name will go.", FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = importlib.import_module(name)


sys.meta_path.insert(0, MovedModules())
