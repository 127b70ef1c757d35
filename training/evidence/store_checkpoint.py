"""Writes a finished run as the repository keeps it in training/checkpoints: weights, configuration, processor, records
and a card, without the modeling code, which is in hf_liere.

    python training/evidence/store_checkpoint.py outputs/arrows/liere8 training/checkpoints/arrows_liere8 \
        --evaluation outputs/arrows/liere8_at_168 --title "LieRE8 on the arrows puzzle" --made_by "make demo" \
        --intended_use "A small example; it answers the arrows puzzle and nothing else."

`--weights` stores a copy in half precision instead. It is written by `from_pretrained(run, dtype=torch.float16)` and
`save_pretrained`, and evaluated like any checkpoint; its evaluation at the trained size is the first of `--evaluation`:

    python training/evidence/store_checkpoint.py outputs/run STORED --weights outputs/half \
        --evaluation outputs/half_at_32 outputs/half_at_48 --conditions outputs/half_shuffled \
        --attention cat.png dog.png --title "Cats and dogs" --made_by COMMAND \
        --intended_use "Small pictures of cats and dogs."
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_liere.errors import InputError
from hf_liere.storage.saved_model import CONFIG, WEIGHTS, SavedModel
from hf_liere.storage.targets import new_directory
from hf_liere.tools.hub.cards import render_card
from hf_liere.tools.hub.checked_facts import RESULTS_FILE, Run, facts_of_run
from hf_liere.tools.hub.facts import METRICS, Data, Facts
from hf_liere.tools.inspection.prediction import predict
from training.common.folders import CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE
from training.common.records import write_record


ROOT = Path(__file__).resolve().parents[2]
FILES = (WEIGHTS, "preprocessor_config.json", RESULTS_FILE, CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE)
ATTENTION = "attention.png"
# The section of the card that follows those of the measurements.
NEXT_SECTION = "## Model and training"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output of a training script")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="a copy of the model in half precision")
    for name, what in (
        ("--evaluation", "evaluations at other image sizes; with --weights, first at the trained size"),
        ("--conditions", "evaluations with --evaluation_shuffle or --evaluation_offset"),
    ):
        parser.add_argument(name, type=Path, nargs="+", default=[], metavar="FOLDER", help=what)
    parser.add_argument("--attention", nargs="+", default=[], metavar="IMAGE", help="images for a picture of attention")
    parser.add_argument("--attention_of", metavar="SENTENCE", help="which images these are")
    parser.add_argument(
        "--data", nargs=3, metavar=("NAME", "DESCRIPTION", "TERMS"), help="what the data files contain, and its licence"
    )
    parser.add_argument("--title", required=True, help="heading of the card")
    parser.add_argument("--made_by", required=True, metavar="COMMAND", help="the command of the run")
    parser.add_argument("--intended_use", required=True, help="what the model is for")
    parser.add_argument("--limits", help="what it is not for; without it, what all cards say")
    given = parser.parse_args(arguments)
    try:
        print(store_checkpoint(given))
    # Facts that contradict the run's records, a run that is not finished, and folders that are not empty.
    except (ValueError, OSError) as error:
        parser.error(str(error))


def store_checkpoint(given: argparse.Namespace) -> Path:
    place = given.target.resolve()
    place = (place.relative_to(ROOT) if place.is_relative_to(ROOT) else place).as_posix()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) if given.weights else given.run
        if given.weights:
            _put_together(given, folder)
        saved = SavedModel(folder)
        facts = facts_of_run(saved, evaluations=given.evaluation[bool(given.weights) :], title=given.title)
        notes = f"Made by `{given.made_by}`."
        if given.weights:
            notes += " Its weights are stored in half precision and load in float32, in which they were evaluated."
        # Other work on the machine changes its speed.
        cost = {"parameters": facts.cost["parameters"]}
        facts = replace(facts, license="apache-2.0", notes=notes, cost=cost)
        facts = replace(facts, intended_use=given.intended_use, limits=given.limits)
        if given.data:
            facts = _name_data(facts, dict(zip(("name", "description", "terms"), given.data)))
        added = _conditions(given.conditions, saved, facts)
        partial = stack.enter_context(new_directory(given.target))
        for name in FILES:
            shutil.copyfile(saved.folder / name, partial / name)
        config = saved.configuration
        # auto_map would refer to missing code.
        config.pop("auto_map", None)
        write_record(partial, CONFIG, config)
        if given.attention:
            predict(partial, given.attention, attention=partial / ATTENTION)
            added += _where_it_looks(given.attention, given.attention_of)
        card = render_card(facts, folder=place)
        replace(card, text=card.text.replace(NEXT_SECTION, added + NEXT_SECTION)).write(partial)
    return given.target


def _put_together(given: argparse.Namespace, folder: Path) -> None:
    """
    Writes the run as if it had saved, and evaluated, the copy in half precision.

    Raises:
        InputError: if the copy is of another model, or was not evaluated at the trained size.
    """
    trained, copied = (load_file(source / WEIGHTS) for source in (given.run, given.weights))
    differing = trained.keys() ^ copied.keys() or {
        name for name, value in trained.items() if not torch.equal(value.to(copied[name].dtype), copied[name])
    }
    if differing:
        raise InputError(
            f"--weights {given.weights} is not a rounded copy of {given.run}: {', '.join(sorted(differing))}."
        )
    sizes = [run.read_json(CONFIG_FILE)["image_size"] for run in map(SavedModel, (given.run, *given.evaluation[:1]))]
    if len(sizes) == 1 or sizes[0] != sizes[1]:
        raise InputError(
            f"--evaluation {' '.join(map(str, given.evaluation))}: with --weights, the first must be at {sizes[0]} px."
        )
    for file in filter(Path.is_file, given.run.iterdir()):
        shutil.copyfile(file, folder / file.name)
    shutil.copyfile(given.weights / WEIGHTS, folder / WEIGHTS)
    for name in (RESULTS_FILE, WEIGHTS_FILE):
        shutil.copyfile(given.evaluation[0] / name, folder / name)
    # from_pretrained loads what this field says, and computing in half precision is slow on CPUs.
    write_record(folder, CONFIG, SavedModel(given.weights).configuration | {"dtype": "float32"})


def _name_data(facts: Facts, data: Mapping[str, str]) -> Facts:
    """Says what the files of the records contain."""

    def named(one: Data | None) -> Data | None:
        return one and replace(one, **data)

    results = [replace(result, data=named(result.data)) for result in facts.results]
    sets = {name: named(getattr(facts, name)) for name in ("training_data", "evaluation_data")}
    return replace(facts, results=results, **sets)


def _conditions(folders: list[Path], saved: SavedModel, facts: Facts) -> str:
    """A table of evaluations under changed conditions. Raises [`InputError`] for those of other weights or of none."""
    metrics = {name: METRICS[name] for name in ("accuracy", "top5_accuracy") if name in facts.results[0].numbers}
    rows = [
        f"| condition | image size (px) | images | {' | '.join(metrics.values())} |",
        f"|---|---:|---:|{'---:|' * len(metrics)}",
    ]
    for place in map(SavedModel, folders):
        condition, measured = Run.of(place).condition, place.read_json(RESULTS_FILE)
        shuffle, offset = (condition.get(f"evaluation_{name}") for name in ("shuffle", "offset"))
        if place.read_json(WEIGHTS_FILE).get("sha256") != saved.digest:
            raise InputError(f"--conditions {place} was measured with other weights than the stored ones.")
        changes = [f"{shuffle} of each image shuffled"] if shuffle not in (None, "none") else []
        changes += [f"coordinates shifted, ρ = {offset:g}, draw {condition['evaluation_seed']}"] if offset else []
        if not changes:
            raise InputError(f"--conditions {place} evaluates unchanged images; accepted by --evaluation.")
        size = place.read_json(CONFIG_FILE)["image_size"][-1]
        shown = " | ".join(_interval(measured, f"eval_{name}") for name in metrics)
        rows.append(f"| {', '.join(changes)} | {size} | {measured['eval_samples']:,} | {shown} |")
    about = (
        "Patches are shuffled before they get positions. Shifts add one draw from N(0, ρ²) per axis to the coordinates "
        "of all images; 1 is the extent of a training image. The intervals do not cover other draws."
    )
    return "\n".join(["### With changed positions", "", about, "", *rows, "", ""]) if folders else ""


def _interval(measured: Mapping[str, Any], name: str) -> str:
    value, low, high = (measured[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.1%} ({low:.1%} – {high:.1%})"


def _where_it_looks(files: list[str], which: str | None) -> str:
    names = ", ".join(Path(file).stem.replace("_", " ") for file in files)
    about = (
        "Attention of each layer, with the most probable class and its probability, as `hf-liere predict --attention` "
        "draws it: each map is scaled from its minimum to its maximum."
    )
    about += f" {which}" if which else ""
    return f"## Where it looks\n\n{about}\n\n![Attention of each layer for images of {names}]({ATTENTION})\n\n"


if __name__ == "__main__":
    main()
