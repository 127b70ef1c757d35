"""Sweeps: reading their files, making their runs, and collecting results."""

import gc
import hashlib
import importlib
import importlib.util
import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate import PartialState
from safetensors.numpy import load_file

from hf_liere.errors import InputError
from hf_liere.registers import closest
from training.common.command_line import to_flags
from training.common.folders import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EXAMPLES_FILE,
    FLAGS_FILE,
    RESOLUTIONS_FILE,
    last_complete_checkpoint,
)
from training.common.recipes import read_yaml
from training.common.records import remove_private, write_record
from training.evidence.reporting.result_lines import encode_examples, encode_numbers
from training.evidence.reporting.result_table import Labels, identity


TRAINING = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *("image_classification", "video_classification", "token_classification", "object_detection"),
    *("clip_finetuning", "language_modeling", "evidence.e3nn_peer", "evidence.ipa_peer"),
)
SWEEP_KEYS = (
    *("script", "recipe", "train", "evaluate", "report", "compare"),
    *("chance", "solved_at", "paired", "groups", "after", "mini", "title"),
)
# Settings of the models that a comparison or a condition applies to.
ROWS = "rows"
# Of an entry of `train`: the words of its settings in tables and pictures.
LABEL = "label"
# The setting that names the folder of the models that a run starts from.
FROM = "model_name_or_path"
# Of the sweep, or a setting of some of its models.
SCRIPT = "script"
COMPARE_KEYS = ("against", "against_condition", ROWS, "beside", "under", "metric", "within")
# Of a run's folder. File systems take 255 bytes.
LONGEST_NAME = 200
# The Trainer's name.
METRICS_FILE = "eval_results.json"
# Of a run that evaluates at several sizes; older ones lack chance.
MEASURES = ("accuracy", "accuracy_low", "accuracy_high", "loss", "chance")
# Additional tables in the reports of some sweeps.
REPORT_TABLES = ("epochs", "peak", "losses", "precisions", "balanced")


def read_sweep(path: Path, mini: bool) -> dict[str, Any]:
    """
    The content of a sweep file. Its labels are under "labels", as [`Labels`], and no longer among the settings.

    Raises:
        InputError: naming the error in the file.
    """
    if not path.is_file():
        names = sorted(file.stem for file in (TRAINING / "evidence" / "sweeps").glob("*.yaml"))
        raise InputError(
            f"There is no sweep {str(path)!r}{closest(path.stem, names)}; accepted: a yaml file, such as "
            f"{', '.join(names)} in training/evidence/sweeps."
        )
    sweep = read_yaml(path)
    if mini:
        if "mini" not in sweep:
            raise InputError(f"{path.name} has no small version; accepted: without --mini.")
        sweep = {**sweep, **sweep["mini"]}
    sweep.pop("mini", None)
    wrong = set(sweep) - set(SWEEP_KEYS)
    if wrong or not {"script", "recipe", "train"} <= set(sweep):
        raise InputError(f"{path.name} contains {', '.join(sweep)}; accepted: {', '.join(SWEEP_KEYS)}.")
    scripts = [entry[SCRIPT] for axis in sweep["train"] for entry in axis if SCRIPT in entry]
    for script in (sweep[SCRIPT], *scripts):
        if script not in SCRIPTS:
            raise InputError(f"{path.name}: script {script!r}; accepted: {', '.join(SCRIPTS)}.")
    unknown = set(sweep.get("report", [])) - set(REPORT_TABLES)
    if unknown:
        raise InputError(f"{path.name}: report {', '.join(unknown)}; accepted: {', '.join(REPORT_TABLES)}.")
    if not isinstance(sweep.get("paired", False), bool):
        raise InputError(f"{path.name}: paired {sweep['paired']!r}; accepted: true, false.")
    sweep["labels"], sweep["train"] = _take_labels(sweep["train"])
    _check_rows(path.name, sweep)
    return sweep


