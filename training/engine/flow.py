"""Rectified flow (arXiv 2209.03003) on generated scenes: training, samples and losses of small diffusion transformers.

A model is a module that is called with (B, N, 48) noisy patches, (B,) labels and (B,) noise levels, and estimates
noise − picture for x_t = (1 − t) picture + t noise.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from tqdm.auto import tqdm

from hf_liere.errors import InputError
from training.common.records import write_text
from training.data.scenes import scene


TRAINED_SIZE, LARGER_SIZE, PATCH = 32, 64, 4
# Of a step at the size of training, and at the larger one.
BATCH, TUNING_BATCH = 32, 8
WARMUP, SAVE_EVERY = 100, 250
# Noise levels of the losses.
LEVELS = torch.linspace(0.1, 0.9, 9)
Scenes = Callable[[int], Iterable[int]]


def following(step: int) -> range:
    """The scenes of a batch of training, none of which comes twice."""
    return range(step * BATCH, (step + 1) * BATCH)


def batch(split: str, indices: Iterable[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, N, 48) patches of scenes, and their labels (B,)."""
    pictures, labels = zip(*(scene(split, index, size) for index in indices))
    return to_tokens(torch.from_numpy(np.stack(pictures))), torch.tensor(labels)


def to_tokens(pictures: torch.Tensor) -> torch.Tensor:
    """(B, size, size, 3) → (B, N, 48): the patches row by row."""
    parts = pictures.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))  # (B, rows, 4, columns, 4, 3)
    return parts.transpose(2, 3).flatten(3).flatten(1, 2)


def to_pictures(tokens: torch.Tensor, size: int) -> np.ndarray:
    """(B, N, 48) → (B, size, size, 3) of uint8."""
    side = size // PATCH
    parts = tokens.unflatten(2, (PATCH, PATCH, 3)).unflatten(1, (side, side)).transpose(2, 3)
    pictures = parts.flatten(3, 4).flatten(1, 2)
    return ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().numpy()


def flow_loss(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of the velocity: the loss of rectified flow."""
    mixed = torch.lerp(tokens, noise, levels.view(-1, 1, 1))
    return (model(mixed, labels, levels) - (noise - tokens)).square().mean()


def train(
    model: nn.Module,
    file: Path,
    steps: int,
    seed: int,
    scenes: Scenes = following,
    size: int = TRAINED_SIZE,
    rate: float = 2e-3,
) -> None:
    """
    Trains the parameters that need a gradient, from the last step that `file` contains.

    Every step draws from its number alone, so that an interrupted run gives the same weights.

    Args:
        scenes: (step) → the scenes of its batch.
        rate: learning rate after the warm-up, from which it falls to 0 in a line.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    first = 0
    if file.is_file():
        state = torch.load(file, weights_only=True)
        first = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for parameter, value in zip(trained, state["parameters"], strict=True):
                parameter.copy_(value)
    bar = tqdm(range(first, steps), desc=f"{size} px", initial=first, total=steps, mininterval=1, disable=None)
    for step in bar:
        torch.manual_seed(1_000_000 * seed + step)
        tokens, labels = batch("train", scenes(step), size)
        # More of the middle levels, where most is decided (arXiv 2403.03206, §3.1).
        levels = torch.randn(len(tokens)).sigmoid()
        loss = flow_loss(model, tokens, labels, levels, torch.randn(tokens.shape))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARMUP, 1 - step / steps)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            partial = file.with_suffix(".partial")
            torch.save({"step": step + 1, "optimizer": optimizer.state_dict(), "parameters": trained}, partial)
            partial.replace(file)


@torch.no_grad()
def sample(model: nn.Module, labels: torch.Tensor, size: int, steps: int, seed: int) -> np.ndarray:
    """
    Pictures of these classes, from noise by Euler's method.

    Noise levels follow the size as in arXiv 2403.03206, equation 23: noise hides less of larger pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(len(labels), (size // PATCH) ** 2, 3 * PATCH**2, generator=generator)
    shift = size / TRAINED_SIZE
    even = torch.linspace(1, 0, steps + 1)
    levels = shift * even / (1 + (shift - 1) * even)
    for level, following in zip(levels, levels[1:]):
        tokens = tokens + (following - level) * model(tokens, labels, level.expand(len(labels)))
    return to_pictures(tokens, size)


@torch.no_grad()
def measure(model: nn.Module, size: int, count: int, seed: int) -> list[float]:
    """The loss of `count` new scenes at every noise level, with the same noise for every model."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.zeros(len(LEVELS))
    for first in range(0, count, TUNING_BATCH):
        tokens, labels = batch("validation", range(first, min(first + TUNING_BATCH, count)), size)
        for number, level in enumerate(LEVELS):
            noise = torch.randn(tokens.shape, generator=generator)
            losses[number] += len(tokens) / count * flow_loss(model, tokens, labels, level.expand(len(tokens)), noise)
    return losses.tolist()


def draw_samples(rows: dict[str, np.ndarray], file: Path) -> None:
    """One labelled row of pictures for every entry."""
    margin, label_width, height = 4, 170, LARGER_SIZE + 4
    columns = max(len(pictures) for pictures in rows.values())
    canvas = Image.new("RGB", (label_width + columns * height, margin + len(rows) * height), "white")
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=13)
    for row, (label, pictures) in enumerate(rows.items()):
        top = margin + row * height
        pen.text((margin, top + LARGER_SIZE // 2), label, fill="black", font=font, anchor="lm")
        for column, pixels in enumerate(pictures):
            # Smaller pictures keep their scale.
            left, inset = label_width + column * height, (LARGER_SIZE - len(pixels)) // 2
            canvas.paste(Image.fromarray(pixels), (left + inset, top + inset))
    # Colours by index make the file a third as large.
    canvas.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Raises [`InputError`] if the folder contains a run with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if file.is_file() and (found := json.loads(file.read_text(encoding="utf-8"))) != settings:
        raise InputError(f"{folder} contains a run with {found}, not {settings}; accepted: another --output_dir.")
    write_text(file, json.dumps(settings) + "\n")
