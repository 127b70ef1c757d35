"""Facts of a checkpoint, as records that refuse wrong values, and the files in model_cards/ that contain such facts."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub.dataclasses import type_validator

from ...errors import InputError
from ...registers import closest
from ...storage.loading import explain


METRICS = {"accuracy": "top-1 accuracy", "top5_accuracy": "top-5 accuracy", "loss": "cross entropy"}
# The numbers of an evaluation: each metric, and its 95% interval.
NUMBERS = tuple(f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high"))
# The folder is beside the package in a checkout, and inside it in a wheel.
_HERE = Path(__file__).resolve().parents[2]
FOLDER = (_HERE if (_HERE / "model_cards").is_dir() else _HERE.parent) / "model_cards"

AnyRecord = TypeVar("AnyRecord", bound="Record")


class FactsError(InputError):
    """Facts that cannot be used for the card of this checkpoint; the message names the file and the problem."""


def fact(accepted: str, default: Any = MISSING, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """A field of a [`Record`]: what it accepts in words, its default or the type of an empty one, and a test."""
    kind = "default_factory" if isinstance(default, type) else "default"
    return field(**{kind: default}, metadata={"accepted": accepted, "holds": holds})


@dataclass(frozen=True)
class Record:
    """Raises [`FactsError`] for values that are not of the type of their field or fail its test."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                type_validator(item.name, value, item.type)
                is_accepted = value is None or item.metadata["holds"](value)
            except TypeError:
                is_accepted = False
            if not is_accepted:
                raise FactsError(f"{item.name} {value!r}: accepted is {item.metadata['accepted']}.")

    @classmethod
    def read(cls: type[AnyRecord], content: Mapping[str, Any], place: str) -> AnyRecord:
        """The record in a mapping. Raises [`FactsError`], with its place, also for missing and unknown keys."""
        known = {item.name: item for item in fields(cls)}
        if unknown := sorted(map(str, set(content) - set(known))):
            raise FactsError(f"{place}: unknown key {unknown}; accepted: {', '.join(known)}.")
        given = {name: None for name, item in known.items() if item.default is item.default_factory is MISSING}
        given |= {name: value for name, value in content.items() if value is not None}
        try:
            return cls(**given)
        except FactsError as error:
            raise FactsError(f"{place}: {error}") from None


@dataclass(frozen=True)
class Data(Record):
    """Data to train on or to evaluate with."""

    name: str = fact("a name to show", holds=bool)
    type: str | None = fact("a short name, `custom` for data that only their user knows", None)
    hub_id: str | None = fact("a repository on the Hub", None)
    config: str | None = fact("the name of a configuration", None)
    split: str | None = fact("the name of a split", None)
    files: list[str] = fact("a list of names", list)
    samples: int | None = fact("a number of examples", None)
    num_labels: int | None = fact("a number of classes", None)
    description: str | None = fact("a phrase", None)
    terms: str | None = fact("a sentence", None)


def _are_measures(numbers: dict[str, Any]) -> bool:
    are_finite = all(not isinstance(value, bool) and math.isfinite(value) for value in numbers.values())
    return are_finite and 0 <= numbers.get("accuracy", -1) <= 1


@dataclass(frozen=True)
class Figure(Record):
    """Measurements of one model on inputs of one size, from an evaluation or a paper."""

    image_size: list[int] = fact("a number of pixels, or [height, width]", holds=lambda sides: len(sides) in (2, 3))
    numbers: dict[str, Any] = fact("finite numbers, accuracy as a share of 1: 69.6% is 0.696", holds=_are_measures)
    max_num_patches: int | None = fact("a number of patches, 1 and above", None, lambda number: number >= 1)
    samples: int | None = fact("a number of inputs", None)
    data: Data | None = fact("data as in evaluation_data", None)
    weights: str | None = fact("the digest of the evaluated weights", None)
    where: str | None = fact("paper and table", None)

    @classmethod
    def read(cls, content: Mapping[str, Any], place: str) -> "Figure":
        """The figure in a mapping with the numbers beside the rest."""
        given = {name: value for name, value in content.items() if name not in NUMBERS}
        given["numbers"] = {name: content[name] for name in NUMBERS if name in content}
        if given.get("image_size") is not None:
            given["image_size"] = sides_of(given["image_size"])
        if isinstance(given.get("data"), dict):
            given["data"] = Data.read(given["data"], f"{place}: data")
        return super().read(given, place)

    @property
    def key(self) -> tuple[int, list[int]]:
        """Identifies and sorts inputs: `max_num_patches` (0 for inputs of one size) and `image_size`."""
        return self.max_num_patches or 0, self.image_size

    @property
    def inputs(self) -> str:
        """In words: images of one size, or images with their own aspect ratios."""
        sides = " × ".join(map(str, self.image_size))
        return f"{sides} px" if self.max_num_patches is None else f"up to {self.max_num_patches} patches"

    def estimate(self, metric: str) -> tuple[float, float, float]:
        """A metric and the bounds of its interval; both are the value if no interval was measured."""
        value, bounds = self.numbers[metric], (f"{metric}_low", f"{metric}_high")
        low, high = (self.numbers[name] if set(bounds) <= set(self.numbers) else value for name in bounds)
        return value, low, high


