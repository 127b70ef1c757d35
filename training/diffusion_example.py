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
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers import FluxTransformer2DModel
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
from training.common.records import write_text
from training.data.moving_shapes import SHAPES
from training.engine import flow
from training.engine.flow import LARGER_SIZE, PATCH, TRAINED_SIZE, TUNING_BATCH
from training.engine.runs import start


OUTPUT = Path(__file__).resolve().parents[1] / "outputs" / "diffusion"
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
# The learning rate at the start, and scenes of 64 px.
TUNING_RATE, TUNING_SCENES = 2e-2, 64
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
# Pictures of every class.
SAMPLES = 2


class SceneFlux(nn.Module):
    """A transformer that is called as [`flow`] calls a model: the class of a scene takes the place of a prompt."""

    def __init__(self, transformer: FluxTransformer2DModel):
        super().__init__()
        self.transformer = transformer

    def forward(self, noisy: torch.Tensor, labels: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        side = round(noisy.shape[1] ** 0.5)
        image_ids = torch.zeros(side, side, 3)
        image_ids[..., 1] = torch.arange(side)[:, None]
        image_ids[..., 2] = torch.arange(side)
        classes = nn.functional.one_hot(labels, len(SHAPES)).float()  # (B, 4)
        return self.transformer(
            hidden_states=noisy,
            encoder_hidden_states=classes.unsqueeze(1),
            pooled_projections=classes,
            timestep=levels,
            img_ids=image_ids.flatten(0, 1),
            txt_ids=torch.zeros(1, 3),
        ).sample


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
    flow.claim(folder, {"steps": options.steps, "tuning_steps": options.tuning_steps, "seed": seed})

    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**MODEL)
    scenes = SceneFlux(model)
    flow.train(scenes, folder / "training.pt", options.steps, seed)
    model.save_pretrained(folder / "transformer")

    patch(model.requires_grad_(False), FREQUENCIES)
    for _, parameter in rotary_parameters(model):
        parameter.requires_grad_()
    few = lambda step: [i % TUNING_SCENES for i in range(step * TUNING_BATCH, (step + 1) * TUNING_BATCH)]  # noqa: E731
    tuned = folder / "tuning.pt"
    flow.train(scenes, tuned, options.tuning_steps, seed, few, LARGER_SIZE, TUNING_RATE)
    save_rotary(model, folder / "frequencies", overwrite=True)

    labels = torch.arange(len(SHAPES)).repeat_interleave(SAMPLES)
    patch(unpatch(model), FREQUENCIES)
    drawn = (options.sampling_steps, seed)
    rows = {f"as trained, {TRAINED_SIZE} px": flow.sample(scenes, labels, TRAINED_SIZE, *drawn)}
    losses = {}
    for name, schedule in tqdm(VARIANTS.items(), desc="samples and losses", disable=None):
        if name == LEARNED:
            load_rotary(model, folder / "frequencies")
        set_frequency_schedule(model, schedule)
        rows[name] = flow.sample(scenes, labels, LARGER_SIZE, *drawn)
        losses[name] = flow.measure(scenes, LARGER_SIZE, options.evaluated, seed)
    flow.draw_samples(rows, folder / "samples.png")
    levels = [round(level, 6) for level in flow.LEVELS.tolist()]
    measured = {"noise_levels": levels, "losses": losses}
    write_text(folder / "losses.json", json.dumps(measured, indent=2) + "\n")
    means = {name: sum(values) / len(values) for name, values in losses.items()}
    print(f"Loss of new scenes at {LARGER_SIZE} px:")
    print(*(f"  {name:<24}{mean:.4f}" for name, mean in means.items()), sep="\n")
    return means


if __name__ == "__main__":
    start(main)
