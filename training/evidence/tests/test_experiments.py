"""Sweeps, recipes of research tasks, and the papers' recipes, whose values have a source."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from checkout import ROOT
from pages import TRAINING
from recipe_cases import RECIPES, RESEARCH_RECIPES, parse, run_small, script_of
from slow_cases import slow_except
from structures import write_centres, write_chains

from hf_liere import RotaryPatchConfig
from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.tools import cli
from training.common.arguments import architecture_fields
from training.common.command_line import parse_arguments, to_flags
from training.engine.model_setup import SIZE_FIELDS, resolve_config
from training.evidence import benchmark_speed
from training.evidence.reporting import sweeps


README = TRAINING.read_text(encoding="utf-8")
SWEEPS = sorted((ROOT / "training" / "evidence" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("name", RESEARCH_RECIPES)
def test_recipes_of_research_tasks_make_the_model_that_they_name(name):
    model_args, *_ = parse(name)
    config, text = model_args.config_class(**model_args.architecture()), RESEARCH_RECIPES[name].read_text()
    assert "per_device_train_batch_size" not in text
    for key, value in yaml.safe_load(text).items():
        if key in architecture_fields(model_args.config_class):
            assert getattr(config, key) == value


@pytest.mark.parametrize("name", slow_except(("poses_mini",), RESEARCH_RECIPES))
def test_recipes_of_research_tasks_run_to_their_results(name, tmp_path):
    write_chains(tmp_path / "chains")
    write_centres(tmp_path / "centres.npz")
    data = {"DSSP": str(tmp_path / "chains"), "CENTRES.npz": str(tmp_path / "centres.npz")}
    results = json.loads((run_small(name, tmp_path, data) / "all_results.json").read_text())
    assert results["eval_samples"] == 6 and results["parameters"] > 1000 and math.isfinite(results["eval_loss"])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_have_a_row_and_leave_the_batch_to_their_recipe(path):
    assert f"`{path.stem}`" in README and "per_device_train_batch_size" not in path.read_text()


@pytest.mark.parametrize("mini", [False, True], ids=["full", "mini"])
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps_name_models_that_exist(path, mini, tmp_path, registers_nothing):
    """Every combination of settings makes a model, and every condition is one that the script accepts for it."""
    sweep = sweeps.read_sweep(path, mini)
    # Seeds differ in nothing that is read here.
    found = {str({**settings, "seed": 0}): settings for settings in sweeps.combinations(sweep["train"])}
    for settings in found.values():
        run = sweeps.Run(sweep, settings, ["--output_dir", "unused", "--use_cpu", "true"], Path("unused"))
        classes = run.module.ARGUMENT_CLASSES
        if sweep["script"] in ("clip_finetuning", "language_modeling"):
            patch_args = vars(parse_arguments(run.flags, classes)[1])
            if patch_args["position_encoding"] != "none":
                given = {key: None if value == "None" else value for key, value in patch_args.items()}
                assert RotaryPatchConfig(**given).position_encoding == settings["position_encoding"]
            continue
        model_args = parse_arguments(run.flags, classes)[0]
        config = model_args.config_class(**model_args.architecture())
        encoding = settings.get("position_encoding", config.position_encoding)
        assert config.position_encoding == ("shares" if isinstance(encoding, list) else encoding)
        seen = set()
        for condition in run.conditions:
            # Each value once, not each combination with others.
            values = {str(item) for item in condition.items()}
            if values and values <= seen:
                continue
            seen |= values
            changed = parse_arguments([*run.flags, *to_flags(condition, classes)], classes)[0]
            if set(condition) & set(vars(config)) - set(SIZE_FIELDS):
                config.save_pretrained(tmp_path)
                changed.model_name_or_path = str(tmp_path)
                assert resolve_config(changed).coordinates == condition["coordinates"]


def test_every_sweep_has_results_of_its_small_version_or_a_reason():
    readme = (ROOT / "training" / "README.md").read_text(encoding="utf-8")
    table = readme.split("their small versions have no\nstored results:\n\n")[1].split("\n\n")[0]
    reasons = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    stored = {path.stem for path in (ROOT / "training" / "evidence" / "results").rglob("*.jsonl")}
    assert not reasons & stored
    assert reasons | stored == {path.stem for path in SWEEPS}


EXPERIMENTS = yaml.safe_load((ROOT / "training" / "evidence" / "paper_experiments.yaml").read_text(encoding="utf-8"))
# The sweeps and recipes of the papers; others are of this repository alone.
PAPER_SWEEPS = {
    name for entries in EXPERIMENTS.values() for entry in entries.values() for name in entry.get("sweeps", [])
}
PAPER_RECIPES = sorted({sweeps.read_sweep(path, False)["recipe"] for path in SWEEPS if path.stem in PAPER_SWEEPS})
SOURCES = yaml.safe_load((ROOT / "training" / "evidence" / "recipe_sources.yaml").read_text(encoding="utf-8"))
# What every training of a classifier has, so that no default decides it unseen.
DECIDED = {"image_mean", "image_std", "learning_rate", "lr_scheduler_type", "num_train_epochs", "max_grad_norm", "seed"}
DECIDED |= {"total_train_batch_size", "warmup_steps", "weight_decay"}


def values_with_sources(path):
    """(key, value, comment) of every value of a recipe, whose comment is on its line or on those right above."""
    above, found = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            above.append(line.removeprefix("#").strip())
            continue
        if line.strip():
            value, _, comment = line.partition("  # ")
            ((key, value),) = yaml.safe_load(value).items()
            found.append((key, value, comment or " ".join(above)))
        above = []
    return found


@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_every_value_of_a_recipe_is_what_its_source_states(name):
    found = values_with_sources(RECIPES[name])
    assert {key: value for key, value, _ in found} == yaml.safe_load(RECIPES[name].read_text())
    # A pretrained CLIP brings its statistics along.
    undecided = {"image_mean", "image_std"} if name == "clip_finetuning" else set()
    assert DECIDED - undecided <= {key for key, _, _ in found}
    for key, value, comment in found:
        source, _, remark = comment.partition(": ")
        if source == "open":
            assert len(remark.split()) > 1, f"{name}: {key} has no reason"
        elif source == "run":
            assert key in SOURCES["run"], f"{name}: {key} is not known to change nothing"
        else:
            assert source in SOURCES, f"{name}: {key} comes from {source!r}"
            assert SOURCES[source].get(key) == value, f"{name}: {key} is {SOURCES[source].get(key)} in {source}"


def test_every_source_is_one_of_a_recipe():
    named = {
        comment.partition(": ")[0] for name in PAPER_RECIPES for _, _, comment in values_with_sources(RECIPES[name])
    }
    assert set(SOURCES) <= named


# How many tables and figures the papers have.
NUMBERS = {"LieRE": (10, 12), "LieRE v1": (4, 3), "ComRoPE": (10, 8)}


def test_every_table_and_figure_of_the_papers_is_an_experiment_or_says_why_not():
    assert set(EXPERIMENTS) == set(NUMBERS)
    for paper, (tables, figures) in NUMBERS.items():
        numbered = [f"Table {number}" for number in range(1, tables + 1)]
        numbered += [f"Figure {number}" for number in range(1, figures + 1)]
        assert [name for name in EXPERIMENTS[paper] if name.startswith(("Table", "Figure"))] == numbered
        for name, entry in EXPERIMENTS[paper].items():
            assert entry and set(entry) <= {"sweeps", "command", "none"}, (paper, name)
            assert set(entry.get("sweeps", [])) <= {path.stem for path in SWEEPS}, (paper, name)
            if "command" in entry:
                check_command(shlex.split(entry["command"]))


def check_command(words):
    program, *arguments = words
    if program == "hf-liere":
        cli.PARSER.parse_args(arguments)
    else:
        assert program == "python" and (ROOT / arguments[0]).is_file()
        if arguments[0].endswith("benchmark_speed.py"):
            benchmark_speed.parse_arguments(arguments[1:])


def test_the_table_of_sweeps_names_the_tables_and_figures_of_each():
    table = README.split("These sweeps were not run")[0]
    for names, where in re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE):
        of_row = set(re.findall(r"`(\w+)`", names))
        if not of_row <= {path.stem for path in SWEEPS}:
            continue
        told = set()
        for part in where.split("; "):
            paper = next((paper for paper in ("LieRE v1", *NUMBERS) if part.startswith(f"{paper} ")), None)
            for kind, numbers in re.findall(r"(Table|Figure)s? ((?:\d+(?:, )?)+)", part):
                told |= {(paper, f"{kind} {number}") for number in re.findall(r"\d+", numbers)}
        listed = {
            (paper, name)
            for paper, entries in EXPERIMENTS.items()
            for name, entry in entries.items()
            if of_row & set(entry.get("sweeps", [])) and name.startswith(("Table", "Figure"))
        }
        assert told == listed, of_row


def test_baselines_of_comrope_are_those_of_its_appendix_d():
    """The table is read at coordinates (§4.1.1), LieRE starts from P − Pᵀ (D.2), RoPE has base 10,000 (D.1)."""
    expected = {
        "absolute": ("position_table_size", lambda value: value is not None),
        "liere": ("rotary_init", "normal".__eq__),
        "axial_rope": ("rope_theta", (10000).__eq__),
    }
    seen = set()
    for name in ("resolutions", "video_resolutions", "perturbation", "comrope_block_size", "offset", "clip_finetuning"):
        sweep = sweeps.read_sweep(ROOT / "training" / "evidence" / "sweeps" / f"{name}.yaml", False)
        for settings in sweeps.combinations(sweep["train"]):
            encoding = settings["position_encoding"]
            # Rotations inside of a pretrained model start at zero, and it has its own table.
            if encoding in expected and (name, encoding) != ("clip_finetuning", "liere"):
                field, holds = expected[encoding]
                assert holds(settings.get(field)), (name, settings)
                assert encoding == "absolute" or name == "clip_finetuning" or settings["coordinates"] == "unit"
                seen.add((name, encoding))
    assert len(seen) == 10


@pytest.mark.parametrize("mini", [False, True], ids=["full", "mini"])
@pytest.mark.parametrize("path", [path for path in SWEEPS if path.stem in PAPER_SWEEPS], ids=lambda path: path.stem)
def test_fixed_rotations_are_those_of_the_papers_code(path, mini):
    """exp(−4t), t from 0 to 1, in the coordinates of LieRE's VisionLLaMA; base 10,000 in ComRoPE's."""
    sweep = sweeps.read_sweep(path, mini)
    for settings in sweeps.combinations(sweep["train"]):
        if settings.get("position_encoding") != "axial_rope" or sweep["script"] == "clip_finetuning":
            continue
        flags = sweeps.Run(sweep, settings, ["--output_dir", "unused", "--use_cpu", "true"], Path("unused")).flags
        model_args = parse_arguments(flags, script_of(sweep["recipe"]).ARGUMENT_CLASSES)[0]
        config = model_args.config_class(**model_args.architecture())
        if config.coordinates == "train_grid":
            encoding = build_rotary_encoding(config, config.num_axes)
            count = config.head_dim // (2 * config.num_axes)
            found = encoding.entries(torch.device("cpu"))[0].flatten()[:count]
            expected = torch.exp(-4 * torch.linspace(0, 1, count, dtype=torch.float64))
            # The base is written with seven digits.
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
        elif not mini:
            assert (config.coordinates, config.rope_theta) == ("unit", 10000)
