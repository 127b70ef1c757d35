"""Trains a small FLUX on pictures of 32 px, and samples pictures of 64 px with schedules and learned frequencies.

    python training/diffusion_example.py                                  # a quarter of an hour on one core
    python training/diffusion_example.py --steps 40 --tuning_steps 10 --evaluated 8     # whether everything runs

The model is a `FluxTransformer2DModel` of diffusers in pixels, trained by rectified flow (arXiv 2209.03003) on
generated scenes of four classes. Then its weights are frozen, and one factor for every frequency and layer is trained
on 64 scenes of 64 px. `--output_dir` gets:

- transformer, frequencies: the trained model, and the learned rotations
- samples.png: pictures of 64 px by every schedule and by the learned frequencies
- losses.json: losses of new scenes of 64 px by noise level

An interrupted run resumes when started again and gives the same weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from tqdm.auto import tqdm

from hf_liere import (
    FrequencySchedule,
    RotaryPatchConfig,
    load_rotary,
    patch,
    rotary_parameters,
    save_rotary,
    set_frequency_schedule,
    unpatch,
)
from hf_liere.errors import InputError
from training.common.records import write_text
from training.data.moving_shapes import SHAPES
from training.data.scenes import scene
from training.engine.runs import start


OUTPUT = Path(__file__).resolve().parents[1] / "outputs" / "diffusion"
TRAINED_SIZE, LARGER_SIZE, PATCH = 32, 64, 4
MODEL = {
    "in_channels": 3 * PATCH**2,
    "num_layers": 1,
    "num_single_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "axes_dims_rope": (4, 14, 14),
    # The class takes the place of a prompt of one token.
    "joint_attention_dim": len(SHAPES),
    "pooled_projection_dim": len(SHAPES),
}
FREQUENCIES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
# Batches, learning rates at the start, and scenes of 64 px.
BATCH, LEARNING_RATE, WARMUP = 32, 2e-3, 100
TUNING_BATCH, TUNING_RATE, TUNING_SCENES = 8, 2e-2, 64
SAVE_EVERY = 250
SIDE = TRAINED_SIZE // PATCH
TRAINED = (None, SIDE, SIDE)
# DyPE as its paper sets it. A plane of this model turns at most 1.3 times over a picture of the trained size, so YaRN
# keeps those of a full turn and more.
DYPE, RAMP = (2.0, 2.0), (0.25, 1.0)
LEARNED = "learned frequencies"
VARIANTS: dict[str, FrequencySchedule | None] = {
    "as trained": None,
    "position interpolation": FrequencySchedule("position_interpolation", TRAINED),
    "NTK": FrequencySchedule("ntk", TRAINED),
    "YaRN": FrequencySchedule("yarn", TRAINED, ramp=RAMP),
    "interpolation, DyPE": FrequencySchedule("position_interpolation", TRAINED, dype=DYPE),
    "NTK, DyPE": FrequencySchedule("ntk", TRAINED, dype=DYPE),
    LEARNED: None,
}
# Pictures of every class; noise levels of the losses.
SAMPLES = 2
LEVELS = torch.linspace(0.1, 0.9, 9)
Scenes = Callable[[int], Iterable[int]]


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


def velocity(model: nn.Module, noisy: torch.Tensor, labels: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """(B, N, 48): the model's estimate of noise − picture for x_t = (1 − t) picture + t noise, at levels t (B,)."""
    side = round(noisy.shape[1] ** 0.5)
    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1] = torch.arange(side)[:, None]
    image_ids[..., 2] = torch.arange(side)
    classes = nn.functional.one_hot(labels, len(SHAPES)).float()  # (B, 4)
    return model(
        hidden_states=noisy,
        encoder_hidden_states=classes.unsqueeze(1),
        pooled_projections=classes,
        timestep=levels,
        img_ids=image_ids.flatten(0, 1),
        txt_ids=torch.zeros(1, 3),
    ).sample


