"""
The documentation: every page and every example of a public object runs as it is written, in an empty folder and one
namespace, with small models under the names of large ones; the site builds.
"""

import contextlib
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from checkout import ROOT
from clip_files import write_clip
from conversion_cases import liere_weights
from fresh_process import run_warm
from hub_client import WRITE
from page_models import MODELS
from pages import PAGES, SITE, blocks, commands, find_blocks, name, write_files
from training_helpers import write_images_folder, write_parquet

import hf_liere
from hf_liere.encoding.kinds import ENCODINGS, STARTS
from hf_liere.encoding.positions import CONVENTIONS
from hf_liere.tools.cli import PARSER, main
from training.common.command_line import parse_arguments
from training.demo import save_puzzles


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for place, build in MODELS.items():
        torch.manual_seed(0)
        for part in build():
            part.save_pretrained(folder / place)
    # A trained model has records, from which its card is made.
    (folder / "outputs/arrows/liere8/README.md").write_text("---\nlicense: mit\n---\n\n# A model\n")
    save_puzzles(folder / "outputs/arrows/puzzles")
    torch.save({"state_dict": liere_weights()}, folder / "last.ckpt")
    return folder


@pytest.fixture
def reader(models, tmp_path, monkeypatch) -> Iterator[Path]:
    """A checkout as the pages expect it around their reader, with the models and data that they name."""
    folder = tmp_path / "checkout"
    shutil.copytree(models, folder)
    for part in ("training", "model_cards"):
        (folder / part).symlink_to(ROOT / part)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    # What files of the reader register is not there for other tests.
    known, registers = set(sys.modules), (ENCODINGS, STARTS, CONVENTIONS)
    before = [dict(register) for register in registers]
    yield folder
    for register, parts in zip(registers, before):
        for added in register.keys() - parts.keys():
            del register[added]
    for added in sys.modules.keys() - known:
        if (file := getattr(sys.modules[added], "__file__", None)) and Path(file).is_relative_to(folder):
            del sys.modules[added]


@pytest.fixture
def hub(hub):
    """A Hub on which the reader is `me`."""
    hub.tokens[WRITE] = ("me", "write")
    return hub


# Pages whose blocks are scripts, each of which reads what those before it saved.
OWN_PROCESSES = ("fine_tuning.md",)
# Pages whose commands train models.
TRAINED = ("training.md", "pretrained.md", "image_folder.md", "videos_and_volumes.md")
# Pages that push to the Hub.
PUSHED = ("publish.md", "image_folder.md")
# Libraries without an extra: blocks that import them run where they are installed.
OPTIONAL = re.compile(r"^(?:from|import) (deepspeed|lerobot|monai|torchtune)\b", re.MULTILINE)
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
# Publishing starts processes that load what was published; a report of inspection has many plots; the page of exports
# compiles what the tests of exports compile.
MARKS = {
    "deploy.md": pytest.mark.slow,
    "fine_tuning.md": pytest.mark.slow,
    "publish.md": pytest.mark.slow,
    "inspect.md": pytest.mark.slow,
    "diffusion.md": pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers needs Python 3.11"),
}
RUNNING = [pytest.param(page, id=name(page), marks=MARKS.get(page.name, ())) for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", RUNNING)
def test_every_block_runs(page, reader, request):
    """
    Python blocks and hf-liere commands in the order of the page, with the outputs that it states; commands without
    output succeed. Those that name what a training run leaves are not run.
    """
    if page.name in PUSHED:
        request.getfixturevalue("hub")
    namespace, files = {"__name__": page.stem}, write_files(page, reader)
    for block in blocks(page):
        if block.text in files or any(find_spec(library) is None for library in OPTIONAL.findall(block.text)):
            continue
        if page.name in OWN_PROCESSES and block.language == "python":
            done = subprocess.run([sys.executable, "-c", block.text], capture_output=True, text=True, env=OFFLINE)
            assert done.returncode == 0, f"{page.name}, line {block.line}: {done.stderr[-2000:]}"
            assert block.output is None or done.stdout.strip() == block.output.strip(), f"{page.name}, {block.line}"
            continue
        printed = io.StringIO()
        # A refusal is what a command writes to stderr, and Python's is full of progress bars.
        errors = printed if block.language == "bash" and block.output else sys.stderr
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            if block.language == "python":
                # Line numbers of the page, also in tracebacks.
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            else:
                for program, *arguments in block.commands():
                    given = arguments[2:] if arguments[0] == "--register" else arguments
                    if program == "hf-liere" and all(map(is_there, given[1:2])) and "--help" not in arguments:
                        assert main(arguments) == (1 if block.output else 0), arguments
        assert_comments(block, printed.getvalue(), namespace, page.name)
        if block.output is not None:
            assert printed.getvalue().strip() == block.output.strip(), f"{page.name}, line {block.line}"


def assert_comments(block, printed: str, namespace: dict, place: str) -> None:
    """What the comments of a block state is what it printed, and the shapes of what it assigned."""
    for line in block.printed():
        pattern = re.escape(line).replace("…", ".*")
        assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{place}: {line}"
    for target, shape in block.shapes():
        found = tuple(namespace[target].shape)
        fits = len(found) == len(shape) and all(axis in (None, size) for axis, size in zip(shape, found))
        assert fits, f"{place}, line {block.line}: {target} is {found}"


@pytest.mark.parametrize(
    "line",
    [
        "print((1, 2))\n# (1, 3)",
        "print(1 == 1)  # False",
        "print(100.0)  # 100.5",
        "x = torch.zeros(2, 3)  # (2, 4)",
        "x = torch.zeros(2, 3)  # (batch, tokens, axes)",
        "x, y = torch.zeros(2, 5, 3)  # (4, axes), in radians",
    ],
)
def test_wrong_comments_are_found(line):
    (block,) = find_blocks(f"```python\nimport torch\n{line}\n```\n")
    namespace, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block.text, namespace)
    with pytest.raises(AssertionError):
        assert_comments(block, printed.getvalue(), namespace, "page")


