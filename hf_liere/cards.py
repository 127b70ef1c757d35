"""
Model cards, rendered from facts: files in model_cards/ and the records that a training script leaves.

A figure stands in a card only as the result of an evaluation whose record names the weights it was made with
(`weights_digest`), or as a figure of a paper, marked as such. What nobody measured is written as *not measured*.
"""

import copy
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .auto import MODELS, model_class
from .configuration_liere import ROTARY_ENCODINGS
from .errors import InputError, require_libraries
from .version import __version__


CARD = "README.md"
PICTURE = "accuracy_by_image_size.png"
METRICS = {"accuracy": "top-1 accuracy", "top5_accuracy": "top-5 accuracy", "loss": "cross entropy"}
# In a checkout beside the package, in a wheel inside it.
_HERE = Path(__file__).resolve().parent
FOLDER = next((path for path in (_HERE / "model_cards", _HERE.parent / "model_cards") if path.is_dir()), None)


class FactsError(InputError):
    """Facts that cannot become the card of this checkpoint; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Card:
    """Text of README.md and the pictures beside it."""

    text: str
    pictures: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / CARD).write_text(self.text, encoding="utf-8")
        for name, content in self.pictures.items():
            (folder / name).write_bytes(content)

    @classmethod
    def read(cls, folder: Path) -> "Card":
        """The card in a folder. Raises [`FactsError`] if there is none."""
        if not (folder / CARD).is_file():
            raise FactsError(f"{folder} holds no {CARD}; accepted: a card there, or facts to render one from (--card).")
        text = (folder / CARD).read_text(encoding="utf-8")
        names = re.findall(r"!\[[^\]]*\]\(([A-Za-z0-9_.-]+)\)", text)
        return cls(text, {name: (folder / name).read_bytes() for name in names})


@dataclass
class Facts:
    """
    What a card says.

    Args:
        title: Heading.
        encoding: Key of `encodings` in common.yaml: description, paper and citation.
        dataset: Key of `datasets` in common.yaml, or a mapping of the same form.
        model: Fields of the configuration that tell the architecture.
        recipe: How it is trained, by name; `recipe_source` says whose recipe that is.
        results: Evaluations, see [`result_of_run`].
        paper_figures: `image_size`, `accuracy` (a share of 1), optionally `low` and `high`, and `where` in which paper.
        cost: What training took, by name.
        environment: Versions and hardware of training.
        architecture: Name of the model class.
        seeds: Of the training runs behind the results.
        intended_use, limits, notes: Paragraphs.
        license: As the Hub calls it.
        base_model: Repository of the model that an adapter or a fine-tuned model starts from.
        converted_from: Where the weights come from, if they were not trained with this library.
        progress: `step`, `max_steps` and `metrics` (of this step, or `None`) of a run that has not finished.
        weights: Digest of the weights.
    """

    title: str
    encoding: str
    dataset: str | dict
    model: dict = field(default_factory=dict)
    recipe: dict = field(default_factory=dict)
    recipe_source: str | None = None
    results: list[dict] = field(default_factory=list)
    paper_figures: list[dict] = field(default_factory=list)
    cost: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    architecture: str = "LieREViTForImageClassification"
    seeds: list[int] = field(default_factory=list)
    intended_use: str | None = None
    limits: str | None = None
    notes: str | None = None
    license: str = "apache-2.0"
    base_model: str | None = None
    converted_from: str | None = None
    progress: dict | None = None
    weights: str | None = None

    def __post_init__(self):
        common = common_facts()
        if self.encoding not in common["encodings"]:
            raise FactsError(f"encoding {self.encoding!r}: accepted are {', '.join(common['encodings'])}.")
        if isinstance(self.dataset, str):
            if self.dataset not in common["datasets"]:
                raise FactsError(f"dataset {self.dataset!r}: accepted are {', '.join(common['datasets'])}.")
            self.dataset = common["datasets"][self.dataset]
        for figure in (*self.results, *self.paper_figures):
            if not 0 <= figure["accuracy"] <= 1:
                raise FactsError(f"accuracy {figure['accuracy']}: accepted are shares of 1, so 69.6% is 0.696.")
            figure["image_size"] = _pair(figure["image_size"])
        self.results.sort(key=lambda result: result["image_size"])

    @property
    def status(self) -> str:
        """`"measured"`, `"in training"`, `"not evaluated"` (converted weights that are there) or `"not trained"`."""
        if self.progress or self.results:
            return "in training" if self.progress else "measured"
        return "not evaluated" if self.converted_from and self.weights else "not trained"


def common_facts() -> dict[str, dict]:
    """What the facts files share: encodings, papers and data sets."""
    if FOLDER is None:
        raise FactsError(f"There is no folder model_cards in or beside {_HERE}; it belongs to the package.")
    return yaml.safe_load((FOLDER / "common.yaml").read_text(encoding="utf-8"))


def load_facts(path: str | Path) -> Facts:
    """
    Facts of a yaml file, or of one in model_cards/ by its name alone.

    Raises:
        FactsError: for a file that does not exist, a key that means nothing and a value out of range.
    """
    path = Path(path)
    if not path.is_file() and FOLDER is not None and (FOLDER / f"{path.name}.yaml").is_file():
        path = FOLDER / f"{path.name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "common") if FOLDER else []
        raise FactsError(f"There are no facts {str(path)!r}; accepted: a yaml file or one of {', '.join(known)}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FactsError(f"{path.name} is no yaml file: {' '.join(str(error).split())}") from None
    known = {item.name: item for item in fields(Facts)}
    if not isinstance(content, dict) or set(content) - set(known):
        unknown = sorted(set(content) - set(known)) if isinstance(content, dict) else type(content).__name__
        raise FactsError(f"{path.name}: {unknown} means nothing; accepted: {', '.join(known)}.")
    required = [name for name, item in known.items() if item.default is item.default_factory is MISSING]
    if missing := [name for name in required if name not in content]:
        raise FactsError(f"{path.name}: {', '.join(missing)} missing.")
    try:
        return Facts(**content)
    except FactsError as error:
        raise FactsError(f"{path.name}: {error}") from None


def _record(folder: Path, name: str) -> dict:
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def result_of_run(folder: str | Path) -> dict | None:
    """
    The evaluation that a training script left in its output folder; `None` if there is none.

    Returns:
        `image_size`, `samples`, `weights` (digest of the evaluated weights), and for every metric its value and, as
        `<metric>_low` and `<metric>_high`, the bounds of its 95% interval.
    """
    folder = Path(folder)
    return _result(_record(folder, "eval_results.json"), folder)


def _result(metrics: Mapping[str, Any], folder: Path) -> dict | None:
    if not metrics:
        return None
    result = {
        "image_size": _record(folder, "run_config.json").get("image_size"),
        "samples": metrics.get("eval_samples"),
        "weights": _record(folder, "weights.json").get("sha256"),
    }
    for metric in METRICS:
        for name in (metric, f"{metric}_low", f"{metric}_high"):
            if f"eval_{name}" in metrics:
                result[name] = metrics[f"eval_{name}"]
    return result


def facts_of_run(
    folder: str | Path,
    weights: str,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
    title: str | None = None,
    progress: dict | None = None,
) -> Facts:
    """
    Facts of a finished run, or with `progress` of a running one, from its records.

    Args:
        folder: Output folder of the training script.
        weights: Digest of the weights that the card is for.
        facts: What the records do not tell; their figures replace its figures.
        evaluations: Output folders of evaluations of the same weights, at other sizes.
        title: Heading, where `facts` has none.

    Raises:
        FactsError: if a figure was measured with other weights, or it is unknown with which.
    """
    folder = Path(folder)
    run, metrics = _record(folder, "run_config.json"), _record(folder, "all_results.json")
    config = _record(folder, "config.json")
    adapter = _record(folder, "rotary_config.json")
    if adapter:
        config = {"architectures": ["adapter"], **adapter["rotary_patch"]}
    known = copy.deepcopy(facts)
    if known is None:
        known = Facts(
            title=title or folder.resolve().name,
            encoding=config.get("position_encoding", (config.get("rotary_patch") or {}).get("position_encoding")),
            dataset=_dataset(run.get("data", {})),
        )
    own = _result(progress["metrics"], folder) if progress else result_of_run(folder)
    results = [(folder, own)] + [(place, result_of_run(place)) for place in evaluations]
    for place, result in results:
        if result is None and place is not folder:
            raise FactsError(f"{place} holds no eval_results.json: it is no output of an evaluation.")
    known.results = [result for _, result in results if result is not None] or known.results
    for result in known.results:
        if result.get("weights") != weights:
            measured = f"weights {result['weights'][:12]}…" if result.get("weights") else "unknown weights"
            raise FactsError(
                f"The accuracy at {_size(result['image_size'])} px was measured with {measured}, the card is for "
                f"{weights[:12]}…; evaluate this checkpoint, or push the one that was evaluated."
            )
    if len(config.get("id2label") or range(6)) <= 5:
        for result in known.results:
            for name in ("top5_accuracy", "top5_accuracy_low", "top5_accuracy_high"):
                result.pop(name, None)
    architectures = config.get("architectures") or [known.architecture]
    known.architecture, known.weights, known.progress = architectures[0], weights, progress
    if run:
        known.model = {name: config[name] for name in MODEL_FIELDS if config.get(name) is not None}
        known.recipe, known.recipe_source = _recipe(run), None
        known.seeds = [run["training"]["seed"]]
        known.environment = _record(folder, "environment.json")
        known.cost = {name: metrics[name] for name in COST_FIELDS if name in metrics}
    known.__post_init__()
    return known


MODEL_FIELDS = (
    "position_encoding",
    "block_size",
    "coordinates",
    "share_heads",
    "share_layers",
    "position_perturbation",
    "image_size",
    "num_frames",
    "patch_size",
    "tubelet_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "pooling",
)
COST_FIELDS = ("parameters", "train_images_per_second", "train_runtime")
RECIPE_FIELDS = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "rotary_learning_rate_factor",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "label_smoothing_factor",
    "bf16",
    "fp16",
)
UNUSED = (None, False, 0, 0.0, -1)


def _recipe(run: Mapping[str, Any]) -> dict[str, Any]:
    """What was set of the training and the augmentation, by the names of the flags."""
    training, augmentation = run["training"], run.get("augmentation", {})
    chosen = {name: training[name] for name in RECIPE_FIELDS if training.get(name) not in UNUSED}
    if chosen.get("gradient_accumulation_steps") == 1:
        chosen.pop("gradient_accumulation_steps")
    if run.get("data", {}).get("max_train_samples"):
        chosen["max_train_samples"] = run["data"]["max_train_samples"]
    if run.get("model_name_or_path"):
        chosen["model_name_or_path"] = run["model_name_or_path"]
    crops = augmentation.get("random_resized_crop")
    used = {name: value for name, value in augmentation.items() if value not in UNUSED}
    for name, switch in (
        ("random_resized_crop_scale", crops),
        ("rand_augment_magnitude", augmentation.get("rand_augment_ops")),
        ("mixing_probability", augmentation.get("mixup_alpha") or augmentation.get("cutmix_alpha")),
        ("repeated_augmentation", augmentation.get("repeated_augmentation", 1) > 1),
    ):
        if not switch:
            used.pop(name, None)
    return chosen | used


def _dataset(data: Mapping[str, Any]) -> dict[str, Any]:
    name = data.get("dataset_name")
    for known in common_facts()["datasets"].values():
        if name is not None and name in (known.get("hub_id"), known["type"]):
            return known
    if name is not None:
        return {"name": name, "type": name, "hub_id": name if "/" in name else None, "split": data.get("eval_split")}
    files = data.get("validation_files") or [data.get("image_folder") or "not recorded"]
    return {"name": ", ".join(map(str, files)), "type": "custom", "split": data.get("eval_split")}


def render(facts: Facts, repo_id: str | None = None) -> Card:
    """
    The card of a checkpoint: metadata with a `model-index` of what was measured, text, tables and a plot.

    Args:
        repo_id: Repository it will lie in.
    """
    common = common_facts()
    encoding = common["encodings"][facts.encoding]
    video = "num_frames" in facts.model or "Video" in facts.architecture
    task = _task(facts.architecture)
    name = (repo_id or facts.title).rpartition("/")[2]
    data = ModelCardData(
        license=facts.license,
        library_name="transformers",
        pipeline_tag=task,
        base_model=facts.base_model,
        datasets=[facts.dataset["hub_id"]] if facts.dataset.get("hub_id") else None,
        metrics=["accuracy"] if facts.results else None,
        tags=["liere", *([] if facts.encoding == "liere" else [facts.encoding]), *(["video"] if video else [])],
        model_name=name if facts.results else None,
        eval_results=[result for one in facts.results for result in _eval_results(facts, one, task)] or None,
    )
    pictures = {}
    if len({tuple(result["image_size"]) for result in facts.results}) > 1:
        pictures[PICTURE] = _plot(facts)
    card = ModelCard.from_template(
        data,
        template_path=str(FOLDER / "template.md.jinja"),
        facts=facts,
        encoding=encoding,
        paper=common["papers"][encoding["paper"]],
        repo_id=repo_id or "OWNER/NAME",
        auto_class=_auto_class(facts.architecture),
        module=None if facts.architecture == "adapter" else model_class(facts.architecture).__module__,
        processor=_processor(facts.architecture),
        rotary=facts.encoding in ROTARY_ENCODINGS,
        picture=PICTURE if pictures else None,
        metrics={key: label for key, label in METRICS.items() if any(key in result for result in facts.results)},
        version=__version__,
        size=_size,
        percent=_percent,
        value=_value,
    )
    return Card(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n", pictures)


def push_card(
    folder: str | Path,
    weights: str,
    repo_id: str,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
) -> Card:
    """
    The card to publish a folder with: rendered from facts and records, or, without either, the one that lies there.

    Raises:
        FactsError: if the facts hold no figure measured with these weights.
    """
    folder = Path(folder)
    if facts is None and not evaluations and not (folder / "eval_results.json").is_file():
        return Card.read(folder)
    known = facts_of_run(folder, weights, facts, evaluations, title=repo_id.rpartition("/")[2])
    if known.status in ("not trained", "not evaluated"):
        raise FactsError(
            f"{known.title} is {known.status}: there is no figure measured with these weights. Evaluate them with "
            "training/image_classification.py --do_eval and pass its output folder (--evaluation)."
        )
    return render(known, repo_id)


def _auto_class(architecture: str) -> str | None:
    for models in MODELS.values():
        for auto_class, cls in models.items():
            # AutoBackbone takes configurations only.
            if cls.__name__ == architecture and "Backbone" not in architecture:
                return auto_class.__name__
    return None


def _processor(architecture: str) -> str:
    if "Video" in architecture:
        return "AutoVideoProcessor"
    return "AutoProcessor" if architecture == "RotaryCLIPModel" else "AutoImageProcessor"


def _task(architecture: str) -> str | None:
    tasks = {
        "ForImageClassification": "image-classification",
        "ForVideoClassification": "video-classification",
        "RotaryCLIPModel": "zero-shot-image-classification",
    }
    return next((task for ending, task in tasks.items() if architecture.endswith(ending)), None)


def _eval_results(facts: Facts, result: Mapping[str, Any], task: str | None) -> list[EvalResult]:
    entries = []
    for metric, label in METRICS.items():
        if metric not in result:
            continue
        details = {"image_size": list(result["image_size"]), "samples": result.get("samples")}
        if result.get(f"{metric}_low") != result.get(f"{metric}_high"):
            details |= {"low": result[f"{metric}_low"], "high": result[f"{metric}_high"], "confidence": 0.95}
        entries.append(
            EvalResult(
                task_type=task or "other",
                dataset_type=facts.dataset.get("hub_id") or facts.dataset["type"],
                dataset_name=facts.dataset["name"],
                dataset_split=facts.dataset.get("split"),
                metric_type="accuracy" if metric.endswith("accuracy") else metric,
                metric_name=f"{label} at {_size(result['image_size'])} px",
                metric_value=result[metric],
                metric_args={key: value for key, value in details.items() if value is not None},
            )
        )
    return entries


def _plot(facts: Facts) -> bytes:
    """Accuracy against image height with intervals, and the paper's figures as open circles."""
    require_libraries("The plot of the card", "train", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    heights = [result["image_size"][0] for result in facts.results]
    values = [100 * result["accuracy"] for result in facts.results]
    bounds = [
        [100 * abs(result.get(f"accuracy_{end}", result["accuracy"]) - result["accuracy"]) for result in facts.results]
        for end in ("low", "high")
    ]
    axes.errorbar(heights, values, yerr=bounds, fmt="o-", color="#0072B2", capsize=3, label="this checkpoint, measured")
    paper = sorted(facts.paper_figures, key=lambda one: one["image_size"])
    if paper:
        heights = [one["image_size"][0] for one in paper]
        label = f"the paper's model ({paper[0]['where']})"
        axes.plot(heights, [100 * one["accuracy"] for one in paper], "o", mfc="none", color="#777777", label=label)
    axes.set(xlabel="image size (px)", ylabel=f"top-1 accuracy on {facts.dataset['name']} (%)")
    axes.legend(frameon=False)
    content = io.BytesIO()
    figure.savefig(content, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return content.getvalue()


def _pair(size: int | Iterable[int]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


def _size(size: int | Iterable[int]) -> str:
    return " × ".join(map(str, _pair(size)))


def _percent(result: Mapping[str, Any], metric: str) -> str:
    """Value and interval as a table shows them; losses are no percentages."""
    if metric not in result:
        return "not measured"
    show = (lambda number: f"{number:.3g}") if metric == "loss" else (lambda number: f"{number:.1%}")
    low, high = (result.get(f"{metric}_{end}", result.get(end)) for end in ("low", "high"))
    # Where every answer is right, or wrong, all resamples are alike and their interval says nothing.
    interval = f" ({show(low)} – {show(high)})" if low is not None and high is not None and low < high else ""
    return show(result[metric]) + interval


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " × ".join(map(str, value)) if all(isinstance(item, int) for item in value) else str(value)
    return str(value)


__all__ = ["Card", "Facts", "FactsError", "facts_of_run", "load_facts", "push_card", "render", "result_of_run"]
