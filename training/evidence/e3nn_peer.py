"""Trains an equivariant network of e3nn on the tasks on real structures.

It has the flags, data, batches, schedule and results of `token_classification.py`, and the message passing of e3nn's
own models (`e3nn.nn.models.v2106`) between all tokens of a sample, with the axes of their frames as vectors. Flags of
other models are ignored. By default it has about as many parameters as the models of the sweeps. e3nn's own 50
channels, degree 2 and three layers are `--channels 50 --degree 2 --layers 3`. Sweeps name it as the `script` of a
model, and 0.01 is the learning rate of e3nn's examples:

    pip install e3nn
    python training/evidence/e3nn_peer.py training/evidence/recipes/proteins_mini.yaml --structures DSSP \
        --max_radius 2 --learning_rate 1e-2 --output_dir outputs/e3nn
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import PreTrainedConfig

from hf_liere.errors import InputError
from training.common.arguments import RunArguments, TokensModelArguments, flag, require_numbers
from training.data.tokens import TokenDataArguments
from training.engine.claims import giving_back
from training.engine.runs import start
from training.evidence.peers.training import PeerModel, train_peer


# Sweeps look for these packages before they train any model.
REQUIRES = ("e3nn",)
# Functions of distances and neurons that make weights of them, as in e3nn's own models.
DISTANCES, NEURONS = 10, 100


@dataclass
class PeerArguments:
    channels: int = flag(16, "Channels of each degree and parity.")
    degree: int = flag(1, "Largest degree of hidden features and of spherical harmonics.")
    layers: int = flag(2, "Layers of message passing.")
    max_radius: float = flag(3.0, "Distance at which messages end, in the unit of the translations.")

    def __post_init__(self):
        require_numbers(self, "channels", "layers", lowest=1)
        require_numbers(self, "degree", "max_radius")


ARGUMENT_CLASSES = (TokensModelArguments, TokenDataArguments, PeerArguments, RunArguments)


class EquivariantNetwork(PeerModel):
    """
    Classifies samples of tokens by the mean over these.

    Args:
        config: a configuration with the fields of [`PeerArguments`], `feature_size`, `tokens` and `num_labels`.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        try:
            from e3nn import math, o3
            from e3nn.nn.models.v2106.gate_points_message_passing import MessagePassing
        except ImportError as error:
            raise InputError(f"{error}; accepted: pip install e3nn.") from error
        self.math, self.o3 = math, o3
        hidden = [(config.channels, (degree, parity)) for degree in range(config.degree + 1) for parity in (-1, 1)]
        # In mirror images, frames keep x and y as vectors, and z is their cross product.
        given = f"{config.feature_size}x0e + 2x1o + 1x1e"
        self.network = MessagePassing(
            irreps_node_sequence=[given, *[hidden] * config.layers, f"{config.num_labels}x0e + {config.num_labels}x0o"],
            irreps_node_attr="0e",
            irreps_edge_attr=o3.Irreps.spherical_harmonics(config.degree),
            fc_neurons=[DISTANCES, NEURONS],
            num_neighbors=config.tokens - 1,
        )

    def logits(self, inputs_embeds: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
        batch, tokens = inputs_embeds.shape[:2]
        pairs = torch.tensor([*itertools.permutations(range(tokens), 2)], device=poses.device)
        first = tokens * torch.arange(batch, device=poses.device)[:, None]
        source, target = ((pairs[:, end] + first).flatten() for end in (0, 1))  # (B · N · (N − 1),) each
        places = poses[..., :3, 3].flatten(0, 1)  # (B · N, 3)
        away = places[source] - places[target]
        harmonics = self.o3.spherical_harmonics(
            list(range(self.config.degree + 1)), away, True, normalization="component"
        )
        distances = self.math.soft_one_hot_linspace(
            away.norm(dim=1), 0.0, self.config.max_radius, DISTANCES, basis="smooth_finite", cutoff=True
        )
        # Columns of the rotations are the axes.
        axes = poses[..., :3, :3].mT.flatten(-2)  # (B, N, 9)
        nodes = torch.cat([inputs_embeds, axes], dim=-1).flatten(0, 1)
        # Nodes have no further attribute.
        made = self.network(
            nodes, torch.ones_like(nodes[:, :1]), source, target, harmonics, distances * DISTANCES**0.5
        ).unflatten(0, (batch, tokens))
        return made.unflatten(-1, (2, -1)).sum(dim=-2).mean(dim=1)


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """One run; returns the last metrics."""
    return train_peer(arguments, ARGUMENT_CLASSES, EquivariantNetwork)


if __name__ == "__main__":
    start(main)