def flow_loss(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Mean squared error of the velocity: the loss of rectified flow."""
    mixed = torch.lerp(tokens, noise, levels.view(-1, 1, 1))
    return (velocity(model, mixed, labels, levels) - (noise - tokens)).square().mean()


def train(model: nn.Module, file: Path, scenes: Scenes, size: int, steps: int, rate: float, seed: int) -> None:
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
        generator = torch.Generator().manual_seed(1_000_000 * seed + step)
        tokens, labels = batch("train", scenes(step), size)
        # More of the middle levels, where most is decided (arXiv 2403.03206, §3.1).
        levels = torch.randn(len(tokens), generator=generator).sigmoid()
        loss = flow_loss(model, tokens, labels, levels, torch.randn(tokens.shape, generator=generator))
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
        tokens = tokens + (following - level) * velocity(model, tokens, labels, level.expand(len(labels)))
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


def claim(folder: Path, settings: dict[str, int]) -> None:
    """Raises [`InputError`] if the folder contains a run with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if file.is_file() and (found := json.loads(file.read_text(encoding="utf-8"))) != settings:
        raise InputError(f"{folder} contains a run with {found}, not {settings}; accepted: another --output_dir.")
    write_text(file, json.dumps(settings) + "\n")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, samples and measures; returns the mean loss of every variant at the larger size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="of training at 32 px (1500)")
    parser.add_argument("--tuning_steps", type=int, default=200, help="of learning frequencies at 64 px (200)")
    parser.add_argument("--sampling_steps", type=int, default=30, help="of the sampler (30)")
    parser.add_argument("--evaluated", type=int, default=64, help="new scenes whose loss is measured (64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    folder, seed = options.output_dir, options.seed
    claim(folder, {"steps": options.steps, "tuning_steps": options.tuning_steps, "seed": seed})

    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**MODEL)
    scenes = lambda step: range(step * BATCH, (step + 1) * BATCH)  # noqa: E731
    train(model, folder / "training.pt", scenes, TRAINED_SIZE, options.steps, LEARNING_RATE, seed)
    model.save_pretrained(folder / "transformer")

    patch(model.requires_grad_(False), FREQUENCIES)
    for _, parameter in rotary_parameters(model):
        parameter.requires_grad_()
    few = lambda step: [i % TUNING_SCENES for i in range(step * TUNING_BATCH, (step + 1) * TUNING_BATCH)]  # noqa: E731
    train(model, folder / "tuning.pt", few, LARGER_SIZE, options.tuning_steps, TUNING_RATE, seed)
    save_rotary(model, folder / "frequencies", overwrite=True)

    labels = torch.arange(len(SHAPES)).repeat_interleave(SAMPLES)
    patch(unpatch(model), FREQUENCIES)
    drawn = (options.sampling_steps, seed)
    rows = {f"as trained, {TRAINED_SIZE} px": sample(model, labels, TRAINED_SIZE, *drawn)}
    losses = {}
    for name, schedule in tqdm(VARIANTS.items(), desc="samples and losses", disable=None):
        if name == LEARNED:
            load_rotary(model, folder / "frequencies")
        set_frequency_schedule(model, schedule)
        rows[name] = sample(model, labels, LARGER_SIZE, *drawn)
        losses[name] = measure(model, LARGER_SIZE, options.evaluated, seed)
    draw_samples(rows, folder / "samples.png")
    levels = [round(level, 6) for level in LEVELS.tolist()]
    measured = {"noise_levels": levels, "losses": losses}
    write_text(folder / "losses.json", json.dumps(measured, indent=2) + "\n")
    means = {name: sum(values) / len(values) for name, values in losses.items()}
    print(f"Loss of new scenes at {LARGER_SIZE} px:")
    print(*(f"  {name:<24}{mean:.4f}" for name, mean in means.items()), sep="\n")
    return means


if __name__ == "__main__":
    start(main)
