"""Trains a transformer with invariant point attention on the tasks on real structures.

It has the flags, data, batches, schedule and results of `token_classification.py`, and its layers, channels, heads and
MLP. Its attention is Algorithm 22 of AlphaFold (Jumper et al., Nature 2021, Supplementary Methods
1.8.2) without the bias of pairs, which these data do not have. Sweeps name it as the `script` of a model:

    python training/evidence/ipa_peer.py training/evidence/recipes/proteins_mini.yaml --structures DSSP \
        --output_dir outputs/ipa
"""

import sys
from dataclasses import dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from training.common.arguments import RunArguments, TokensModelArguments, flag, require_numbers
from training.data.tokens import TokenDataArguments
from training.engine.claims import giving_back
from training.engine.runs import start
from training.evidence.peers.training import PeerModel, train_peer


@dataclass
class PointArguments:
    query_points: int = flag(4, "Points of a query and of a key in each head, as in AlphaFold.")
    value_points: int = flag(8, "Points of a value in each head.")

    def __post_init__(self):
        require_numbers(self, "query_points", "value_points", lowest=1)


ARGUMENT_CLASSES = (TokensModelArguments, TokenDataArguments, PointArguments, RunArguments)


class InvariantPointAttention(nn.Module):
    """
    Attention by scalars and by points in the frames of the tokens, H heads of c channels, Algorithm 22:

        a_ij = softmax_j √½ (qᵢ·kⱼ/√c − γ/2 √(2/9P) Σ_p |Tᵢqᵢₚ − Tⱼkⱼₚ|²),  oᵢ = Σⱼ aᵢⱼ (vⱼ, Tᵢ⁻¹Tⱼvⱼₚ)

    with P points, a learned γ ≥ 0 of each head, and √½ instead of √⅓, since two terms are left of three.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.heads, self.queries, self.values = config.num_attention_heads, config.query_points, config.value_points
        channels = config.hidden_size // self.heads
        points = 2 * self.queries + self.values
        self.scalars = nn.Linear(config.hidden_size, 3 * self.heads * channels, bias=False)
        self.points = nn.Linear(config.hidden_size, 3 * self.heads * points, bias=False)
        # γ = softplus(weight) starts at 1.
        self.weight = nn.Parameter(torch.full((self.heads,), 1.0).expm1().log())
        self.output = nn.Linear(self.heads * (channels + 4 * self.values), config.hidden_size)

    def forward(self, states: torch.Tensor, rotations: torch.Tensor, translations: torch.Tensor) -> torch.Tensor:
        """
        Args:
            states: (B, N, hidden_size).
            rotations, translations: (B, N, 3, 3), from token to world, and (B, N, 3).
        """
        query, key, value = self.scalars(states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        local = self.points(states).unflatten(-1, (-1, 3))  # (B, N, H · (2P + values), 3)
        world = local @ rotations.mT + translations[:, :, None]
        world = world.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, H, N, 2P + values, 3)
        asked, offered, seen = world.split([self.queries, self.queries, self.values], dim=3)
        squares = (asked.unsqueeze(3) - offered.unsqueeze(2)).square().sum(dim=(-2, -1))  # (B, H, N, N)
        near = F.softplus(self.weight)[:, None, None] / 2 * (2 / (9 * self.queries)) ** 0.5 * squares
        attention = (0.5**0.5 * (query @ key.mT / query.shape[-1] ** 0.5 - near)).softmax(dim=-1)
        scalars = (attention @ value).transpose(1, 2)  # (B, N, H, c)
        found = torch.einsum("bhij,bhjpx->bihpx", attention, seen) - translations[:, :, None, None]
        found = torch.einsum("bihpx,bixy->bihpy", found, rotations)  # in the frame of the query
        lengths = (found.square().sum(dim=-1) + 1e-8).sqrt()  # the gradient of a length ends at 0
        return self.output(torch.cat([part.flatten(2) for part in (scalars, found, lengths)], dim=-1))


class PointTransformer(PeerModel):
    """Classifies samples of tokens with poses by the mean over these, by layers of [`InvariantPointAttention`]."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        size = config.hidden_size
        self.embedding, self.classifier = nn.Linear(config.feature_size, size), nn.Linear(size, config.num_labels)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(size),
                    "attention": InvariantPointAttention(config),
                    "after": nn.LayerNorm(size),
                    "mlp": nn.Sequential(
                        nn.Linear(size, config.intermediate_size), nn.GELU(), nn.Linear(config.intermediate_size, size)
                    ),
                }
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(size)

    def logits(self, inputs_embeds: torch.Tensor, poses: torch.Tensor) -> torch.Tensor:
        states = self.embedding(inputs_embeds)
        for layer in self.layers:
            states = states + layer["attention"](layer["before"](states), poses[..., :3, :3], poses[..., :3, 3])
            states = states + layer["mlp"](layer["after"](states))
        return self.classifier(self.norm(states).mean(dim=1))


@giving_back()
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """One run; returns the last metrics."""
    return train_peer(arguments, ARGUMENT_CLASSES, PointTransformer)


if __name__ == "__main__":
    start(main)