@dataclass(frozen=True)
class Facts(Record):
    """The content of a card."""

    title: str = fact("a heading")
    encoding: str = fact("a key of `encodings` in common.yaml: description, paper and citation")
    dataset: Data | None = fact("a key of `datasets` in common.yaml, or a mapping of the same form", None)
    training_data: Data | None = fact("a mapping of this form, with what differs from `dataset`", None)
    evaluation_data: Data | None = fact("a mapping of this form, with what differs from `dataset`", None)
    class_names: list[str] = fact("names of the classes, in the order of the classifier's outputs", list)
    model: dict = fact("configuration fields that describe the architecture", dict)
    recipe: dict = fact("training settings by name", dict)
    recipe_source: str | None = fact("the origin of a planned recipe", None)
    results: list[Figure] = fact("evaluations", list)
    paper_figures: list[Figure] = fact("`image_size`, `accuracy`, its bounds, and `where` (paper, table)", list)
    cost: dict = fact("time and speed of training and the number of parameters, by name", dict)
    environment: dict = fact("versions and hardware of training", dict)
    architecture: str | None = fact("a model class; by default an image (with `num_frames`, a video) classifier", None)
    seeds: list[int] = fact("seeds of the training runs behind the results", list)
    intended_use: str | None = fact("a paragraph", None)
    limits: str | None = fact("a paragraph", None)
    notes: str | None = fact("paragraphs", None)
    license: str | None = fact("the Hub's name of the licence; `None` if none was chosen", None)
    base_model: str | None = fact("the repository of the model from which an adapter or fine-tuned model starts", None)
    converted_from: str | None = fact("the origin of weights that were not trained with this library", None)
    progress: dict | None = fact("`step`, `max_steps` and `metrics` (or `None`) of an unfinished run", None)
    has_processor: bool = fact("whether a processor file is beside the weights", True)
    weights: str | None = fact("the digest of the weights", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoding not in (known := common_facts()["encodings"]):
            raise FactsError(f"encoding {self.encoding!r}: accepted are {', '.join(known)}.")
        self.results.sort(key=lambda result: result.key)

    @classmethod
    def read(cls, content: Mapping[str, Any], place: str) -> "Facts":
        """The facts in a mapping, whose data and figures are mappings too."""
        given, known = dict(content), common_facts()["datasets"]
        dataset = given.get("dataset")
        if isinstance(dataset, str):
            if dataset not in known:
                raise FactsError(f"{place}: dataset {dataset!r}: accepted are {', '.join(known)}.")
            given["dataset"] = dataset = known[dataset]
        shared = dataset if isinstance(dataset, dict) else {}
        # The split of a data set is the evaluated one.
        for name, known in (("dataset", {}), ("training_data", {**shared, "split": None}), ("evaluation_data", shared)):
            if isinstance(value := given.get(name), dict):
                given[name] = Data.read({**known, **value}, f"{place}: {name}") if value else None
        for name in ("results", "paper_figures"):
            if isinstance(value := given.get(name), list) and all(isinstance(one, dict) for one in value):
                given[name] = [Figure.read(one, f"{place}: {name}") for one in value]
        return super().read(given, place)

    @property
    def evaluated(self) -> Data | None:
        """The evaluation data, or the data set of which they are a part."""
        return self.evaluation_data or self.dataset

    @property
    def status(self) -> str:
        """`"measured"`, `"in training"`, `"not evaluated"` (the weights exist) or `"not trained"`."""
        if self.progress or self.results:
            return "in training" if self.progress else "measured"
        return "not evaluated" if self.weights else "not trained"


def common_facts() -> dict[str, Any]:
    """The shared part of the facts files: encodings, papers and data sets, and the fields that a card shows."""
    return yaml.safe_load((FOLDER / "common.yaml").read_text(encoding="utf-8"))


def load_facts(path: str | Path) -> Facts:
    """
    Facts of a yaml file; a name without a path means one in model_cards/. Raises [`FactsError`] for a missing or
    unreadable file, an unknown key or a value out of range.
    """
    places = (Path(path), FOLDER / f"{Path(path).name}.yaml")
    if (file := next((place for place in places if place.is_file()), None)) is None:
        known = sorted(place.stem for place in FOLDER.glob("*.yaml") if place.stem != "common")
        near, names = closest(Path(path).stem, known), ", ".join(known)
        raise FactsError(f"No facts {str(path)!r}{near}; accepted: a yaml file or one of {names}.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FactsError(f"{file.name} is not a readable yaml file: {explain(error)}.") from None
    if not isinstance(content, dict):
        raise FactsError(f"{file.name} contains a {type(content).__name__}; accepted: a mapping of facts.")
    return Facts.read(content, file.name)


def sides_of(size: Any) -> list:
    """[height, width] of a square given as a number; the sides of other sizes."""
    return list(size) if isinstance(size, list | tuple) else [size, size]