EXAMPLE_MARKS = {"set_frequency_schedule": MARKS["diffusion.md"]}
EXAMPLES = [pytest.param(name, marks=EXAMPLE_MARKS.get(name, ())) for name in hf_liere.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_object_has_an_example_that_runs(name, reader):
    """In its docstring, which the site shows; later blocks use what earlier ones define, as on a page."""
    examples = find_blocks(inspect.getdoc(getattr(hf_liere, name)))
    assert examples
    namespace = {}
    for example in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.text, name, "exec"), namespace)
        assert_comments(example, printed.getvalue(), namespace, name)
        assert example.output is None or printed.getvalue() == example.output


def is_there(argument: str) -> bool:
    return not argument.startswith("outputs/") or Path(argument).exists()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_is_accepted(page, reader, monkeypatch):
    """By the parser of its program; what it names of this repository exists."""
    write_files(page, reader)
    for program, *arguments in commands(page):
        if program == "hf-liere":
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                accepted = "--help" in arguments
                accepted = bool(PARSER.parse_args(arguments))
            assert accepted, arguments
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), arguments
        elif program == "pip":
            extras = importlib.metadata.metadata("hf-liere").get_all("Provides-Extra")
            assert set(re.findall(r"(?<=[\[,])\w+(?=[\],])", " ".join(arguments))) <= set(extras), arguments
        else:
            assert program in ("python", "torchrun", "accelerate"), program
            check_script(arguments, monkeypatch)


def check_script(words: list[str], monkeypatch) -> None:
    """The flags of a training script, and of what launches it the files."""
    place = next(index for index, word in enumerate(words) if re.fullmatch(r"training/(evidence/)?\w+\.py", word))
    assert all(Path(word).is_file() for word in words[:place] if word.endswith(".yaml")), words
    if "diffusion" in words[place] and find_spec("diffusers") is None:
        # It needs Python 3.11.
        return
    script, arguments = module_of(words[place]), words[place + 1 :]
    if hasattr(script, "ARGUMENT_CLASSES"):
        # The recipes' bfloat16 is for GPUs.
        parse_arguments([*arguments, "--use_cpu", "true", "--bf16", "false"], script.ARGUMENT_CLASSES)
    elif words[place].endswith("evaluate_sweep.py"):
        with contextlib.redirect_stdout(io.StringIO()):
            script.main([*arguments, "--dry_run"])
    else:
        monkeypatch.setattr(sys, "argv", [words[place], "--help"])
        described = io.StringIO()
        with pytest.raises(SystemExit), contextlib.redirect_stdout(described):
            script.main()
        flags = {word for word in arguments if word.startswith("--")}
        assert flags <= set(re.findall(r"--\w+", described.getvalue())), words


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in SITE if page.name in TRAINED], ids=name)
def test_training_commands_run(page, reader, request):
    """
    One step of every command with data of its own, in the order of the page; then hf-liere with the models that were
    trained.
    """
    if page.name in PUSHED:
        request.getfixturevalue("hub")
    write_parquet(reader / "TRAIN.parquet", 64)
    write_parquet(reader / "TEST.parquet", 12, seed=1)
    write_images_folder(reader / "IMAGES", {"train": 8, "validation": 4}, ("oak", "pine"))
    write_files(page, reader)
    for split, kind in itertools.product(("train", "validation"), "ab"):
        (folder := reader / "VOLUMES" / split / kind).mkdir(parents=True)
        for index in range(4):
            volume = np.random.default_rng(index).integers(0, 256, (8, 32, 32), np.uint8)
            np.savez(folder / f"{index}.npz", volume=volume, spacing=[4.0, 1.0, 1.0])
    write_clips(reader / "CLIPS")
    for program, script, *arguments in commands(page):
        if program == "hf-liere" and Path(arguments[0]).exists():
            assert main([script, *arguments]) == 0
        # The predictions of scaling.py have a test of their own.
        if program != "python" or "--dataset_name" in arguments or script.endswith("scaling.py"):
            continue
        steps = [] if "--do_eval" in arguments or script.endswith("report.py") else ["--max_steps", "1"]
        on_cpu = [] if script.endswith("report.py") else ["--use_cpu", "true"]
        module_of(script).main([*arguments, *steps, *on_cpu])


def module_of(script: str):
    return importlib.import_module(Path(script).with_suffix("").as_posix().replace("/", "."))


def write_clips(folder: Path) -> None:
    """Two mp4 files of each of two classes, in train/ and validation/."""
    for split, kind, index in itertools.product(("train", "validation"), "ab", range(2)):
        (folder / split / kind).mkdir(parents=True, exist_ok=True)
        frames = np.random.default_rng(index).integers(0, 256, (20, 48, 64, 3), np.uint8)
        write_clip(folder / split / kind / f"{index}.mp4", frames)


def test_the_site_builds_without_warnings(tmp_path):
    """So every link and anchor leads somewhere. What the pages load is in the site, and its search finds names."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    run_warm("-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", ROOT / "docs", tmp_path)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"""<(?:script|link|img)\b[^>]*?\b(?:src|href)=["']([^"']+)""", page.read_text(encoding="utf-8")
        )
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page
    script = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
    for word, pages in (("head_dim", {"rotary_family", "layer"}), ("liere_product", {"layer", "rotary_family"})):
        assert pages <= {index["docnames"][number] for number in index["terms"][word]}
