"""
Facts of a saved folder, the model's configuration and the training scripts' records, compared with given facts.

A card takes the model's description, its data and its figures from the checkpoint and the records beside it. A facts
file may repeat them or add what no record contains; contradictions are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...auto import model_class
from ...patching.adapters import parse_adapter, require_saved_together
from ...patching.rotary_patch import RotaryPatchConfig
from ...storage.saved_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, LABELS, PEFT_CONFIG, SavedModel, first_line
from .facts import NUMBERS, Data, Facts, FactsError, Figure, Record, common_facts, fact, sides_of


RUN_FILE = "run_config.json"
RESULTS_FILE = "eval_results.json"
# `hf-liere convert` writes this file, the only record of where the weights come from.
CONVERSION_FILE = "conversion.json"
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
UNUSED = (None, False, 0, 0.0, -1)
# Fields that an evaluation may set without changing what the model computes.
OF_TRAINING = ("position_perturbation", "image_size", "num_frames")
# What beside their names decides whether two descriptions of data mean the same.
DATA_DETAILS = ("config", "split", "files", "samples")


@dataclass(frozen=True)
class Run(Record):
    """The record of a run; empty without one."""

    training: dict = fact("a json object", dict)
    data: dict = fact("a json object", dict)
    augmentation: dict = fact("a json object", dict)
    model: dict = fact("a json object", dict)
    condition: dict = fact("a json object", dict)
    examples: dict[str, dict | None] = fact("a json object of objects", dict)
    image_size: int | list | None = fact("a number of pixels, or [height, width]", None)
    model_name_or_path: str | None = fact("a name", None)

    @classmethod
    def of(cls, saved: SavedModel) -> "Run":
        content = _select(saved.read_json(RUN_FILE), [item.name for item in fields(cls)])
        return cls.read(content, str(saved.folder / RUN_FILE))


def facts_of_run(
    saved: SavedModel,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
    title: str | None = None,
    progress: dict | None = None,
) -> Facts:
    """
    Facts of a finished run (with `progress`, of a running one) from its checkpoint and records, from `evaluations` of
    the same weights at other sizes, and from `facts` with what these do not contain, as the heading (else `title`).

    Raises [`FactsError`] if a figure was measured with other or unknown weights, data or configuration, or if `facts`
    contradict the checkpoint or its records; the message lists each such fact.
    """
    checkpoint, conversion, run = describe_checkpoint(saved), saved.read_json(CONVERSION_FILE), Run.of(saved)
    known = facts or Facts(title=title or saved.folder.resolve().name, encoding=checkpoint["encoding"])
    if conversion.get("weights") == saved.digest:
        missing = [name for name in ("converted_from", "notes", "license") if getattr(known, name) is None]
        known = replace(known, **_select(conversion, missing))
    measured = _read_evaluations(saved, progress and (progress["metrics"] or {}), evaluations, checkpoint["model"])
    found = replace(known, **checkpoint, **_everything_recorded(saved, run, checkpoint["model"], measured))
    if differing := find_contradictions(known, found):
        raise FactsError(
            f"The facts of {known.title!r} contradict {saved}: {'; '.join(differing)}. Correct the facts or leave "
            "them out; accepted are facts that agree, or that checkpoint and records do not contain."
        )
    results = [*measured, *(one for one in known.results if one.key not in [result.key for result in measured])]
    for result in results:
        if result.weights != saved.digest:
            others = f"weights {result.weights[:12]}…" if result.weights else "unknown weights"
            raise FactsError(
                f"The accuracy at {result.inputs} was measured with {others}, the card is for {saved.digest[:12]}…; "
                "evaluate this checkpoint, or push the one that was evaluated."
            )
    if found.model.get("num_labels", 6) <= 5:
        kept = [name for name in NUMBERS if not name.startswith("top5")]
        results = [replace(one, numbers=_select(one.numbers, kept)) for one in results]
    if run == Run():
        shown: dict[str, Any] = {"cost": known.cost | found.cost}
    else:
        # Source and data set of the facts describe a planned recipe, not the run.
        shown = {"recipe": _settings_in_use(found.recipe, run.augmentation), "recipe_source": None, "dataset": None}
        shown["cost"] = _select(found.cost, common_facts()["cost_fields"])
        if not isinstance(found.environment.get("libraries"), dict):
            shown["environment"] = {}
    return replace(
        found,
        **shown,
        results=results,
        model=_select(found.model, common_facts()["model_fields"]),
        base_model=known.base_model or found.model.get("repository"),
        converted_from=known.converted_from,
        progress=progress,
        has_processor=any(map(saved.has, PROCESSOR_CONFIGS)),
    )


def read_patch(saved: SavedModel) -> tuple[RotaryPatchConfig, dict[str, Any]]:
    """
    The patch of an adapter and what it tells of its first base. Raises [`FactsError`] for an adapter without the
    rotations that its configuration describes, or with other files than it was saved with.
    """
    path = saved.folder / ADAPTER_CONFIG
    try:
        if not saved.has(ADAPTER_CONFIG):
            raise FactsError(f"{saved} has no {ADAPTER_CONFIG}; adapters without rotations are pushed by peft.")
        patch, towers = parse_adapter(saved.configuration, path)
        require_saved_together(path)
    except ValueError as error:
        raise FactsError(str(error)) from None
    found = {name.partition(".")[0] for name in saved.shapes} - {"base_model"}
    if found != set(map(str, range(len(towers)))):
        raise FactsError(
            f"{saved.folder / ADAPTER_WEIGHTS} contains {', '.join(sorted(saved.shapes)) or 'no tensors'}; "
            f"{ADAPTER_CONFIG} describes {len(towers)} vision towers."
        )
    return patch, towers[0]


def describe_checkpoint(saved: SavedModel) -> dict[str, Any]:
    """
    Facts of a saved model or adapter, by the names of [`Facts`], with every configuration field in `model`. Raises
    [`FactsError`] if the configuration is unreadable or not one of ours.
    """
    names: list[str] = []
    if saved.kind == "model":
        try:
            cls = model_class(saved.architecture)
            config = cls.config_class.from_dict(saved.configuration)
        except Exception as error:
            # Errors of strict configurations name the field and what it accepts.
            reason = first_line(error)
            raise FactsError(f"{saved.folder / CONFIG} is not a configuration of hf_liere: {reason}") from None
        architecture, values = cls.__name__, config.to_dict()
        model = {**(values.get("vision_config") or {}), **values, **(values.get("rotary_patch") or {})}
        if architecture.endswith("Classification"):
            names = [str(config.id2label[number]) for number in range(config.num_labels)]
            model["num_labels"] = config.num_labels
    else:
        patch, base = read_patch(saved)
        shapes = {"num_hidden_layers": base["layers"], "num_attention_heads": base["heads"]}
        architecture, model = "adapter", {**patch.to_dict(), **shapes, "base_model_type": base["model_type"]}
        if saved.kind == "peft":
            model |= saved.read_json(PEFT_CONFIG)
            base_name = str(model.get("base_model_name_or_path"))
            if base_name.count("/") == 1 and not Path(base_name).exists():
                model["repository"] = base_name
            names = saved.read_json(LABELS).get("names", [])
    if model.get("rotary_init") == "pretrained":
        # Models with RoPE have no position table to keep.
        model.pop("keep_absolute", None)
    if names == [f"LABEL_{number}" for number in range(len(names))]:
        names = []
    encoding = model.get("position_encoding")
    return {"architecture": architecture, "encoding": encoding, "model": model, "class_names": names}


def result_of_run(saved: SavedModel, metrics: Mapping[str, Any] | None = None) -> Figure | None:
    """
    The evaluation of images or videos in a script's output folder, or `metrics` of that run; `None` without one. Raises
    `ValueError` if the record cannot be read, or the evaluation shuffled its patches or shifted their positions.
    """
    metrics = saved.read_json(RESULTS_FILE) if metrics is None else metrics
    run = Run.of(saved)
    if not metrics or run.image_size is None:
        return None
    condition = _select(run.condition, ("evaluation_shuffle", "evaluation_offset"))
    if shown := ", ".join(f"{name} {value}" for name, value in condition.items() if value not in ("none", 0)):
        raise FactsError(f"{saved} contains an evaluation with {shown}; accepted: evaluations of unchanged images.")
    data = data_of_run(run, "evaluation")
    samples = data.samples if metrics.get("eval_samples") is None else metrics["eval_samples"]
    result = {
        "image_size": run.image_size,
        # Unreadable examples are counted separately and do not enter any metric.
        "samples": samples and samples - metrics.get("eval_unreadable", 0),
        "weights": saved.read_json("weights.json").get("sha256"),
        "data": data,
        "max_num_patches": run.data.get("max_num_patches"),
    }
    result |= {name: metrics[f"eval_{name}"] for name in NUMBERS if f"eval_{name}" in metrics}
    return Figure.read(result, str(saved))


def data_of_run(run: Run, side: str) -> Data:
    """The data of one side of a run, `"train"` or `"evaluation"`, with what common.yaml says of them."""
    used = run.examples.get(side) or {}
    name, files = used.get("name"), [Path(file).name for file in used.get("files") or []]
    known = common_facts()["datasets"].values()
    if name:
        matching = [data for data in known if name in (data.get("hub_id"), data["type"])]
        other = {"name": name, "type": name, "hub_id": name if "/" in name else None}
    else:
        matching = [data for data in known if files and set(files) <= set(data.get("files", ()))]
        shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
        other = {"name": shown or used.get("folder") or "not recorded", "type": "custom"}
    details = {"files": files, **{key: used.get(key) for key in ("config", "split", "samples")}}
    content = {key: value for key, value in ([*matching, other][0] | details).items() if value}
    return Data.read(content, f"{side} data in {RUN_FILE}")


def _everything_recorded(saved: SavedModel, run: Run, model: dict[str, Any], measured: list[Figure]) -> dict[str, Any]:
    """All recorded facts of a checkpoint, by the names of [`Facts`], even where a card shows only a part."""
    recorded: dict[str, Any] = {"weights": saved.digest, "results": measured, "cost": {"parameters": saved.parameters}}
    if measured:
        recorded["evaluation_data"] = measured[0].data
    if run == Run():
        return recorded
    environment, metrics = saved.read_json("environment.json"), saved.read_json("all_results.json")
    training, start = run.training, run.model_name_or_path
    recipe = {**model, **run.data, **run.augmentation, **training, "model_name_or_path": start}
    if (training.get("max_steps") or 0) > 0 and "epoch" in metrics:
        recipe["num_train_epochs"] = metrics["epoch"]
    if "per_device_train_batch_size" in training:
        batch = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
        recipe["total_train_batch_size"] = batch * environment.get("world_size", 1)
    recorded |= {"recipe": recipe, "environment": environment, "cost": metrics | recorded["cost"]}
    recorded["training_data"] = None if run.examples.get("train") is None else data_of_run(run, "train")
    recorded["seeds"] = [training["seed"]] if "seed" in training else []
    # Records contain only the last part of folders, so a name with a slash is on the Hub.
    if start is None or "/" in start:
        recorded["base_model"] = start
    if training.get("do_train"):
        recorded["converted_from"] = start
    return recorded


def _settings_in_use(recipe: Mapping[str, Any], augmentation: Iterable[str]) -> dict[str, Any]:
    """The settings of training and augmentation that had an effect, by flag."""
    without_effect = {
        "gradient_accumulation_steps": recipe.get("gradient_accumulation_steps") == 1,
        # Trainer stops at max_steps, whatever the number of epochs.
        "num_train_epochs": recipe.get("max_steps") not in UNUSED,
        "train_fraction": recipe.get("train_fraction") == 1,
        "random_resized_crop_scale": not recipe.get("random_resized_crop"),
        "rand_augment_magnitude": not recipe.get("rand_augment_ops"),
        "mixing_probability": not (recipe.get("mixup_alpha") or recipe.get("cutmix_alpha")),
        "repeated_augmentation": recipe.get("repeated_augmentation") == 1,
    }
    shown = _select(recipe, (*common_facts()["recipe_fields"], *augmentation))
    return {name: value for name, value in shown.items() if value not in UNUSED and not without_effect.get(name)}


def _read_evaluations(
    saved: SavedModel, metrics: dict | None, evaluations: Iterable[str | Path], model: dict[str, Any]
) -> list[Figure]:
    """The evaluations of these weights; all must use the same data and the checkpoint's configuration."""
    results = [(place, result_of_run(place)) for place in map(SavedModel, evaluations)]
    for place, result in results:
        if result is None:
            raise FactsError(f"{place} contains no {RESULTS_FILE}: it is not the output of an evaluation.")
    measured = [(place, result) for place, result in [(saved, result_of_run(saved, metrics)), *results] if result]
    fields = [name for name in common_facts()["model_fields"] if name not in OF_TRAINING]
    for place, result in measured:
        then = _select(Run.of(place).model, fields)
        if differing := _differences({"model": then}, {"model": model}, (place, CONFIG)):
            raise FactsError(f"{place} was measured with another configuration: {'; '.join(differing)}.")
        first, this = ({"data": one.data and replace(one.data, samples=None)} for one in (measured[0][1], result))
        if differing := _differences(first, this, (measured[0][0], place)):
            raise FactsError(f"A card contains evaluations of the same data only: {'; '.join(differing)}.")
    return [result for _, result in measured]


