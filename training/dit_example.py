"""Trains a small DiT with LieRE on pictures of 32 px, and samples pictures of 32 and 64 px.

    python training/dit_example.py                                  # six minutes on one core
    python training/dit_example.py --steps 20 --evaluated 8         # whether everything runs

The model is a DiT (arXiv 2212.09748) in pixels without a table of positions, trained by rectified flow on generated
scenes of four classes. In training, positions move as in DINOv3: `--position_shift`, `--position_jitter` and
`--position_rescale`. `--output_dir` gets:

- samples.png: pictures of 32 px, and of 64 px with coordinates that continue those of training or fit into them
- losses.json: the losses of new scenes of 64 px

An interrupted run resumes when started again and gives the same weights.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from hf_liere import LieRotaryEmbedding, RotaryPatchConfig, grid_positions
from hf_liere.encoding.placement import draw_displacements
from training.common.records import write_text
from training.data.moving_shapes import SHAPES
from training.engine import flow
from training.engine.flow import LARGER_SIZE, PATCH, TRAINED_SIZE
from training.engine.runs import start


OUTPUT = Path(__file__).resolve().parents[1] / "outputs" / "dit"
WIDTH, DEPTH, HEADS = 128, 4, 4
SIDE = TRAINED_SIZE // PATCH
# Pictures of every class.
SAMPLES = 2


class Block(nn.Module):
    """Attention and MLP with scales, shifts and gates of the condition, which start at zero (adaLN-Zero)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = zeroed(nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor, rotate) -> torch.Tensor:
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        states = self.qkv(self.norm(x) * (1 + scale) + shift)
        query, key, value = states.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, 32)
        query, key = rotate(query, key)
        x = x + gate * self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


def zeroed(layer: nn.Linear) -> nn.Linear:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class DiT(nn.Module):
    """
    Estimates noise − picture.

    Args:
        displacements: `position_shift`, `position_jitter` and `position_rescale` of training.

    Attributes:
        train_grid: Patches per axis to which coordinates refer: those of training, or `None` if every picture has the
            same extent.
    """

    def __init__(self, **displacements: float):
        super().__init__()
        self.patches, self.classes = nn.Linear(3 * PATCH**2, WIDTH), nn.Embedding(len(SHAPES), WIDTH)
        self.level = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.out = nn.LayerNorm(WIDTH), zeroed(nn.Linear(WIDTH, 3 * PATCH**2))
        self.rotary = LieRotaryEmbedding(HEADS, WIDTH // HEADS, num_axes=2, num_layers=DEPTH)
        self.displacements = RotaryPatchConfig(**displacements)
        self.train_grid: tuple[int, int] | None = (SIDE, SIDE)

    def forward(self, noisy: torch.Tensor, labels: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """(B, N, 48) noisy patches, (B,) labels and (B,) levels → (B, N, 48)."""
        side = round(noisy.shape[1] ** 0.5)
        positions = grid_positions((side, side), "centred_grid", train_grid=self.train_grid, device=noisy.device)
        if self.training:
            _, offsets = draw_displacements(self.displacements, (side, side), None, noisy.device)  # (N, 2)
            positions = positions if offsets is None else positions.moved(offsets)
        rotations = self.rotary.rotations(positions, dtype=noisy.dtype)
        frequencies = torch.logspace(0, -4, WIDTH // 2, device=noisy.device)
        angles = 1_000 * levels[:, None] * frequencies  # (B, 64)
        condition = self.level(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(labels)
        x = self.patches(noisy)
        for layer, block in enumerate(self.blocks):
            x = block(x, condition, partial(self.rotary, positions=rotations, layer=layer))
        return self.out(self.norm(x))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, samples and measures; returns the mean loss at 64 px for both kinds of coordinates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="of training at 32 px (1500)")
    parser.add_argument("--sampling_steps", type=int, default=30, help="of the sampler (30)")
    parser.add_argument("--evaluated", type=int, default=64, help="new scenes whose loss is measured (64)")
    parser.add_argument("--position_shift", type=float, default=0.0, help="largest shift, in halves of the picture (0)")
    parser.add_argument("--position_jitter", type=float, help="largest factor of an axis (none)")
    parser.add_argument("--position_rescale", type=float, default=2.0, help="largest factor of both axes (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    folder, seed = options.output_dir, options.seed
    moved = {name: value for name, value in vars(options).items() if name.startswith("position_")}
    flow.claim(folder, {"steps": options.steps, "seed": seed, **moved})

    torch.manual_seed(seed)
    model = DiT(**moved)
    flow.train(model, folder / "training.pt", options.steps, seed)
    model.eval()
    labels, drawn = torch.arange(len(SHAPES)).repeat_interleave(SAMPLES), (options.sampling_steps, seed)
    rows = {f"as trained, {TRAINED_SIZE} px": flow.sample(model, labels, TRAINED_SIZE, *drawn)}
    losses = {}
    for name, model.train_grid in (("continued", (SIDE, SIDE)), ("fitted", None)):
        rows[f"{name}, {LARGER_SIZE} px"] = flow.sample(model, labels, LARGER_SIZE, *drawn)
        values = flow.measure(model, LARGER_SIZE, options.evaluated, seed)
        losses[name] = sum(values) / len(values)
    flow.draw_samples(rows, folder / "samples.png")
    write_text(folder / "losses.json", json.dumps(losses, indent=2) + "\n")
    print(f"Loss of new scenes at {LARGER_SIZE} px:")
    print(*(f"  {name:<12}{loss:.4f}" for name, loss in losses.items()), sep="\n")
    return losses


if __name__ == "__main__":
    start(main)
