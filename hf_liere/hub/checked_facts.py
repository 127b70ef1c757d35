"""
Facts of a saved folder, and their comparison with given facts.

A card takes the model's description, its data and its figures from the checkpoint and the records beside it. A facts
file may repeat them or add what no record contains; contradictions are refused.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..storage.saved_model import SavedModel
from .facts import MODEL_FIELDS, Facts, FactsError, format_inputs, input_key
from .run_records import (
    RESULTS_FILE,
    RUN_FILE,
    data_of_run,
    describe_checkpoint,
    read_record,
    recipe_of_run,
    record_group,
    result_of_run,
)


# `hf-liere convert` writes this file, the only record of where the weights come from.
CONVERSION_FILE = "conversion.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COST_FIELDS = ("train_images_per_second", "train_runtime", "parameters")
# Facts that records may contradict, but that no card takes from them.
CONFIRMED = ("base_model", "converted_from")
# Fields that an evaluation may set without changing what the model computes.
OF_TRAINING = ("position_perturbation", "image_size", "num_frames")
# Beside the name, these fields decide whether two descriptions are of the same data.
DATA_DETAILS = ("config", "split", "files")
THERE = "the folder"


def facts_of_run(
    saved: SavedModel,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
    title: str | None = None,
    progress: dict | None = None,
) -> Facts:
    """
    Facts of a finished run (with `progress`, of a running one) from its checkpoint and records.

    Args:
        saved: Output of the training script.
        facts: What checkpoint and records do not contain.
        evaluations: Output folders of evaluations of the same weights, at other sizes.
        title: Heading, if `facts` has none.

    Raises:
        FactsError: if a figure was measured with other or unknown weights, data or configuration, or if `facts`
            contradict the checkpoint or its records; the message lists each such fact.
    """
    checkpoint, run = describe_checkpoint(saved), read_record(saved, RUN_FILE)
    model = checkpoint["model"]
    known = copy.deepcopy(facts) or Facts(title=title or saved.folder.resolve().name, encoding=checkpoint["encoding"])
    _add_conversion(known, saved)
    own = result_of_run(saved, progress["metrics"] or {}) if progress else result_of_run(saved)
    measured = _read_evaluations(saved, own, evaluations, checkpoint)
    recorded = _everything_recorded(saved, checkpoint, run, measured)
    if differing := find_contradictions(known, recorded, measured):
        raise FactsError(
            f"The facts of {known.title!r} contradict {saved}: {'; '.join(differing)}. Correct the facts or leave "
            "them out; accepted are facts that agree, or that checkpoint and records do not contain."
        )
    inputs = [input_key(result) for result in measured]
    known.results = measured + [result for result in known.results if input_key(result) not in inputs]
    for result in known.results:
        _require_weights(result, saved.digest)
    shown = {name: value for name, value in recorded.items() if name not in CONFIRMED}
    shown |= {"model": _select(model, MODEL_FIELDS), "cost": known.cost | recorded["cost"]}
    if run:
        shown |= {"recipe": recipe_of_run(run), "cost": _select(recorded["cost"], COST_FIELDS)}
        if not isinstance(recorded["environment"].get("libraries"), dict):
            shown["environment"] = {}
        # These fields describe a planned recipe, not the run.
        shown |= {"recipe_source": None, "dataset": None}
    if model.get("num_labels", 6) <= 5:
        known.results = [{name: one[name] for name in one if not name.startswith("top5")} for one in known.results]
    return replace(known, **shown, progress=progress, has_processor=any(map(saved.has, PROCESSOR_CONFIGS)))


def _add_conversion(facts: Facts, saved: SavedModel) -> None:
    """Add the facts of a conversion, unless they are given."""
    conversion = read_record(saved, CONVERSION_FILE)
    if conversion.get("weights") == saved.digest:
        for name in ("converted_from", "notes", "license"):
            if getattr(facts, name) is None:
                setattr(facts, name, conversion.get(name))


def _read_evaluations(
    saved: SavedModel, own: dict | None, evaluations: Iterable[str | Path], checkpoint: Mapping[str, Any]
) -> list[dict]:
    """The evaluations of these weights; all must use the same data and the checkpoint's configuration."""
    results = [] if own is None else [(saved, own)]
    for place in map(SavedModel, evaluations):
        result = result_of_run(place)
        if result is None:
            raise FactsError(f"{place} contains no {RESULTS_FILE}: it is not the output of an evaluation.")
        results.append((place, result))
    for place, result in results:
        _require_weights(result, saved.digest)
        then = record_group(read_record(place, RUN_FILE), "model")
        fields = [name for name in MODEL_FIELDS if name not in OF_TRAINING]
        if differing := _differences(_select(then, fields), checkpoint["model"], "config.json", str(place)):
            raise FactsError(f"{place} was measured with another configuration: {'; '.join(differing)}.")
        first, data = results[0]
        if differing := _data_differences("data", data["data"], result["data"], DATA_DETAILS, str(place), str(first)):
            raise FactsError(f"A card contains evaluations of the same data only: {'; '.join(differing)}.")
    return [result for _, result in results]