def find_contradictions(facts: Facts, found: Facts) -> list[str]:
    """Every fact that contradicts what was found in checkpoint and records, with both values."""
    # The split of a data set is the evaluated one.
    trained = facts.training_data or (facts.dataset and replace(facts.dataset, split=None))
    data = {"training_data": trained, "evaluation_data": facts.evaluated}
    stated = {name: value for name, value in {**vars(facts), **data}.items() if value}
    classes = [{"model": {"num_labels": one.num_labels}} for one in data.values() if one and one.num_labels]
    differing = [each for one in (stated, *classes) for each in _differences(one, vars(found))]
    differing += [
        f"{name} is {value!r} in the facts, and the checkpoint has no such field"
        for name, value in facts.model.items()
        if name not in found.model
    ]
    return list(dict.fromkeys(differing))


def _differences(
    stated: Mapping[str, Any], known: Mapping[str, Any], places: tuple[object, object] = ("the facts", "the folder")
) -> list[str]:
    """A sentence for every fact that has different values in both; one that only one of them has does not count."""
    values = dict(_statements(known))
    return [
        f"{place[-1]} is {value!r} in {places[0]} and {values[place]!r} in {places[1]}"
        for place, value in _statements(stated)
        # 32 and [32, 32] are the same image size.
        if place in values and sides_of(value) != sides_of(values[place])
    ]


def _statements(facts: Mapping[str, Any], group: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every single fact with its place among [`Facts`], which ends with its name in messages."""
    for name, value in facts.items():
        if isinstance(value, Data):
            label, kind = name.replace("_", " "), value.type
            yield (label,), value.hub_id or (value.name if kind in (None, "custom") else kind)
            details = {**vars(value), "files": [Path(file).name for file in value.files]}
            yield from (((f"{label}: {each}",), details[each]) for each in DATA_DETAILS if details[each])
        elif name == "results":
            for result in value:
                told = {**vars(result), **result.numbers, "numbers": None, "data": None}
                numbers = {f"{key} at {result.inputs}": told[key] for key in told if told[key] is not None}
                yield from _statements(numbers, (str(result.key),))
        else:
            # Two groups are compared fact by fact.
            yield (*group, name), {} if isinstance(value, dict) else value
            if isinstance(value, dict):
                yield from _statements(value, (*group, name))


def _select(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values of `names` that are not `None`."""
    return {name: values[name] for name in names if values.get(name) is not None}
