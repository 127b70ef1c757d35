"""The scripts and what they share. An import that fails names the extra that installs the library."""

import sys
from types import TracebackType


LIBRARIES = {
    "train": ("accelerate", "datasets", "evaluate", "matplotlib", "peft", "PIL", "scipy", "timm", "torchvision"),
    "app": ("gradio",),
    "detection": ("pycocotools",),
    "video": ("av", "nibabel"),
    "dicom": ("pydicom",),
}
EXTRAS = {library: extra for extra, libraries in LIBRARIES.items() for library in libraries}


def _name_extra(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    cause: BaseException | None = error
    # transformers raises another error from that of the library.
    while cause is not None:
        library = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        if library in EXTRAS:
            extra = EXTRAS[library]
            print(f"error: {library} is not installed; pip install -e '.[{extra}]' installs it.", file=sys.stderr)
            return
        cause = cause.__cause__
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _name_extra
