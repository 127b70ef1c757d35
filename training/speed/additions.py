"""What an encoding adds to a step of a model with absolute positions, taken out of its own model."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hf_liere.models.encoding.projections import project
from hf_liere.models.rotation.rotation import Rotation
from training.speed.clocks import measure_seconds
from training.speed.models import Settings, compile_function


class States:
    """
    Queries and keys of every layer, as their projections leave them, and the gradients that attention returns for the
    rotated ones: (B, H, N, D) each, with tokens before heads in memory.

    Every layer has its own, so that they are no warmer in the caches than in a model. The additions of all encodings
    share them.

    Args:
        settings: Whose batch size, device and type they have.
        config: Configuration of a model.
    """

    def __init__(self, settings: Settings, config):
        num_tokens = config.num_prefix_tokens + math.prod(config.train_grid)
        shape = settings.batch_size, num_tokens, config.num_attention_heads, config.head_dim

        def new() -> torch.Tensor:
            return torch.randn(shape, device=settings.device, dtype=settings.torch_dtype).transpose(1, 2)

        self.layers = [(new().requires_grad_(), new().requires_grad_()) for _ in range(config.num_hidden_layers)]
        self.gradients = [(new(), new()) for _ in self.layers]
        for state in (state for layer in self.layers for state in layer):
            # A projection consumes the gradient at once, and its memory is used again.
            state.register_post_accumulate_grad_hook(_forget_gradient)


def _forget_gradient(state: torch.Tensor) -> None:
    state.grad = None


class Addition:
    """
    The positions of a grid, the rotations of all layers and their application to query and key; in training also the
    backward pass through them, to queries, keys and learned generators.

    Commuting rotations change the basis of the query and key weights. Projections of no tokens do only that, and what
    they do without rotations, as `absolute` does, is subtracted. What a rotation costs its neighbours in a model, whose
    data it drives from the caches, is not in it.

    Args:
        settings: How the model was built.
        model: One of our models, in the mode of the phase.
        states: What is rotated.
        keeps_rotations: Whether the rotations of the grid are kept from the pass before, where the model keeps any.
    """

    def __init__(self, settings: Settings, model: nn.Module, states: States, keeps_rotations: bool = True):
        self.settings, self.states, self.encoder, self.keeps_rotations = settings, states, model.liere, keeps_rotations
        self.training = model.training
        self.grid = model.config.train_grid
        self.device = torch.device(settings.device)
        weight = self.encoder.layers[0].attention.q_proj.weight
        self.no_tokens = weight.new_zeros(1, 0, weight.shape[1]).requires_grad_(self.training)
        with torch.no_grad():
            self.changes_basis = next(iter(self.rotations())).basis is not None
        self.add = compile_function(settings, self.rotate)
        self.subtract = compile_function(settings, self.project_without_rotations)
        self.parameters = [parameter for _, parameter in model.rotary_parameters()]
        if self.changes_basis:
            projections = [p for layer in self.encoder.layers for p in (layer.attention.q_proj, layer.attention.k_proj)]
            self.parameters += [parameter for projection in projections for parameter in projection.parameters()]

    def rotations(self) -> Iterable[Rotation]:
        """Those of every layer, as a pass of the model computes them."""
        query, _ = self.states.layers[0]
        return self.encoder.rotations(self.encoder.grid_positions(self.grid, self.device), query.dtype)

    def rotate(self) -> list[torch.Tensor]:
        """
        What the backward pass starts from: the rotated query and key of every layer, and where the basis changes, both
        projections of no tokens. Without a backward pass nothing is held, as in a model, unless a compiler would leave
        out what is not returned.
        """
        outputs = []
        for layer, (query, key), rotation in zip(self.encoder.layers, self.states.layers, self.rotations()):
            results = [*rotation.rotate(query, key), *self.project(layer, rotation)]
            outputs += results if self.training or self.settings.compile else []
            del results
        return outputs

    def project_without_rotations(self) -> list[torch.Tensor]:
        """The projections of no tokens as `absolute` has them."""
        return [projected for layer in self.encoder.layers for projected in self.project(layer, None)]

    def project(self, layer: nn.Module, rotation: Rotation | None) -> list[torch.Tensor]:
        """Query and key of no tokens in the basis of the rotation; none where it needs no basis."""
        if not self.changes_basis:
            return []
        attention = layer.attention
        return [project(projection, self.no_tokens, rotation) for projection in (attention.q_proj, attention.k_proj)]

    def incoming_gradients(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """A gradient for each of the outputs."""
        gradients = (gradient for layer in self.states.gradients for gradient in layer)
        return [next(gradients) if output.numel() else torch.empty_like(output) for output in outputs]

    def run(self, function: Callable[[], list[torch.Tensor]]) -> None:
        """A step of `function`, which is one of those above, with its backward pass in training."""
        if not self.training:
            with torch.no_grad():
                function()
            return
        self.forget_gradients()
        with self.settings.autocast():
            outputs = function()
        torch.autograd.backward(outputs, self.incoming_gradients(outputs))

    def step(self) -> None:
        if not self.keeps_rotations:
            self.encoder.rotary_encoding.cache.clear()
        self.run(self.add)

    def seconds(self, steps: int) -> dict[str, float]:
        """Mean seconds by every clock that a step of this takes longer than one of `absolute`."""
        seconds = measure_seconds(self.step, steps, self.settings.device)
        if self.changes_basis:
            common = measure_seconds(lambda: self.run(self.subtract), steps, self.settings.device)
            seconds = {clock: seconds[clock] - common[clock] for clock in seconds}
        self.forget_gradients()
        return seconds

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
