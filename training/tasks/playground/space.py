"""A Hugging Face Space of training/app.py: the required code, checkpoints, requirements and a card."""

import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path

from huggingface_hub import SpaceCardData
from packaging.requirements import Requirement

from hf_liere.storage.targets import new_directory
from training.tasks.playground.predictions import ROOT, Checkpoint


# Files of training/ that app.py imports or shows. The package hf_liere is copied completely.
FILES = (
    "__init__.py",
    "app.py",
    "common/tasks.py",
    "data/arrows.py",
    "evidence/figures/rocket.jpg",
    "tasks/playground/page.py",
    "tasks/playground/pictures.py",
    "tasks/playground/predictions.py",
)
CHECKPOINT_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "model*.safetensors*")
# Installed through the card's sdk_version.
SDK = "gradio"

START = '''"""Starts the app with the checkpoints of this Space."""

import os
from pathlib import Path

from training.app import main


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    main(["--checkpoints", *{checkpoints}])
'''
CARD = """---
{data}
---

# Where does it look?

Vision transformers with learned position encodings (LieRE, ComRoPE, RoPE-Mixed) side by side: what they predict, how
sure they are and where they look, on arrows puzzles (LieRE §5.2) or an image of yours, at any resolution.

| model | position encoding | trained at |
|---|---|---:|
{models}

Everything runs on the CPU. Images are deleted within twenty minutes of their upload. Predictions are for looking at,
not for deciding on.

[LieRE](https://arxiv.org/abs/2406.10322) · [ComRoPE](https://arxiv.org/abs/2506.03737) ·
[RoPE-ViT](https://arxiv.org/abs/2403.13298)
"""


def write_space(folder: Path, checkpoints: Sequence[Checkpoint]) -> str:
    """
    Writes a Space that runs without this repository. Checkpoints in folders are copied; the Space downloads those of
    the Hub when it starts.

    Args:
        folder: A new or empty folder. It is written completely or not at all.

    Returns:
        A message with the next steps.

    Raises:
        FileExistsError: if the folder is not empty.
        InputError: if nothing can be written beside it.
    """
    with new_directory(folder) as partial:
        sources = [checkpoint.repo_id or _copy_checkpoint(checkpoint, partial) for checkpoint in checkpoints]
        for path in (ROOT / "hf_liere").rglob("*.py"):
            _copy(path, partial / path.relative_to(ROOT))
        for file in FILES:
            _copy(ROOT / "training" / file, partial / "training" / file)
        _copy(ROOT / "LICENSE", partial / "LICENSE")
        (partial / "app.py").write_text(START.format(checkpoints=sources), encoding="utf-8")
        (partial / "requirements.txt").write_text(_requirements(), encoding="utf-8")
        (partial / "README.md").write_text(_card(checkpoints), encoding="utf-8")
    return (
        f"{folder} is a Space: try it with `python {folder}/app.py`, push it with "
        f"`hf upload me/name {folder} --repo-type space`."
    )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _copy_checkpoint(checkpoint: Checkpoint, folder: Path) -> str:
    # Folder names of sweeps contain characters that some file systems refuse.
    place = Path("checkpoints") / re.sub(r"[^\w.-]+", "-", checkpoint.name)
    for pattern in CHECKPOINT_FILES:
        for path in checkpoint.folder.glob(pattern):
            _copy(path, folder / place / path.name)
    return place.as_posix()


def _requirements() -> str:
    """What the package and its extra `app` require, in the versions that are installed here."""
    needed = [Requirement(line) for line in requires("hf-liere") or []]
    names = {each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": "app"})}
    # Package indexes lack local versions such as torch's +cpu builds.
    return "".join(f"{name}=={version(name).partition('+')[0]}\n" for name in sorted(names - {SDK}))


def _card(checkpoints: Sequence[Checkpoint]) -> str:
    data = SpaceCardData(
        title="Where does it look?",
        emoji="🧭",
        colorFrom="indigo",
        colorTo="green",
        sdk=SDK,
        sdk_version=version(SDK),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        license="apache-2.0",
        short_description="Learned position encodings, side by side",
        models=[checkpoint.repo_id for checkpoint in checkpoints if checkpoint.repo_id] or None,
        tags=["position-encoding", "vision-transformer", "attention"],
    )
    rows = [f"| {each.name} | {each.encoding} | {each.image_size} px |" for each in checkpoints]
    return CARD.format(data=data.to_yaml(), models="\n".join(rows))
