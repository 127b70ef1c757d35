"""Old names of public classes and functions: they work for one more minor release, and warn."""

import pkgutil
import sys
import warnings
from collections.abc import Mapping
from typing import Any


def warn_of_renames(module: str, names: Mapping[str, tuple[str, str]]) -> None:
    """
    Let old names of an imported module give what they name now, with a `FutureWarning`. Call it once for each module.

    Type checkers and `dir` do not see old names. Files of `models/` cannot import this: call it for them elsewhere.

    Args:
        module: `__name__` of the module.
        names: for each old name the full new one, and the release that drops the old one:
            `{"rotate": ("hf_liere.patching.apply.patch", "0.3")}`.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, release = names[name]
        message = f"{module}.{name} is now {new}; hf_liere {release} drops the old name."
        warnings.warn(message, FutureWarning, stacklevel=2)
        return pkgutil.resolve_name(new)

    vars(sys.modules[module])["__getattr__"] = __getattr__
