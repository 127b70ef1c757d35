"""
A small engine that rotates queries and keys, in float32 of numpy, with faults that can be switched on. It shares
nothing with the package: it reads test vectors as other engines do, and computes from fields of a configuration.
"""

import dataclasses
import json
import math

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from hf_liere.tools.cli import main


@dataclasses.dataclass
class Engine:
    """
    Attributes:
        theta, head_dim, rotated: As in a configuration; `rotated` channels of a head turn.
        adjacent: Whether pairs of channels are adjacent; else they are halves of the rotated channels.
        yarn: Its fields, or `None`.
        axes: The axis of every plane; `None` means one axis.
        spectra: How often the spectrum is repeated, once for each axis.
        attention_factor: By which cos and sin are multiplied.
        offset, sign, ramp: Of positions, of sin, and whether the scaling is applied.
        round_frequencies, round_positions, round_phase: Types of torch that values are rounded to.
        skip: States that are not rotated.
    """

    theta: float = 10000.0
    head_dim: int = 16
    rotated: int = 16
    adjacent: bool = False
    yarn: dict | None = None
    axes: tuple[int, ...] | None = None
    spectra: int = 1
    attention_factor: float = 1.0
    counted: int | None = None
    offset: int = 0
    sign: int = 1
    round_frequencies: torch.dtype = torch.float32
    round_positions: torch.dtype = torch.float32
    round_phase: torch.dtype = torch.float32
    skip: tuple[str, ...] = ()

    def frequencies(self):
        """(planes,) float32."""
        count = self.rotated // 2 // self.spectra
        exponents = np.arange(count, dtype=np.float32) * 2 / np.float32(self.counted or 2 * count)
        plain = (1 / np.float32(self.theta) ** exponents).astype(np.float32)
        if self.yarn:
            length, factor = self.yarn["original_max_position_embeddings"], np.float32(self.yarn["factor"])
            # The index at which a wave has made 32 turns, or one turn, in the trained context.
            edges = [count * math.log(length / (2 * math.pi * turns)) / math.log(self.theta) for turns in (32, 1)]
            first, last = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), 2 * count - 1)
            ramp = np.clip((np.arange(count, dtype=np.float32) - first) / (last - first), 0, 1)
            plain = plain / factor * ramp + plain * (1 - ramp)
        return np.tile(plain, self.spectra).astype(np.float32)

    def angles(self, positions):
        """(N, A) → (N, planes) float32."""
        axes = self.axes or (0,) * (self.rotated // 2)
        positions = round_to(positions + self.offset, self.round_positions)[:, list(axes)]
        return round_to(positions * round_to(self.frequencies(), self.round_frequencies), self.round_phase)

    def run(self, positions, states):
        """All results by name."""
        angles = self.angles(positions)
        cos, sin = np.cos(angles) * self.attention_factor, self.sign * np.sin(angles) * self.attention_factor
        results = {}
        for name, state in states.items():
            result = state.astype(np.float32)
            if name not in self.skip:
                pairs = result[:, : self.rotated]
                first, second = (
                    (pairs[:, 0::2], pairs[:, 1::2]) if self.adjacent else np.split(pairs, 2, axis=1)
                )  # (N, planes) each
                turned = (first * cos - second * sin, first * sin + second * cos)
                result[:, : self.rotated] = (
                    np.stack(turned, -1).reshape(len(state), -1) if self.adjacent else np.concatenate(turned, 1)
                )
            results[f"rotated_{name}"] = result
        repeat = (lambda x: np.repeat(x, 2, axis=1)) if self.adjacent else (lambda x: np.concatenate([x, x], 1))
        return {"cos": repeat(cos).astype(np.float32), "sin": repeat(sin).astype(np.float32), **results}


def round_to(values, dtype):
    return torch.tensor(values, dtype=torch.float32).to(dtype).float().numpy()


def write_vectors(folder, configs):
    """By name of a configuration, the file of its test vectors, as the command writes them."""
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    assert main(["rope", *(str(folder / name) for name in configs), "--vectors", str(folder / "vectors")]) == 0
    return {name: folder / "vectors" / f"{name}.safetensors" for name in configs}


def answer(vectors, path, engines, names=None, dtype=torch.float32):
    """
    Write what engines compute for test vectors, beside the inputs of these.

    Args:
        engines: By name of a rotation.
        names: The results to write; `None` means all.
        dtype: To which they are rounded.
    """
    with safe_open(vectors, "np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    results = {"cos", "sin", "rotated_query", "rotated_key"}
    written = {name: value for name, value in tensors.items() if name.rpartition("/")[2] not in results}
    for rotation, engine in engines.items():
        states = {name: tensors[f"{rotation}/{name}"] for name in ("query", "key") if f"{rotation}/{name}" in tensors}
        for name, value in engine.run(tensors[f"{rotation}/positions"], states).items():
            if names is None or name in names:
                # safetensors writes arrays as they lie in memory, whatever their order.
                written[f"{rotation}/{name}"] = np.ascontiguousarray(round_to(value, dtype))
    save_file(written, path, metadata)
