"""Writes a finished run as the repository keeps it in training/checkpoints: weights, configuration, processor, records
and a card, without the modeling code, which is in hf_liere.

    python training/store_checkpoint.py outputs/arrows/liere8 training/checkpoints/arrows_liere8 \
        --evaluation outputs/arrows/liere8_at_168 --title "LieRE8 on the arrows puzzle" --made_by "make demo" \
        --intended_use "A small example; it answers the arrows puzzle and nothing else."
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_liere.hub.cards import render_card
from hf_liere.hub.checked_facts import RESULTS_FILE, facts_of_run
from hf_liere.storage.saved_model import SavedModel
from hf_liere.storage.targets import new_directory
from training.common.records import CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE, write_record


ROOT = Path(__file__).resolve().parents[1]
FILES = ("model.safetensors", "preprocessor_config.json", RESULTS_FILE, CONFIG_FILE, ENVIRONMENT_FILE, WEIGHTS_FILE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output of a training script")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument(
        "--evaluation", type=Path, nargs="+", default=[], metavar="FOLDER", help="evaluations at other image sizes"
    )
    parser.add_argument("--title", required=True, help="heading of the card")
    parser.add_argument("--made_by", required=True, metavar="COMMAND", help="the command of the run")
    parser.add_argument("--intended_use", required=True, help="what the model is for")
    given = parser.parse_args(arguments)
    try:
        print(store_checkpoint(given))
    # Facts that contradict the run's records, a run that is not finished, and folders that are not empty.
    except (ValueError, OSError) as error:
        parser.error(str(error))


def store_checkpoint(given: argparse.Namespace) -> Path:
    saved, place = SavedModel(given.run), given.target.resolve()
    place = (place.relative_to(ROOT) if place.is_relative_to(ROOT) else place).as_posix()
    facts = facts_of_run(saved, evaluations=given.evaluation, title=given.title)
    # Other work on the machine changes its speed.
    cost = {"parameters": facts.cost["parameters"]}
    notes = f"Made by `{given.made_by}`."
    facts = replace(facts, license="apache-2.0", notes=notes, intended_use=given.intended_use, cost=cost)
    with new_directory(given.target) as partial:
        for name in FILES:
            shutil.copyfile(saved.folder / name, partial / name)
        config = saved.configuration
        # auto_map would refer to missing code.
        config.pop("auto_map", None)
        write_record(partial, "config.json", config)
        render_card(facts, folder=place).write(partial)
    return given.target


if __name__ == "__main__":
    main()
