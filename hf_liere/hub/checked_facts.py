"""
Facts of a saved folder, and whether given facts agree with it.

A card takes what the model is, its data and its figures from the checkpoint and the records beside it. Facts of a file
may say the same, or what no record can know; facts that say something else are refused.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..storage.saved_weights import saved_parameters
from .facts import MODEL_FIELDS, Facts, FactsError, inputs_of, inputs_text
from .run_records import (
    RESULTS_FILE,
    RUN_FILE,
    data_of_run,
    describe_checkpoint,
    part,
    recipe_of_run,
    record,
    result_of_run,
)


# `hf-liere convert` writes this file: it says where the weights come from, which no other record does.
CONVERSION_FILE = "conversion.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COST_FIELDS = ("train_images_per_second", "train_runtime")
# Fields that an evaluation may set without changing what the model computes.
OF_TRAINING = ("position_perturbation", "image_size", "num_frames")
# Beside their name, these tell whether two descriptions are of the same data.
DATA_DETAILS = ("config", "split", "files")


def facts_of_run(
    folder: str | Path,
    weights: str,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
    title: str | None = None,
    progress: dict | None = None,
) -> Facts:
    """
    Facts of a finished run, or with `progress` of a running one, from its checkpoint and records.

    Args:
        folder: Output folder of the training script.
        weights: Digest of the weights that the card is for.
        facts: What checkpoint and records do not tell.
        evaluations: Output folders of evaluations of the same weights, at other sizes.
        title: Heading, where `facts` has none.

    Raises:
        FactsError: if a figure was measured with other weights, other data or another configuration, or it is unknown
            with which, and if `facts` contradict the checkpoint or its records; the message lists each such fact.
    """
    folder = Path(folder)
    checkpoint, run = describe_checkpoint(folder), record(folder, RUN_FILE)
    known = copy.deepcopy(facts) or Facts(title=title or folder.resolve().name, encoding=checkpoint["encoding"])
    _add_conversion(known, folder, weights)
    own = result_of_run(folder, progress["metrics"] or {}) if progress else result_of_run(folder)
    measured = _measured(folder, own, evaluations, checkpoint, weights)
    found = checkpoint | _facts_of_records(folder, run, measured, weights)
    if differing := contradictions(known, folder, checkpoint, found, measured):
        raise FactsError(
            f"The facts of {known.title!r} contradict {folder}: {'; '.join(differing)}. Correct the facts or leave "
            "them out; accepted are facts that agree, and those of which checkpoint and records say nothing."
        )
    inputs = [inputs_of(result) for result in measured]
    known.results = measured + [result for result in known.results if inputs_of(result) not in inputs]
    for result in known.results:
        _require_weights(result, weights)
    found["model"] = _given(found["model"], MODEL_FIELDS)
    found["cost"] = {**(found["cost"] if run else known.cost), "parameters": saved_parameters(folder)}
    for name, value in found.items():
        setattr(known, name, value)
    if run:
        # These describe a planned recipe, not the run.
        known.recipe_source, known.dataset = None, None
    known.progress = progress
    known.has_processor = any((folder / name).is_file() for name in PROCESSOR_CONFIGS)
    if checkpoint["model"].get("num_labels", 6) <= 5:
        for result in known.results:
            for name in ("top5_accuracy", "top5_accuracy_low", "top5_accuracy_high"):
                result.pop(name, None)
    known.__post_init__()
    return known


def _add_conversion(facts: Facts, folder: Path, weights: str) -> None:
    """What the card of a converted checkpoint says, unless the facts say it."""
    conversion = record(folder, CONVERSION_FILE)
    if conversion.get("weights") == weights:
        for name in ("converted_from", "notes", "license"):
            if getattr(facts, name) is None:
                setattr(facts, name, conversion.get(name))


def _measured(
    folder: Path, own: dict | None, evaluations: Iterable[str | Path], checkpoint: Mapping[str, Any], weights: str
) -> list[dict]:
    """The evaluations of these weights, all of the same data and computed as the configuration says."""
    results = [] if own is None else [(folder, own)]
    for place in map(Path, evaluations):
        result = result_of_run(place)
        if result is None:
            raise FactsError(f"{place} holds no {RESULTS_FILE}: it is no output of an evaluation.")
        results.append((place, result))
    for place, result in results:
        _require_weights(result, weights)
        then = part(record(place, RUN_FILE), "model")
        fields = [name for name in MODEL_FIELDS if name not in OF_TRAINING]
        if differing := _differences(_given(then, fields), checkpoint["model"], "config.json", str(place)):
            raise FactsError(f"{place} was measured with another configuration: {'; '.join(differing)}.")
        first, data = results[0]
        if differing := _data_differences("data", data["data"], result["data"], DATA_DETAILS, str(place), str(first)):
            raise FactsError(f"A card holds evaluations of the same data only: {'; '.join(differing)}.")
    return [result for _, result in results]


def _require_weights(result: Mapping[str, Any], weights: str) -> None:
    if result.get("weights") != weights:
        measured = f"weights {result['weights'][:12]}…" if result.get("weights") else "unknown weights"
        raise FactsError(
            f"The accuracy at {inputs_text(result)} was measured with {measured}, the card is for "
            f"{weights[:12]}…; evaluate this checkpoint, or push the one that was evaluated."
        )


def _facts_of_records(folder: Path, run: Mapping[str, Any], measured: list[dict], weights: str) -> dict[str, Any]:
    found: dict[str, Any] = {"weights": weights, "cost": {}}
    if measured:
        found["evaluation_data"] = measured[0]["data"]
    if run:
        metrics, training = record(folder, "all_results.json"), part(run, "training")
        found["recipe"] = recipe_of_run(run)
        found["training_data"] = data_of_run(run, "train")
        found["seeds"] = [training["seed"]] if "seed" in training else []
        environment = record(folder, "environment.json")
        found["environment"] = environment if isinstance(environment.get("libraries"), dict) else {}
        found["cost"] = _given(metrics, COST_FIELDS)
    return found


def contradictions(
    facts: Facts, folder: Path, checkpoint: Mapping[str, Any], found: Mapping[str, Any], measured: list[dict]
) -> list[str]:
    """
    Every fact that says something else than a checkpoint or the records beside it, with both values.

    Args:
        checkpoint: See [`run_records.describe_checkpoint`].
        found: What the records tell.
        measured: The evaluations that the card is to show.
    """
    model, run = checkpoint["model"], record(folder, RUN_FILE)
    differing = _differences({"position_encoding": facts.encoding}, {"position_encoding": checkpoint["encoding"]})
    for name in ("architecture", "class_names"):
        if getattr(facts, name) and name in checkpoint:
            differing += _differences({name: getattr(facts, name)}, {name: checkpoint[name]})
    differing += _differences(facts.model, model)
    for name, value in facts.model.items():
        if name not in model:
            differing.append(f"{name} is {value!r} in the facts, and the checkpoint has no such field")
    stated = {"parameters": facts.cost.get("parameters"), "weights": facts.weights}
    differing += _differences(_given(stated), {"parameters": saved_parameters(folder), "weights": found["weights"]})
    differing += _contradictions_of_run(facts, folder, run, model)
    differing += _contradictions_of_data(facts, model, found)
    for result in facts.results:
        at = f" at {inputs_text(result)}"
        for other in measured:
            if inputs_of(other) == inputs_of(result):
                figures = [
                    {name + at: value for name, value in one.items() if name != "data"} for one in (result, other)
                ]
                differing += _differences(*figures, "the records")
    return list(dict.fromkeys(differing))


def _contradictions_of_run(facts: Facts, folder: Path, run: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    if not run:
        return []
    training, metrics = part(run, "training"), record(folder, "all_results.json")
    environment = record(folder, "environment.json")
    settings = {**model, **part(run, "data"), **part(run, "augmentation"), **training}
    if (training.get("max_steps") or 0) > 0 and "epoch" in metrics:
        settings["num_train_epochs"] = metrics["epoch"]
    if "per_device_train_batch_size" in training:
        batch = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
        settings["total_train_batch_size"] = batch * environment.get("world_size", 1)
    stated = {"seeds": facts.seeds or None, "environment": facts.environment, "base_model": facts.base_model}
    known = {"seeds": [training.get("seed")], "environment": environment}
    # Folders are recorded by their last part, so that a name with a slash is one of the Hub.
    start = run.get("model_name_or_path")
    if start is None or "/" in start:
        known["base_model"] = start
    if training.get("do_train"):
        stated["converted_from"], known["converted_from"] = facts.converted_from, start
    differing = _differences(_given(stated), known, "the records")
    differing += _differences(facts.recipe, settings, "the records")
    return differing + _differences({k: v for k, v in facts.cost.items() if k != "parameters"}, metrics, "the records")


def _contradictions_of_data(facts: Facts, model: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    differing = []
    unsplit = facts.dataset and {name: value for name, value in facts.dataset.items() if name != "split"}
    for name, stated in (
        ("training_data", facts.training_data or unsplit),
        ("evaluation_data", facts.evaluation_data or facts.dataset),
    ):
        if stated and found.get(name):
            details = (*DATA_DETAILS, "samples")
            differing += _data_differences(name.replace("_", " "), stated, found[name], details)
        if stated and "num_labels" in model and stated.get("num_labels") not in (None, model["num_labels"]):
            differing.append(
                f"{stated['name']} of the facts has {stated['num_labels']} classes and the checkpoint "
                f"{model['num_labels']}"
            )
    return differing


def _data_differences(
    label: str,
    stated: Mapping[str, Any],
    known: Mapping[str, Any],
    details: Iterable[str],
    there: str = "the records",
    here: str = "the facts",
) -> list[str]:
    """Whether two descriptions are of the same data; what only one of them says is no difference."""
    both = [{**data, "files": [Path(file).name for file in data.get("files", ())]} for data in (stated, known)]
    identities = [data.get("hub_id") or data.get("type") or data["name"] for data in both]
    if identities[0] != identities[1] or (identities[0] == "custom" and stated["name"] != known["name"]):
        return [f"{label} is {stated['name']!r} in {here} and {known['name']!r} in {there}"]
    values = [{f"{label}: {name}": data[name] for name in details if data.get(name)} for data in both]
    return _differences(*values, there, here)


def _differences(
    stated: Mapping[str, Any], known: Mapping[str, Any], there: str = "the checkpoint", here: str = "the facts"
) -> list[str]:
    """A sentence for every name that both mappings have with other values; nested mappings are compared alike."""
    differing = []
    for name, value in stated.items():
        if name not in known:
            continue
        if isinstance(value, dict) and isinstance(known[name], dict):
            differing += _differences(value, known[name], there, here)
        elif not _same(value, known[name]):
            differing.append(f"{name} is {value!r} in {here} and {known[name]!r} in {there}")
    return differing


def _same(first: Any, second: Any) -> bool:
    """Whether two values are equal; 32 and [32, 32] are the same size of an image."""
    values = [list(value) if isinstance(value, tuple) else value for value in (first, second)]
    if isinstance(values[0], list) != isinstance(values[1], list):
        values.sort(key=lambda value: isinstance(value, list))
        return bool(values[1]) and all(item == values[0] for item in values[1])
    return values[0] == values[1]


def _given(values: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """The values that are not `None`, either all of them or those of `names`."""
    return {name: values[name] for name in (values if names is None else names) if values.get(name) is not None}
