"""What a user meets first: the wheel with its core dependencies alone, every command, and the help of every script."""

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from conversion_cases import liere_weights
from fresh_process import run_python, run_warm
from packaging.requirements import Requirement
from published_models import CARD

import hf_liere
from hf_liere.kernels import cpu_library


OPTIONAL = ("PIL", "accelerate", "datasets", "evaluate", "gradio", "matplotlib", "onnx", "onnxscript", "peft")
OPTIONAL += ("scipy", "timm", "torchvision")
SCRIPTS = sorted(
    path.name
    for path in (ROOT / "training").glob("*.py")
    if any(isinstance(part, ast.If) and "__main__" in ast.dump(part.test) for part in ast.parse(path.read_text()).body)
)


def requirements(found: Distribution) -> list[str]:
    """Names of what a distribution needs here without any of its extras."""
    needed = (Requirement(text) for text in found.requires or [])
    return [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def place(found: Distribution, site: Path) -> None:
    """Links what a distribution installed into another folder of packages."""
    origin = Path(found.locate_file(""))
    for file in found.files or []:
        if file.parts[0] in ("..", "__pycache__"):
            continue
        # Folders that distributions share, such as nvidia's, are made again; the rest is linked whole.
        depth = 1 if (origin / file.parts[0] / "__init__.py").is_file() or file.parts[0].endswith("-info") else None
        part = Path(*file.parts[:depth])
        (site / part).parent.mkdir(parents=True, exist_ok=True)
        if not (site / part).exists():
            (site / part).symlink_to(origin / part)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """What a source distribution unpacks to."""
    folder = tmp_path_factory.mktemp("sources")
    # Setuptools writes beside the sources, and takes what it finds there.
    checkout, ignored = folder / "checkout", shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("hf_liere", "model_cards"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    build = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    run_python("-c", build, folder, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def build_wheel(sources: Path, folder: Path, compiler: str) -> Path:
    """With this C and C++ compiler; pip removes what it builds beside the sources, but for the wheel."""
    shutil.copytree(sources, folder / "copy")
    run_python(*PIP, "wheel", folder / "copy", *OFFLINE, "-w", folder, variables={"CC": compiler, "CXX": compiler})
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The folder of scripts of an environment with this wheel, its core dependencies and theirs, and nothing else."""
    run_python("-m", "venv", "--without-pip", folder / "env")
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        archive.extractall(folder / "unpacked")
    waiting, seen = requirements(PathDistribution(folder / "unpacked" / info)), set()
    while waiting:
        found = distribution(waiting.pop())
        if found.name not in seen:
            seen.add(found.name)
            place(found, site)
            waiting += requirements(found)
    python = folder / "env" / "bin" / "python"
    # Else pip finds the checkout and takes it for installed.
    run_python(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, variables={"PYTHONPATH": ""})
    return python.parent


@pytest.fixture(scope="module")
def installed(sources, tmp_path_factory) -> Path:
    """The folder of scripts of an environment with a wheel that was built without a compiler."""
    folder = tmp_path_factory.mktemp("installed")
    return install(build_wheel(sources, folder, "/nonexistent"), folder)


def run(command: list, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """A command outside of the checkout, with nothing of this environment but the machine's settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), **variables}
    return subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_console_script_helps_without_any_extra(installed, tmp_path):
    absent = f"import importlib.util; print([name for name in {OPTIONAL} if importlib.util.find_spec(name)])"
    assert run([installed / "python", "-c", absent], tmp_path).stdout == "[]\n"
    for arguments, status, message in (
        (["--version"], 0, hf_liere.__version__),
        (["inspect", "--help"], 0, "--output"),
        (["inspct"], 2, "invalid choice: 'inspct'"),
    ):
        process = run([installed / "hf-liere", *arguments], tmp_path)
        assert process.returncode == status and message in process.stdout + process.stderr, process.stderr


COMMANDS = """
import contextlib, io, json, sys
from hf_liere.tools.cli import main

results = []
for arguments in json.loads(sys.argv[1]):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(arguments)
    results.append([status, output.getvalue(), errors.getvalue()])
print(json.dumps(results))
"""


@pytest.mark.slow
def test_wheels_carry_the_libraries_that_the_compiler_can_build(sources, tmp_path):
    """Apple's compiler has no OpenMP."""
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        pytest.skip("there is no C++ compiler")
    without_openmp = tmp_path / "compiler"
    without_openmp.write_text(
        f'#!/bin/sh\ncase "$*" in *-fopenmp*) echo no -fopenmp >&2; exit 1;; esac\nexec {compiler} "$@"\n'
    )
    without_openmp.chmod(0o700)
    wheel = build_wheel(sources, tmp_path / "built", str(without_openmp))
    assert libraries(wheel) == {"_cpu_portable"}
    assert_kernels_of(wheel, "_cpu_portable")


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_wheels_carry_a_library_for_every_cpu(sources, tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    wheel = build_wheel(sources, tmp_path / "built", compiler)
    if platform.machine() not in ("x86_64", "AMD64"):
        assert libraries(wheel) == set(cpu_library.ON_ANY_CPU)
        return
    assert libraries(wheel) == set(cpu_library.NAMES["AVX512"])
    names = cpu_library.NAMES.get(torch.backends.cpu.get_cpu_capability(), cpu_library.ON_ANY_CPU)
    assert_kernels_of(wheel, names[0])


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere the compiler leaves out what the CPU does not run")
@pytest.mark.parametrize("chosen", ["fastest", "none"])
def test_a_checkout_has_one_library(sources, tmp_path, chosen):
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    checkout = tmp_path / "checkout"
    shutil.copytree(sources, checkout)
    command = ["setup.py", "--quiet", "build_ext", "--inplace"]
    printed = run_python(*command, cwd=checkout, variables={"HF_LIERE_BUILD_KERNELS": chosen}).stdout
    names = cpu_library.NAMES.get(torch.backends.cpu.get_cpu_capability(), cpu_library.ON_ANY_CPU)
    built = [path.name.partition(".")[0] for path in (checkout / "hf_liere" / "kernels").glob("_cpu_*")]
    assert built == ([names[0]] if chosen == "fastest" else [])
    assert ("Compiling the kernels for this CPU" in printed) == (chosen == "fastest")


def libraries(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name.partition(".")[0] for name in archive.namelist() if Path(name).suffix == ".so"}


def assert_kernels_of(wheel: Path, expected: str) -> None:
    """Where the wheel is installed, without a compiler, the package computes with this library, and right."""
    scripts = install(wheel, wheel.parent)
    process = run([scripts / "python", ROOT / ".ci" / "check_wheel.py"], wheel.parent, PATH=str(scripts))
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"{hf_liere.__version__}: {expected}."), process.stdout


def test_every_command_without_any_extra(installed, tiny, tmp_path):
    """It runs, or names in one line what it needs."""
    assert list(installed.parent.glob("lib/python*/site-packages/hf_liere/py.typed"))
    hf_liere.LieREViTForImageClassification(tiny(num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text(CARD)
    torch.save(liere_weights(), tmp_path / "official.pt")
    expected = {
        ("card", "arrows_liere8"): (0, "# "),
        ("convert", "official.pt", "converted"): (0, "LieREViTForImageClassification"),
        ("env",): (0, "no CPU kernels, because they were not built: "),
        ("export", "model", "model.pt2"): (0, "of the model's"),
        ("export", "model", "model.onnx"): (
            1,
            "needs onnx and onnxruntime and onnxscript; in a checkout of hf_liere, pip",
        ),
        ("inspect", "model", "--output", "page"): (1, "needs matplotlib and PIL; in a checkout of hf_liere, pip inst"),
        ("predict", "model", "picture.png"): (1, "needs PIL; in a checkout of hf_liere, pip install -e '.[inspect]'"),
        ("push", "model", "tester/model"): (1, "needs kingfisher_sdk; in a checkout of hf_liere, pip install -e '.[pu"),
        ("verify", "model", "tester/model"): (1, "HF_HUB_OFFLINE is set"),
        ("pull", "tester/model", "pulled"): (1, "HF_HUB_OFFLINE is set"),
    }
    process = run([installed / "python", "-c", COMMANDS, json.dumps(list(expected))], tmp_path)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    for (command, (status, message)), (found_status, output, errors) in zip(expected.items(), found, strict=True):
        assert found_status == status and message in (errors if status else output), (command, output, errors)
        if status:
            assert errors.splitlines()[-1].startswith(f"hf-liere {command[0]}: "), errors


@pytest.mark.slow
def test_scripts_name_the_extra_after_a_plain_installation(installed, tmp_path):
    for script, extra in {"image_classification": "train", "app": "app"}.items():
        process = run([installed / "python", ROOT / "training" / f"{script}.py", "--do_train"], tmp_path)
        message = rf"error: \w+ is not installed; pip install -e '\.\[{extra}\]' installs it\.\n"
        assert process.returncode == 1 and re.fullmatch(message, process.stderr), process.stderr
    # The help reads sources and needs no library of an extra.
    process = run([installed / "python", ROOT / "training" / "image_classification.py", "--help"], tmp_path)
    assert process.returncode == 0 and process.stdout.startswith("usage: "), process.stderr


HELP = """
import contextlib, io, json, runpy, sys, traceback

texts = {}
for script in sys.argv[1:]:
    output = io.StringIO()
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stopped:
            texts[script] = [stopped.code, output.getvalue()]
        except BaseException:
            texts[script] = [1, traceback.format_exc()]
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def help_texts():
    """What the training scripts print, one after another in one process: most of the time goes into their imports."""
    process = run_warm("-c", HELP, *(ROOT / "training" / name for name in SCRIPTS), cwd=ROOT)
    return {Path(name).name: found for name, found in json.loads(process.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_training_scripts_print_their_help(help_texts, script):
    if "diffusion" in script:
        pytest.importorskip("diffusers", reason="diffusers needs Python 3.11")
    status, text = help_texts[script]
    assert status == 0 and text.startswith("usage: "), text
