"""The help of the training scripts, read from sources: it says what the parser accepts, and imports nothing heavy."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest
from checkout import ROOT
from fresh_process import run_python

from training.common.arguments import architecture_fields
from training.common.command_line import parse_arguments
from training.common.early import refuse_mistakes
from training.common.folders import CLAIM
from training.common.help import FURTHER, UNKNOWN, classes_of, read_flags, render


SCRIPTS = sorted(
    path.stem for path in (ROOT / "training").glob("*.py") if "ARGUMENT_CLASSES" in path.read_text(encoding="utf-8")
)
# What a script prints for a command line, on a terminal of 80 columns, and what it imported.
CODE = """
import contextlib, io, json, os, runpy, sys

os.environ["COLUMNS"] = "80"
found = {}
words = json.loads(sys.argv[1])
for script in sys.argv[2:]:
    output, status = io.StringIO(), None
    sys.argv = [script, *words]
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code
    heavy = sorted({"torch", "transformers", "numpy", "hf_liere"} & set(sys.modules))
    found[script] = [status, heavy, output.getvalue()]
print(json.dumps(found))
"""


def printed(*words, scripts=SCRIPTS):
    files = [ROOT / "training" / f"{script}.py" for script in scripts]
    found = json.loads(run_python("-c", CODE, json.dumps(words), *files).stdout)
    return {Path(file).stem: outcome for file, outcome in found.items()}


@pytest.mark.parametrize(
    "words, message",
    [
        (["recipes/arows_mini.yaml"], "There is no recipe 'recipes/arows_mini.yaml'; the closest is 'arrows_mini'"),
        (["{recipe}", "--learning-rat", "1"], "There is no flag '--learning-rat'; the closest is 'learning_rate'"),
        (["--image_folder", "nowhere"], "--image_folder 'nowhere' is not a folder."),
        (["{recipe}", "--validation_files", "{recipe}", "no.csv", "--seed", "1"], "There is no file 'no.csv'."),
        (["--output_dir={run}"], "contains another run (checkpoint-3); accepted: another folder"),
        (["{recipe}", "--output_dir", "{mine}"], "contains other files (notes.txt); accepted: a new or empty folder"),
    ],
)
def test_mistakes_show_before_anything_heavy_is_imported(words, message, tmp_path):
    """In the words of the checks that follow the imports, which the other tests of mistakes call."""
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    recipe = ROOT / "training" / "recipes" / "cifar100_mini.yaml"
    places = {"recipe": recipe, "run": tmp_path / "run", "mine": tmp_path / "mine"}
    found = printed(*(word.format(**places) for word in words), scripts=["image_classification"])
    status, heavy, _ = found["image_classification"]
    assert status.startswith("error: ") and message in status and heavy == []


@pytest.mark.parametrize("flag", ["--overwrite_output_dir", "--resume_from_checkpoint=last"])
def test_what_may_be_right_is_left_to_the_run(flag, tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    known = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dataloader_pin_memory"}
    refuse_mistakes([flag, "--output_dir", str(tmp_path), "--no_dataloader_pin_memory"], known)
    (tmp_path / CLAIM).touch()
    refuse_mistakes(["--output_dir", str(tmp_path)], known)


def fields_of(script):
    """Defaults and texts of the flags by name, as the classes have them when they are imported."""
    defaults, texts = {}, {}
    for kind in importlib.import_module(f"training.{script}").ARGUMENT_CLASSES:
        fields = {field.name: field for field in dataclasses.fields(kind)}
        texts |= {name: field.metadata.get("help", "") for name, field in fields.items()}
        for name, field in architecture_fields(kind.config_class).items() if hasattr(kind, "config_class") else ():
            # A flag that is not given leaves the default to the configuration.
            fields[name] = field if fields[name].default is None and not texts[name] else fields[name]
        defaults |= fields
    return {name: default_of(field) for name, field in defaults.items()}, texts


def default_of(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@pytest.mark.parametrize("option, longest", [("--help", 450), ("--help_all", 900)])
def test_help_is_short_and_imports_nothing_heavy(option, longest):
    found = printed(option)
    assert len(found) == 6
    for script, (status, heavy, text) in found.items():
        lines = text.splitlines()
        assert status == 0 and heavy == [] and lines[0].startswith(f"usage: python training/{script}.py [RECIPE]")
        assert len(lines) <= longest and max(map(len, lines)) <= 80, (script, len(lines), max(lines, key=len))
        assert bool(re.fullmatch(r"--help_all prints \d+ further flags\.", lines[-1])) == (option == "--help")
        flags = set(re.findall(r"^  --(\w+) ", text, re.MULTILINE)) | set(
            re.findall(r", --(\w+) [A-Z]+$", text, re.MULTILINE)
        )
        expected = {flag.name for flag in read_flags(classes_of(ROOT / "training" / f"{script}.py"))}
        assert flags <= expected and (flags == expected) == (option == "--help_all"), script


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_the_flags_defaults_and_texts_of_the_parser(script):
    flags = {flag.name: flag for flag in read_flags(classes_of(ROOT / "training" / f"{script}.py"))}
    defaults, texts = fields_of(script)
    assert flags.keys() == defaults.keys()
    for name, flag in flags.items():
        if flag.default is not UNKNOWN:
            assert flag.default == defaults[name], name
        text = " ".join(texts[name].replace("`", "").replace("%%", "%").split())
        assert text.replace('"', "") in flag.text.replace('"', ""), name
        # Only fields of transformers may lack a description, and types that the source does not define.
        assert (flag.text and flag.values) or flag.heading == FURTHER, name
    # What the source does not spell: defaults that another library computes.
    assert {name for name, flag in flags.items() if flag.default is UNKNOWN} <= {
        "optim",
        "include_for_metrics",
        "label_column",
    }


def test_choices_are_those_of_the_configuration():
    flags = {flag.name: flag for flag in read_flags(classes_of(ROOT / "training" / "image_classification.py"))}
    assert flags["pooling"].values == "cls|mean|mean_all" and flags["bf16"].values == "true|false"
    assert flags["image_size"].values == "INT ..." and flags["physical_unit"].values == "NUMBER ..."
    assert flags["output_dir"].values == "TEXT" and flags["block_size"].values == "INT"
    assert flags["lr_scheduler_type"].values.startswith("linear|cosine|")
    assert "rope_mixed (learned 2-D rotations" in flags["position_encoding"].text


def test_help_prints_percent_signs_defaults_and_patterns():
    images, words = (
        " ".join(
            render("script.py", read_flags(classes_of(ROOT / "training" / f"{script}.py")), everything=True).split()
        )
        for script in ("image_classification", "language_modeling")
    )
    assert "a rectangle of 2 … 33% of the normalised image" in images and "~20% slower training" in images
    assert "%%" not in images + words and "%(default)s" not in images + words
    assert "Probability of a horizontal flip. (default: 0.0)" in images
    assert "such as **/*.py." in words and "is not neutral: it changes" in words


def test_main_prints_the_same_help(capsys):
    """Where a script is imported and not run."""
    script = importlib.import_module("training.image_classification")
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(["--help"], script.ARGUMENT_CLASSES)
    assert stopped.value.code == 0 and "  --position_encoding TEXT\n" in capsys.readouterr().out
