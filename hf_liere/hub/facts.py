"""The facts that model cards are rendered from: their format, and the files in model_cards/."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.dataclasses import type_validator

from ..errors import InputError


METRICS = {"accuracy": "top-1 accuracy", "top5_accuracy": "top-5 accuracy", "loss": "cross entropy"}
# The numbers of an evaluation: each metric, and its 95% interval.
NUMBERS = tuple(f"{metric}{end}" for metric in METRICS for end in ("", "_low", "_high"))
# Configuration fields that describe the architecture, in the order of a card.
MODEL_FIELDS = (
    "position_encoding",
    "block_size",
    "relative_axis",
    "rotate_values",
    "coordinates",
    "physical_unit",
    "use_absolute_position_embeddings",
    "keep_absolute",
    "share_heads",
    "share_layers",
    "position_perturbation",
    "image_size",
    "num_frames",
    "num_channels",
    "patch_size",
    "tubelet_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "pooling",
    "base_model_type",
)
DATA_FIELDS = ("name", "type", "hub_id", "config", "split", "files", "samples", "num_labels", "description", "terms")
# The folder is beside the package in a checkout, and inside it in a wheel.
_HERE = Path(__file__).resolve().parents[1]
FOLDER = (_HERE if (_HERE / "model_cards").is_dir() else _HERE.parent) / "model_cards"


class FactsError(InputError):
    """Facts that cannot be used for the card of this checkpoint; the message names the file and the problem."""


@dataclass
class Facts:
    """
    The content of a card.

    Args:
        title: Heading.
        encoding: Key of `encodings` in common.yaml: description, paper and citation.
        dataset: Training and evaluation data: a key of `datasets` in common.yaml, or a mapping of the same form.
        training_data, evaluation_data: The same for one of the two, with `split`, `files` and `samples` if known;
            missing fields are those of `dataset`.
        class_names: Names of the classes, in the order of the classifier's outputs.
        model: Configuration fields that describe the architecture.
        recipe: Training settings by name; `recipe_source` names their origin.
        results: Evaluations, see [`checked_facts.result_of_run`].
        paper_figures: `image_size`, `accuracy` (from 0 to 1), optionally `low` and `high`, and `where` (paper, table).
        cost: Time and speed of training and the number of parameters, by name.
        environment: Versions and hardware of training.
        architecture: Name of the model class; `None` means an image (with `num_frames`, a video) classifier.
        seeds: Seeds of the training runs behind the results.
        intended_use, limits, notes: Paragraphs.
        license: The Hub's name of the licence; `None` if none was chosen.
        base_model: Repository of the model from which an adapter or a fine-tuned model starts.
        converted_from: Origin of weights that were not trained with this library.
        progress: `step`, `max_steps` and `metrics` (of this step, or `None`) of an unfinished run.
        has_processor: Whether a processor file is beside the weights.
        weights: Digest of the weights.

    Raises:
        FactsError: for an invalid value.
    """

    title: str
    encoding: str
    dataset: str | dict | None = None
    training_data: dict | None = None
    evaluation_data: dict | None = None
    class_names: list[str] = field(default_factory=list)
    model: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    recipe_source: str | None = None
    results: list[dict] = field(default_factory=list)
    paper_figures: list[dict] = field(default_factory=list)
    cost: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    architecture: str | None = None
    seeds: list[int] = field(default_factory=list)
    intended_use: str | None = None
    limits: str | None = None
    notes: str | None = None
    license: str | None = None
    base_model: str | None = None
    converted_from: str | None = None
    progress: dict | None = None
    has_processor: bool = True
    weights: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            try:
                type_validator(item.name, getattr(self, item.name), item.type)
            except TypeError as error:
                raise FactsError(f"{error}.") from None
        common = common_facts()
        if self.encoding not in common["encodings"]:
            raise FactsError(f"encoding {self.encoding!r}: accepted are {', '.join(common['encodings'])}.")
        if isinstance(self.dataset, str):
            if self.dataset not in common["datasets"]:
                raise FactsError(f"dataset {self.dataset!r}: accepted are {', '.join(common['datasets'])}.")
            self.dataset = common["datasets"][self.dataset]
        self.training_data = self.training_data and self.data_of("training")
        self.evaluation_data = self.evaluation_data and self.data_of("evaluation")
        for data in filter(None, (self.dataset, self.training_data, self.evaluation_data)):
            _check_data(data)
        for figure in (*self.results, *self.paper_figures):
            _check_figure(figure)
        self.results.sort(key=input_key)

    def data_of(self, side: str) -> dict:
        """The `"training"` or `"evaluation"` data with what `dataset` says of them; empty if nothing is known."""
        assert not isinstance(self.dataset, str), "the data set of this name has replaced it"
        # The split of a data set is the evaluated one.
        left_out = ("split",) if side == "training" else ()
        shared = {name: value for name, value in (self.dataset or {}).items() if name not in left_out}
        return {**shared, **(getattr(self, f"{side}_data") or {})}

    @property
    def status(self) -> str:
        """`"measured"`, `"in training"`, `"not evaluated"` (the weights exist) or `"not trained"`."""
        if self.progress or self.results:
            return "in training" if self.progress else "measured"
        exists = self.weights and (self.converted_from or self.architecture == "adapter")
        return "not evaluated" if exists else "not trained"


def _check_data(data: dict) -> None:
    if unknown := set(data) - set(DATA_FIELDS):
        raise FactsError(f"data {sorted(unknown)}: accepted are {', '.join(DATA_FIELDS)}.")
    if not data.get("name"):
        raise FactsError(f"data {data!r}: the name is missing.")
    files = data.get("files", [])
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise FactsError(f"data files {files!r}: accepted is a list of names.")


def _check_figure(figure: dict) -> None:
    """Turn sizes into lists; require an accuracy from 0 to 1 and finite numbers for all other figures."""
    accuracy, size = figure.get("accuracy"), figure.get("image_size")
    if accuracy is None or not _is_number(accuracy) or not 0 <= accuracy <= 1:
        raise FactsError(f"accuracy {accuracy!r}: accepted are shares of 1, so 69.6% is 0.696.")
    figure["image_size"] = sides = height_and_width(size)
    if len(sides) not in (2, 3) or not all(isinstance(side, int) for side in sides):
        raise FactsError(f"image_size {size!r}: accepted are a number of pixels, or [height, width].")
    patches = figure.get("max_num_patches")
    if patches is not None and (not isinstance(patches, int) or patches < 1):
        raise FactsError(f"max_num_patches {patches!r}: accepted are numbers of patches, 1 and above.")
    for name in (*NUMBERS, "low", "high"):
        if name in figure and not _is_number(figure[name]):
            raise FactsError(f"{name} {figure[name]!r}: accepted are finite numbers.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def common_facts() -> dict[str, dict]:
    """The shared part of the facts files: encodings, papers and data sets."""
    return yaml.safe_load((FOLDER / "common.yaml").read_text(encoding="utf-8"))


def load_facts(path: str | Path) -> Facts:
    """
    Facts of a yaml file; a name without a path means one in model_cards/.

    Raises:
        FactsError: for a missing or unreadable file, an unknown key or a value out of range.
    """
    places = (Path(path), FOLDER / f"{Path(path).name}.yaml")
    if (file := next((place for place in places if place.is_file()), None)) is None:
        known = sorted(place.stem for place in FOLDER.glob("*.yaml") if place.stem != "common")
        raise FactsError(f"No facts {str(path)!r}; accepted: a yaml file or one of {', '.join(known)}.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error).splitlines()[0]
        place = f", line {mark.line + 1}" if mark else ""
        raise FactsError(f"{file.name} is not a readable yaml file{place}: {reason}.") from None
    known = [item.name for item in fields(Facts)]
    if not isinstance(content, dict) or set(content) - set(known):
        unknown = sorted(map(str, set(content) - set(known))) if isinstance(content, dict) else type(content).__name__
        raise FactsError(f"{file.name}: unknown key {unknown}; accepted: {', '.join(known)}.")
    if missing := [name for name in ("title", "encoding") if name not in content]:
        raise FactsError(f"{file.name}: {', '.join(missing)} missing.")
    try:
        return Facts(**content)
    except FactsError as error:
        raise FactsError(f"{file.name}: {error}") from None


def height_and_width(size: Any) -> list:
    """[height, width] of a square given as a number; the sides of other sizes."""
    return list(size) if isinstance(size, list | tuple) else [size, size]


def format_size(size: int | Iterable[int]) -> str:
    return " × ".join(map(str, height_and_width(size)))


def input_key(figure: Mapping[str, Any]) -> tuple[int, list[int]]:
    """A sort key of the inputs of a figure: `max_num_patches` (0 for inputs of one size) and `image_size`."""
    return figure.get("max_num_patches") or 0, height_and_width(figure["image_size"])


def format_inputs(figure: Mapping[str, Any]) -> str:
    """The inputs of a figure in words: images of one size, or images with their own aspect ratios."""
    patches = figure.get("max_num_patches")
    return f"{format_size(figure['image_size'])} px" if patches is None else f"up to {patches} patches"
