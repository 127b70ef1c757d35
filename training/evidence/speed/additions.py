"""The operations that an encoding adds to a step of a model with absolute positions, isolated from its model."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from hf_liere.rotation.grouped_rotation import Rotation
from hf_liere.rotation.projections import project
from training.evidence.speed.clocks import measure_seconds
from training.evidence.speed.models import Settings, compile_function


class States:
    """
    Projected queries and keys of every layer, and the gradients of the rotated ones that attention returns: (B, H, N,
    D) each, with tokens before heads in memory.

    Every layer has separate tensors, so that the caches are as cold as in a model. The additions of all encodings share
    them.

    Args:
        settings: Settings with the batch size, device and dtype.
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
            # In a model, a projection consumes the gradient immediately and its memory is reused.
            state.register_post_accumulate_grad_hook(_forget_gradient)


def _forget_gradient(state: torch.Tensor) -> None:
    state.grad = None


class Addition:
    """
    The positions of a grid, the rotations of all layers and their application to query and key; in training also the
    backward pass to queries, keys and learned generators.

    Commuting rotations change the basis of the query and key weights. To measure this alone, no tokens are projected,
    and the time of the same projections without rotations, as in `absolute`, is subtracted. The cost of evicting other
    operations' data from the caches is not included.

    Args:
        settings: Settings that the model was built with.
        model: One of our models, in the mode of the phase.
        states: Queries and keys to rotate.
        keeps_rotations: Whether cached rotations of the grid are reused, if the model caches any.
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
        """The rotations of every layer, computed as in the model."""
        query, _ = self.states.layers[0]
        return self.encoder.rotations(self.encoder.grid_positions(self.grid, self.device), query.dtype)

    def rotate(self) -> list[torch.Tensor]:
        """
        The inputs of the backward pass: the rotated query and key of every layer and, if the basis changes, both
        projections of no tokens. Without a backward pass nothing is kept, as in a model, unless a compiler would remove
        operations whose results are not returned.
        """
        outputs = []
        for layer, (query, key), rotation in zip(self.encoder.layers, self.states.layers, self.rotations()):
            results = [*rotation.rotate(query, key), *self.project(layer, rotation)]
            outputs += results if self.training or self.settings.compile else []
            del results
        return outputs

    def project_without_rotations(self) -> list[torch.Tensor]:
        """The projections of no tokens as in `absolute`."""
        return [projected for layer in self.encoder.layers for projected in self.project(layer, None)]

    def project(self, layer: nn.Module, rotation: Rotation | None) -> list[torch.Tensor]:
        """Query and key of no tokens in the basis of the rotation; empty for rotations without a basis."""
        if not self.changes_basis:
            return []
        projections = layer.attention.q_proj, layer.attention.k_proj
        if rotation is None:
            return [projection(self.no_tokens) for projection in projections]
        return [project(projection, self.no_tokens, rotation) for projection in projections]

    def incoming_gradients(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """A gradient for each of the outputs."""
        gradients = (gradient for layer in self.states.gradients for gradient in layer)
        return [next(gradients) if output.numel() else torch.empty_like(output) for output in outputs]

    def run(self, function: Callable[[], list[torch.Tensor]]) -> None:
        """One step of `rotate` or `project_without_rotations`, in training with its backward pass."""
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
        """Mean seconds, by clock, that a step takes longer than one of `absolute`."""
        seconds = measure_seconds(self.step, steps, self.settings.device)
        if self.changes_basis:
            common = measure_seconds(lambda: self.run(self.subtract), steps, self.settings.device)
            seconds = {clock: seconds[clock] - common[clock] for clock in seconds}
        self.forget_gradients()
        return seconds

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
