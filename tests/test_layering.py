"""Who may import whom, read from the source: a checkpoint's code must load without the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_liere


PACKAGE = Path(hf_liere.__file__).parent
ALLOWED = {
    "tracing": {"torch"},
    "positions": {"torch", ".tracing"},
    "cpu_library": {"transformers"},
    "cpu_kernels": {"torch", ".cpu_library", ".triton_kernels"},
    "triton_kernels": {"torch", "triton"},
    "exponential_gradient": {"torch", ".cpu_kernels"},
    "lie_algebra": {"torch", "transformers", ".tracing", ".cpu_kernels", ".exponential_gradient"},
    "rotation": {"torch", "transformers", ".tracing", ".cpu_kernels", ".triton_kernels"},
    "encodings": {"torch", "transformers", ".exponential_gradient", ".lie_algebra", ".positions", ".rotation"},
    "attention": {"torch", "transformers", ".tracing", ".encodings", ".rotation"},
    "configuration_liere": {"transformers", "huggingface_hub"},
    "modeling_liere": {
        "torch",
        "transformers",
        ".attention",
        ".configuration_liere",
        ".encodings",
        ".lie_algebra",
        ".positions",
        ".rotation",
        ".tracing",
    },
    "video_processing_liere": {"transformers"},
    "vision_towers": {"torch"},
    "patched_forward": {"torch", "transformers", ".lie_algebra", ".positions", ".rotation", ".vision_towers"},
    "rotary_patch": {
        "torch",
        "huggingface_hub",
        ".attention",
        ".configuration_liere",
        ".encodings",
        ".patched_forward",
        ".vision_towers",
    },
    "modeling_patched": {"transformers", "huggingface_hub", ".rotary_patch"},
    "modeling_liere_video": {"torch", "transformers", ".configuration_liere", ".modeling_liere"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "") if node.level else node.module.partition(".")[0]


@pytest.mark.parametrize("module", ALLOWED)
def test_files_that_travel_import_only_what_they_may(module):
    found = {name for name in imports(PACKAGE / f"{module}.py") if name not in sys.stdlib_module_names}
    assert found <= ALLOWED[module]


def test_only_auto_touches_the_auto_classes():
    for path in PACKAGE.glob("*.py"):
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
            for alias in node.names
        }
        assert path.stem == "auto" or not any(name.startswith("Auto") for name in names), path.name


def test_package_never_imports_training():
    for path in PACKAGE.glob("*.py"):
        assert "training" not in set(imports(path)), path.name


def test_import_needs_no_training_library():
    """Beyond what transformers imports by itself."""
    code = (
        "import sys, transformers.modeling_utils, transformers.models.auto.image_processing_auto"
        "; before = set(sys.modules); import hf_liere"
        "; new = {name.partition('.')[0] for name in set(sys.modules) - before}"
        "; print(sorted(new & {'accelerate', 'datasets', 'evaluate', 'matplotlib', 'timm', 'av', 'peft'}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