def _require_weights(result: Mapping[str, Any], weights: str) -> None:
    if result.get("weights") != weights:
        measured = f"weights {result['weights'][:12]}…" if result.get("weights") else "unknown weights"
        raise FactsError(
            f"The accuracy at {format_inputs(result)} was measured with {measured}, the card is for "
            f"{weights[:12]}…; evaluate this checkpoint, or push the one that was evaluated."
        )


def find_contradictions(facts: Facts, recorded: Mapping[str, Any], measured: list[dict]) -> list[str]:
    """Every fact that contradicts what is recorded, or an evaluation for the card, with both values."""
    model, of_data = recorded["model"], ("training_data", "evaluation_data")
    stated = {name: value for name, value in vars(facts).items() if value and name not in of_data}
    differing = _differences(stated, recorded)
    differing += [
        f"{name} is {value!r} in the facts, and the checkpoint has no such field"
        for name, value in facts.model.items()
        if name not in model
    ]
    differing += _contradictions_with_data(facts, recorded)
    for result in facts.results:
        for other in measured:
            if input_key(other) == input_key(result):
                at = f" at {format_inputs(result)}"
                ours, theirs = ({name + at: one[name] for name in one if name != "data"} for one in (result, other))
                differing += _differences(ours, theirs)
    return list(dict.fromkeys(differing))


def _everything_recorded(
    saved: SavedModel, checkpoint: Mapping[str, Any], run: Mapping[str, Any], measured: list[dict]
) -> dict[str, Any]:
    """What a checkpoint and its records say, by the names of [`Facts`], also where a card shows only a part."""
    recorded: dict[str, Any] = {**checkpoint, "weights": saved.digest, "cost": {"parameters": saved.parameters}}
    if measured:
        recorded["evaluation_data"] = measured[0]["data"]
    if not run:
        return recorded
    training, environment = record_group(run, "training"), read_record(saved, "environment.json")
    metrics, start = read_record(saved, "all_results.json"), run.get("model_name_or_path")
    recipe = {**checkpoint["model"], **record_group(run, "data"), **record_group(run, "augmentation"), **training}
    if (training.get("max_steps") or 0) > 0 and "epoch" in metrics:
        recipe["num_train_epochs"] = metrics["epoch"]
    if "per_device_train_batch_size" in training:
        batch = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
        recipe["total_train_batch_size"] = batch * environment.get("world_size", 1)
    recorded |= {"recipe": recipe, "environment": environment, "cost": metrics | recorded["cost"]}
    recorded["training_data"] = data_of_run(run, "train")
    recorded["seeds"] = [training["seed"]] if "seed" in training else []
    # Records contain only the last part of folders, so a name with a slash is on the Hub.
    if start is None or "/" in start:
        recorded["base_model"] = start
    if training.get("do_train"):
        recorded["converted_from"] = start
    return recorded


def _contradictions_with_data(facts: Facts, recorded: Mapping[str, Any]) -> list[str]:
    differing, num_labels = [], recorded["model"].get("num_labels")
    unsplit = {name: value for name, value in facts.shared_data.items() if name != "split"}
    for name, stated in (
        ("training_data", facts.training_data or unsplit),
        ("evaluation_data", facts.evaluation_data or facts.shared_data),
    ):
        if stated and recorded.get(name):
            details = (*DATA_DETAILS, "samples")
            differing += _data_differences(name.replace("_", " "), stated, recorded[name], details)
        if num_labels is not None and stated.get("num_labels") not in (None, num_labels):
            differing.append(
                f"{stated['name']} of the facts has {stated['num_labels']} classes and the checkpoint {num_labels}"
            )
    return differing


def _data_differences(
    label: str,
    stated: Mapping[str, Any],
    known: Mapping[str, Any],
    details: Iterable[str],
    there: str = THERE,
    here: str = "the facts",
) -> list[str]:
    """Differences between two descriptions of data; a field that only one of them has does not count."""
    both = [{**data, "files": [Path(file).name for file in data.get("files", ())]} for data in (stated, known)]
    identities = [data.get("hub_id") or data.get("type") or data["name"] for data in both]
    if identities[0] != identities[1] or (identities[0] == "custom" and stated["name"] != known["name"]):
        return [f"{label} is {stated['name']!r} in {here} and {known['name']!r} in {there}"]
    ours, theirs = ({f"{label}: {name}": data[name] for name in details if data.get(name)} for data in both)
    return _differences(ours, theirs, there, here)


def _differences(
    stated: Mapping[str, Any], known: Mapping[str, Any], there: str = THERE, here: str = "the facts"
) -> list[str]:
    """A sentence for every name that has different values in both mappings; nested mappings are compared too."""
    differing = []
    for name, value in stated.items():
        if name not in known:
            continue
        if isinstance(value, dict) and isinstance(known[name], dict):
            differing += _differences(value, known[name], there, here)
        elif not _are_equal(value, known[name]):
            differing.append(f"{name} is {value!r} in {here} and {known[name]!r} in {there}")
    return differing


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two values are equal; 32 and [32, 32] are the same image size."""
    values = [list(value) if isinstance(value, tuple) else value for value in (first, second)]
    if isinstance(values[0], list) != isinstance(values[1], list):
        values.sort(key=lambda value: isinstance(value, list))
        return bool(values[1]) and all(item == values[0] for item in values[1])
    return values[0] == values[1]


def _select(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values of `names` that are not `None`."""
    return {name: values[name] for name in names if values.get(name) is not None}
