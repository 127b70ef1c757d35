"""
Model cards, rendered from facts: files in model_cards/ and the records that a training script leaves.

A card shows a figure only if it comes from an evaluation whose record names the evaluated weights (`weights_digest`),
or from a paper and marked as such. Missing figures appear as *not measured*.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from ...auto import model_class
from ...encoding.kinds import ENCODINGS
from ...errors import require_libraries
from ...patching.libraries import TOWERS
from ...storage.saved_model import SavedModel
from ...version import __version__
from .checked_facts import facts_of_run, result_of_run
from .facts import FOLDER, METRICS, Data, Facts, FactsError, Figure, common_facts, sides_of


CARD = "README.md"
PICTURE = "accuracy_by_image_size.png"
# Where the Hub's leaderboards look for results (https://huggingface.co/docs/hub/eval-results).
LEADERBOARD_FILE = ".eval_results/hf_liere.yaml"
UNKNOWN_DATA = Data("data that are not recorded")
LICENSE, NO_LICENSE = "The licence of these weights is `{}`.", "No licence was chosen for these weights."


@dataclass(frozen=True)
class Card:
    """Text of README.md, and the pictures and results beside it."""

    text: str
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        (folder / CARD).write_text(self.text, encoding="utf-8")
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    @property
    def license(self) -> str | None:
        """The licence in the metadata."""
        return ModelCard(self.text, ignore_metadata_errors=True).data.get("license")

    def with_license(self, license: str) -> "Card":
        """The card under a licence. Raises [`FactsError`] if it names another one."""
        if self.license not in (None, license):
            raise FactsError(f"The card names the licence {self.license!r}, not {license!r}; change one of them.")
        card = ModelCard(self.text, ignore_metadata_errors=True)
        card.data["license"] = license
        return replace(self, text=str(card).replace(NO_LICENSE, LICENSE.format(license)))

    @classmethod
    def read(cls, saved: SavedModel) -> "Card":
        """Read the card of a model. Raises [`FactsError`] if it is not text, or was rendered for other weights."""
        try:
            text = saved.read(CARD).decode("utf-8")
        except UnicodeDecodeError:
            raise FactsError(f"{saved.folder / CARD} is not UTF-8 text.") from None
        names = [*re.findall(r"!\[[^\]]*\]\(([A-Za-z0-9_.-]+)\)", text), *filter(saved.has, [LEADERBOARD_FILE])]
        card = cls(text, {name: saved.read(name) for name in names})
        card.require_weights(saved)
        return card

    def require_weights(self, saved: SavedModel) -> None:
        """Raise [`FactsError`] if the card was rendered for weights other than those of a saved model."""
        rendered_for = re.search(r"Weights: SHA-256 `([0-9a-f]{64})`", self.text)
        if rendered_for and rendered_for[1] != saved.digest:
            raise FactsError(
                f"The card is for weights {rendered_for[1][:12]}…, not for {saved.digest[:12]}… in {saved}; delete or "
                "replace it."
            )


def render_card(facts: Facts, repo_id: str | None = None, folder: str | None = None) -> Card:
    """
    Render the card of a checkpoint: metadata with a `model-index` of the measurements, text, tables and a plot, and for
    a repository what leaderboards read. Code in it loads the model from the Hub, or with this package from a `folder`
    that is not there.
    """
    common = common_facts()
    encoding = common["encodings"][facts.encoding]
    kind = "LieREVideoForVideoClassification" if "num_frames" in facts.model else "LieREViTForImageClassification"
    architecture = facts.architecture or kind
    facts = replace(facts, architecture=architecture)
    video = "num_frames" in facts.model or "Video" in architecture
    data = [one for one in (facts.training_data, facts.evaluation_data) if one] or [facts.dataset or UNKNOWN_DATA]
    hub_ids = list(dict.fromkeys(one.hub_id for one in data if one.hub_id))
    task, library = _task(architecture), _library(facts.model.get("base_model_type"))
    metadata = ModelCardData(
        license=facts.license,
        library_name="peft" if "peft_type" in facts.model else library,
        pipeline_tag=task,
        base_model=facts.base_model,
        datasets=hub_ids or None,
        metrics=["accuracy"] if facts.results else None,
        tags=["liere", *([] if facts.encoding == "liere" else [facts.encoding]), *(["video"] if video else [])],
        model_name=(repo_id or folder or facts.title).rpartition("/")[2] if facts.results else None,
        eval_results=[result for one in facts.results for result in _eval_results(facts, one, task)] or None,
    )
    # The evaluations whose images all had the same size.
    by_size = [result for result in facts.results if result.max_num_patches is None]
    files = {PICTURE: _plot(facts, by_size)} if len({result.image_size[-2] for result in by_size}) > 1 else {}
    if repo_id and (entries := list(_leaderboard_entries(facts))):
        content = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        files[LEADERBOARD_FILE] = content.encode()
    card = ModelCard.from_template(
        metadata,
        template_path=str(FOLDER / "template.md.jinja"),
        facts=facts,
        encoding=encoding,
        paper=common["papers"][encoding["paper"]],
        rotary=facts.encoding in ENCODINGS,
        described=list({one.name: one for one in data if one.description or one.terms}.values()),
        evaluated=facts.evaluated,
        picture=PICTURE if PICTURE in files else None,
        metrics={key: label for key, label in METRICS.items() if any(key in one.numbers for one in facts.results)},
        license=LICENSE.format(facts.license) if facts.license else NO_LICENSE,
        version=__version__,
        sides=sides_of,
        examples="clips" if video else "images",
        folder=folder,
        repo_id=repo_id or "OWNER/NAME",
        library=library,
        auto_class=_auto_class(architecture),
        module=None if architecture == "adapter" else model_class(architecture).config_class.code_file,
    )
    return Card(re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n", files)


def has_card(saved: SavedModel) -> bool:
    """Whether a card lies in a folder that is more than the form that peft writes there."""
    form = ModelCard.from_template(ModelCardData()).text.split()
    return saved.has(CARD) and " ".join(form) not in " ".join(saved.read(CARD).decode("utf-8", "replace").split())


def push_card(
    saved: SavedModel,
    repo_id: str,
    facts: Facts | None = None,
    evaluations: Iterable[str | Path] = (),
    license: str | None = None,
) -> Card:
    """
    The card to publish a model with: rendered from facts and records if there are any, else the card in the folder, or
    one that describes the model. Without a `license`, that of the facts is taken.

    Raises [`FactsError`] if the facts contradict checkpoint, records or license, or a figure is of other weights.
    """
    # Damaged weights are reported before a missing card.
    saved.require_finite_weights()
    if facts is None and not evaluations and result_of_run(saved) is None and has_card(saved):
        card = Card.read(saved)
    else:
        known = facts_of_run(saved, facts, evaluations, title=repo_id.rpartition("/")[2])
        card = render_card(replace(known, license=known.license or license), repo_id)
    return card.with_license(license) if license else card


def _library(kind: str | None) -> str:
    """The library of a model class by its name, as adapters have nothing else; else transformers."""
    known = {name: tower.library for tower in TOWERS for name in tower.kinds} | {"VisionTransformerDistilled": "timm"}
    return known.get(str(kind), "transformers")


def _auto_class(architecture: str) -> str | None:
    # AutoBackbone accepts only configurations.
    if architecture == "adapter" or "Backbone" in architecture:
        return None
    places = model_class(architecture).config_class._auto_map
    return next((name for name, place in places.items() if place.endswith(f".{architecture}")), None)


def _task(architecture: str) -> str | None:
    tasks = {
        "ForImageClassification": "image-classification",
        "ForVideoClassification": "video-classification",
        "ForCausalLM": "text-generation",
        "RotaryCLIPModel": "zero-shot-image-classification",
    }
    return next((task for ending, task in tasks.items() if architecture.endswith(ending)), None)


def _eval_results(facts: Facts, result: Figure, task: str | None) -> Iterator[EvalResult]:
    data = result.data or facts.evaluated or UNKNOWN_DATA
    for metric, label in METRICS.items():
        if metric not in result.numbers:
            continue
        details: dict[str, Any] = {name: getattr(result, name) for name in ("image_size", "max_num_patches", "samples")}
        value, low, high = result.estimate(metric)
        if low != high:
            details |= {"low": low, "high": high, "confidence": 0.95}
        yield EvalResult(
            task_type=task or "other",
            dataset_type=data.hub_id or data.type or "custom",
            dataset_name=data.name,
            dataset_config=data.config,
            dataset_split=data.split,
            metric_type="accuracy" if metric.endswith("accuracy") else metric,
            metric_name=f"{label} at {result.inputs}",
            metric_value=value,
            metric_args={key: value for key, value in details.items() if value is not None},
        )


def _leaderboard_entries(facts: Facts) -> Iterator[EvalResultEntry]:
    """The accuracies of finished training on data of the Hub; their date is that of the commit."""
    for result in facts.results:
        data = result.data or facts.evaluated or UNKNOWN_DATA
        if data.hub_id and not facts.progress:
            samples = f"{result.samples} examples" if result.samples else None
            about = [f"top-1 accuracy at {result.inputs}", data.split, samples]
            notes, task = ", ".join(filter(None, about)), data.config or "default"
            yield EvalResultEntry(data.hub_id, task, result.numbers["accuracy"], notes=notes)


def _plot(facts: Facts, results: list[Figure]) -> bytes:
    """Accuracy against image height with intervals, and the paper's figures as open circles."""
    require_libraries("The plot of the card", "train", "matplotlib")
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(6, 3.8), layout="constrained")
    axes = picture.subplots()
    heights = [result.image_size[-2] for result in results]
    estimates = [result.estimate("accuracy") for result in results]
    values = [100 * value for value, _, _ in estimates]
    bounds = [[100 * abs(one[end] - one[0]) for one in estimates] for end in (1, 2)]
    axes.errorbar(heights, values, yerr=bounds, fmt="o-", color="#0072B2", capsize=3, label="this checkpoint, measured")
    axes.set_xticks(heights)
    if paper := sorted(facts.paper_figures, key=lambda one: one.image_size):
        values = [100 * one.numbers["accuracy"] for one in paper]
        label = f"the paper's model ({paper[0].where})"
        axes.plot([one.image_size[-2] for one in paper], values, "o", mfc="none", color="#777777", label=label)
    axes.set(xlabel="image size (px)", ylabel=f"top-1 accuracy on {(facts.evaluated or UNKNOWN_DATA).name} (%)")
    axes.legend(frameon=False)
    content = io.BytesIO()
    picture.savefig(content, dpi=150, metadata={"Software": None})
    return content.getvalue()