def _take_labels(train: list[list[dict[str, Any]]]) -> tuple[Labels, list[list[dict[str, Any]]]]:
    """The labels of models, and the axes of `train` without them."""
    bare = [[{name: value for name, value in entry.items() if name != LABEL} for entry in axis] for axis in train]
    labels: Labels = {}
    for given, settings in zip(itertools.product(*train), itertools.product(*bare)):
        row = {name: value for entry in settings for name, value in entry.items()}
        if words := [entry[LABEL] for entry in given if LABEL in entry]:
            told = {name for entry in given if LABEL in entry for name in entry}
            labels[identity(row)] = {name: value for name, value in row.items() if name not in told}, words
    return labels, bare


def _check_rows(name: str, sweep: dict[str, Any]) -> None:
    for entry in sweep.get("compare", []):
        if not isinstance(entry, dict) or set(entry) - set(COMPARE_KEYS) or not {*entry} & {*COMPARE_KEYS[:2]}:
            raise InputError(
                f"{name}: compare {entry}; accepted: {' or '.join(COMPARE_KEYS[:2])}, with others of "
                f"{', '.join(COMPARE_KEYS[2:])}."
            )
        if {"against_condition", "metric"} & set(entry) and "solved_at" in sweep:
            raise InputError(
                f"{name}: compare {entry} with solved_at, which is an accuracy of rows; accepted: against without "
                "metric, or without solved_at."
            )
    for row in combinations(sweep["train"]) if "after" in sweep else ():
        if FROM not in row:
            raise InputError(
                f"{name}: train {row} after {sweep['after']}; accepted: rows with the model_name_or_path of one of its "
                "folders."
            )


