"""
Tensor parallelism of transformers (`tp_plan`): every process has some of the heads of an attention module.

Generators take kilobytes. As norms, they stay whole in every process, and files are those of one process. Each process
computes the rotations of its own heads alone; gradients are those of all heads.
"""

from typing import Any

import torch
from torch import nn


class HeadShare:
    """The heads that this process has among those of a device mesh of one dimension."""

    def __init__(self, mesh: Any):
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()

    def __deepcopy__(self, memo) -> "HeadShare":
        return self

    def count(self, heads: int, name: str) -> int:
        """How many of the heads that `name` makes. Raises `ValueError` if they cannot be divided."""
        if heads % self.size:
            raise ValueError(
                f"{name}: tensor parallelism cannot divide the number of heads, {heads}, among {self.size} processes; "
                "accepted: a tp_size that divides the heads of queries and of keys."
            )
        return heads // self.size

    def take(self, parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """
        The part of a whole parameter that has the given shape: that of these heads, or all of it if heads share it.
        Gradients of the parameter are those of all processes.
        """
        # Some builds of torch lack it.
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        whole = DTensor.from_local(parameter, self.mesh, [Replicate()], run_check=False)
        axes = [axis for axis, sizes in enumerate(zip(parameter.shape, shape)) if sizes[0] != sizes[1]]
        if not axes:
            return whole.to_local(grad_placements=[Partial()])
        return whole.redistribute(placements=[Shard(axes[0])]).to_local()

    def call(self, local: nn.Module, module: nn.Module, *arguments: Any) -> Any:
        """Calls `local`, which has the shapes of these heads, with the values of a module."""
        values = {name: self.take(value, local.get_parameter(name).shape) for name, value in module.named_parameters()}
        return torch.func.functional_call(local, values | dict(module.named_buffers()), arguments)