def combinations(axes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All combinations of one entry of every list, each as one dictionary."""
    return [{key: value for entry in choice for key, value in entry.items()} for choice in itertools.product(*axes)]


def with_seeds(sweep: dict[str, Any], count: int | None) -> dict[str, Any]:
    """
    The sweep with seeds 0 … count − 1 in the place of its own, if any; unchanged for `None`. Runs that start from
    models of another sweep start from those of their seed.

    Raises:
        InputError: for a count below 1, or for seeds that belong to other settings.
    """
    if count is None:
        return sweep
    if count < 1:
        raise InputError(f"--seeds {count}; accepted: 1 or more.")
    seeds = [{"seed": seed} for seed in range(count)]
    own = [all(entry.keys() == {"seed"} for entry in axis) for axis in sweep["train"]]
    tied = [entry for is_own, axis in zip(own, sweep["train"]) if not is_own for entry in axis if "seed" in entry]
    if tied:
        raise InputError(
            f"--seeds {count}: this sweep has {tied[0]}; accepted: entries whose only setting is the seed."
        )
    if any(own):
        return {**sweep, "train": [seeds if is_own else axis for is_own, axis in zip(own, sweep["train"])]}
    if "after" not in sweep:
        return {**sweep, "train": [seeds, *sweep["train"]]}
    rows = [{**seed, **row} for seed in seeds for row in combinations(sweep["train"])]
    return {**sweep, "train": [[{**row, FROM: f"seed={row['seed']},{row[FROM]}"} for row in rows]]}


def is_one_of(settings: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether a comparison or a condition applies to a model: it names no `rows`, or some with these settings."""
    return any(wanted.items() <= settings.items() for wanted in entry.get(ROWS, [{}]))


def slug(settings: dict[str, Any]) -> str:
    """The name of a run's folder, without the source of its weights. Of a long name, its hash and its end."""
    name = ",".join(f"{name}={value}" for name, value in settings.items() if name != FROM)
    if len(name.encode()) <= LONGEST_NAME:
        return name
    # The last settings are those that differ most.
    return hashlib.sha256(name.encode()).hexdigest()[:16] + "," + name[-LONGEST_NAME:].partition(",")[2]


@dataclass(frozen=True)
class Run:
    """
    The run of a sweep that trains and evaluates one model.

    Attributes:
        settings: of the model.
        passed: flags of every run of the sweep.
        output_dir: of the sweep. Models of the sweep before, if any, are in its folder there.
    """

    sweep: dict[str, Any]
    settings: dict[str, Any]
    passed: list[str]
    output_dir: Path

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """The conditions of the model's evaluation: those whose `rows`, if any, name it."""
        axes = [
            [
                {name: value for name, value in entry.items() if name != ROWS}
                for entry in axis
                if is_one_of(self.settings, entry)
            ]
            for axis in self.sweep.get("evaluate", [])
        ]
        return combinations(axes)

    @property
    def flags(self) -> list[str]:
        recipe = Path(self.sweep["recipe"])
        settings = {name: value for name, value in self.settings.items() if name != SCRIPT}
        if "after" in self.sweep:
            settings = {**settings, FROM: str(self.output_dir / self.sweep["after"] / settings[FROM])}
        if not recipe.suffix:
            places = (folder / "recipes" / f"{recipe}.yaml" for folder in (TRAINING / "evidence", TRAINING))
            recipe = next(filter(Path.is_file, places))
        return [str(recipe), *self.passed, *to_flags({**settings, "do_eval": True}, self.module.ARGUMENT_CLASSES)]

    @property
    def script(self) -> str:
        return self.settings.get(SCRIPT, self.sweep[SCRIPT])

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"training.{self.script}")

    def _folder(self, condition: dict[str, Any]) -> Path:
        """The folder of an evaluation; without a condition, that of the training too."""
        folder = self.output_dir / (slug(self.settings) or "recipe")
        return folder / "conditions" / slug(condition) if condition else folder

    def train_and_evaluate(self) -> None:
        """Trains the model and evaluates it under all conditions, unless that is done.

        Raises:
            InputError: if the model's folder contains another run.
        """
        folder, flags = self._folder({}), self.flags
        go_on = _remaining_flags(folder, flags)
        if go_on is not None:
            self.call([*flags, "--output_dir", str(folder), *go_on])
        if (_model_folder(folder) / RESOLUTIONS_FILE).is_file():
            return
        for condition in filter(None, self.conditions):
            place = self._folder(condition)
            changed = to_flags({**condition, "do_train": False}, self.module.ARGUMENT_CLASSES)
            evaluation = [*flags, *changed, "--output_dir", str(place)]
            go_on = _remaining_flags(place, evaluation)
            if go_on is not None:
                self.call([*evaluation, "--model_name_or_path", str(folder), *go_on])

    def call(self, flags: list[str]) -> None:
        """Calls the script, and ends what it leaves in cycles: data loader workers, and tensors of a device."""
        self.module.main(flags)
        gc.collect()

    def read(self, name: str) -> list[dict[str, Any]]:
        """
        The results, one per condition, for a sweep of this name; none before the run has finished, or if the folder is
        another run's.
        """
        folder, flags = self._folder({}), remove_private(self.flags)
        if _read(folder / FLAGS_FILE).get("flags") != flags:
            return []
        model = _model_folder(folder)
        shared = {
            "sweep": name,
            "script": self.script,
            "settings": self.settings,
            "flags": flags,
            "run": _read(model / CONFIG_FILE),
            "train_metrics": _read(model / "train_results.json"),
            "history": _history(model),
            "environment": _read(model / ENVIRONMENT_FILE),
        }
        # If the report neither shows nor compares losses, those of all examples would only take space.
        compared = any(entry.get("metric") == "loss" for entry in self.sweep.get("compare", []))
        with_losses = compared or "losses" in self.sweep.get("report", [])
        if (model / RESOLUTIONS_FILE).is_file():
            return [{**shared, **evaluated} for evaluated in _read_sizes(model, shared["run"], with_losses)]
        places = [_model_folder(self._folder(condition)) for condition in self.conditions]
        if not all((place / METRICS_FILE).is_file() for place in places):
            return []
        results = []
        for condition, place in zip(self.conditions, places, strict=True):
            evaluated = {"metrics": _read(place / METRICS_FILE), **_read_examples(place, with_losses)}
            further = _split_lengths(condition, evaluated["metrics"], place)
            results += [{**shared, "condition": condition, **evaluated, **of_length} for of_length in ({}, *further)]
        return results

    def pick_stored(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Its results among stored `lines`, also at further lengths; none unless all conditions are there."""
        flags = remove_private(self.flags)
        found = [line for line in lines if line["flags"] == flags]
        measured = [line["condition"] for line in found]
        return found if all(condition in measured for condition in self.conditions) else []


def require_packages(runs: list[Run]) -> None:
    """
    Raises:
        InputError: if a package is missing that the script of a run `REQUIRES`.
    """
    for run in runs:
        for name in getattr(run.module, "REQUIRES", ()):
            if importlib.util.find_spec(name) is None:
                raise InputError(f"{slug(run.settings)} needs {name}; accepted: pip install {name}.")


def _remaining_flags(folder: Path, flags: list[str]) -> list[str] | None:
    """Further flags that start or resume a run; `None` if it is finished. Stores `flags` in its folder."""
    described, stored = remove_private(flags), _read(folder / FLAGS_FILE).get("flags")
    if stored not in (None, described):
        raise InputError(
            f"{folder.name} contains a run with other flags, {' '.join(stored)}; accepted: the same, or another "
            "--output_dir."
        )
    model = _model_folder(folder)
    finished = any((model / name).is_file() for name in (METRICS_FILE, RESOLUTIONS_FILE))
    interrupted = last_complete_checkpoint(model) is not None
    PartialState().wait_for_everyone()
    if finished:
        return None
    if PartialState().is_main_process:
        write_record(folder, FLAGS_FILE, {"flags": described})
    if interrupted:
        return ["--resume_from_checkpoint", "last"]
    # A run that ended before its first checkpoint has records but cannot be resumed.
    return ["--overwrite_output_dir"] if stored else []


def _model_folder(folder: Path) -> Path:
    """The folder of a run's model. clip_finetuning.py writes one folder per model; a sweep trains one."""
    return next(folder.glob("*patched"), folder)


def _read_sizes(folder: Path, run: dict[str, Any], with_losses: bool) -> list[dict[str, Any]]:
    """Conditions and metrics of a run that evaluates at several sizes."""
    return [
        {
            "condition": {}
            if entry["image_size"] == run["model"].get("image_size")
            else {"image_size": entry["image_size"]},
            "metrics": {"eval_samples": entry["samples"]}
            | {f"eval_{name}": entry[name] for name in MEASURES if name in entry},
            **_read_examples(folder, with_losses, f"{entry['image_size']}_"),
        }
        for entry in _read(folder / RESOLUTIONS_FILE)["resolutions"]
    ]


def _split_lengths(condition: dict[str, Any], metrics: dict[str, float], folder: Path) -> list[dict[str, Any]]:
    """Moves the metrics of further block lengths out of `metrics`; returns these with conditions and single losses."""
    lengths = [match[1] for name in metrics if (match := re.fullmatch(r"eval_(\d+)_perplexity", name))]
    found = []
    for length in sorted(lengths, key=int):
        prefix = f"eval_{length}_"
        names = [name for name in metrics if name.startswith(prefix)]
        own = {f"eval_{name.removeprefix(prefix)}": metrics.pop(name) for name in names}
        given = {"condition": {**condition, "max_length": int(length)}, "metrics": own}
        found.append(given | _read_examples(folder, True, f"{length}_"))
    return found


def _history(folder: Path) -> list[list[float]]:
    """Pairs of epoch and accuracy (or mAP) of the evaluations during training."""
    log = _read(folder / "trainer_state.json").get("log_history", [])
    return [
        [entry["epoch"], entry[key]]
        for entry in log
        for key in ("eval_accuracy", "eval_map")
        if entry.get(key, -1) >= 0
    ]


def _read_examples(folder: Path, with_losses: bool, prefix: str = "") -> dict[str, Any]:
    """The encoded records of single examples, or of samples and documents with several tokens."""
    arrays = load_file(folder / EXAMPLES_FILE) if (folder / EXAMPLES_FILE).is_file() else {}
    # Losses of samples and documents are few, and perplexities are compared by them.
    names = ("losses", "sizes", "right") if with_losses or f"{prefix}sizes" in arrays else ()
    found = {name: encode_numbers(arrays[prefix + name]) for name in names if prefix + name in arrays}
    ranks = arrays.get(f"{prefix}ranks")
    if ranks is None:
        return {"examples": None, "correct": None} | found
    return {"examples": len(ranks), "correct": encode_examples(ranks == 0)} | found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
