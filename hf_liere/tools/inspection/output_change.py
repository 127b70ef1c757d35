"""The change of a vision transformer's output when all patch coordinates move by a common offset."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from tqdm.auto import tqdm

from .attention import input_batches, vision_tower
from .encodings import rotary_encoding, step_sizes


# Common offsets at which outputs are compared, in patches.
OUTPUT_OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0)


class OutputChange(NamedTuple):
    """
    Attributes:
        offsets: (offsets,) in patches.
        change: (offsets, images) ‖f(x; p + c) − f(x; p)‖ / ‖f(x; p)‖.
    """

    offsets: torch.Tensor
    change: torch.Tensor


@torch.no_grad()
def output_change(
    model: nn.Module,
    pixel_values: torch.Tensor,
    batch_size: int = 8,
    *,
    offsets: Sequence[float] = OUTPUT_OFFSETS,
    progress: bool = False,
) -> OutputChange:
    """
    The change of the output if all patch coordinates move by a common offset (ComRoPE §4.3.1, Fig. 5): ‖f(x; p + c) −
    f(x; p)‖ / ‖f(x; p)‖, where f is the pooled output of the vision tower.

    With a relative encoding, attention between patches does not change. Nor does the output, if class and register
    tokens move too (`rotate_prefix`) or if there are none. Other sources of positions, such as a table, do not move, so
    a change of 0 is a statement only about the rotations; see [`attention_relativity`] for the whole model.

    Args:
        offsets: The offsets c along every axis, in patches of the trained grid.

    Raises:
        ValueError: if the model has no rotations.
    """
    tower = vision_tower(model)
    encoding = rotary_encoding(tower.module)
    if encoding is None:
        raise ValueError(f"{type(model).__name__} has no rotations; accepted are models with rotations of hf_liere.")
    steps, offset = step_sizes(encoding), 0.0

    def move(module: nn.Module, inputs: tuple, options: dict) -> tuple[tuple, dict]:
        positions, *others = inputs
        moved = positions.coordinates.clone()  # (N, A) or (B, N, A)
        first = 0 if encoding.config.rotate_prefix else positions.num_prefix_tokens
        moved[..., first:, :] += offset * steps.to(moved)
        return (positions._replace(moved), *others), options

    pooled: dict[float, torch.Tensor] = {}
    with encoding.register_forward_pre_hook(move, with_kwargs=True):
        # The hook reads `offset`.
        for offset in tqdm(dict.fromkeys((0.0, *offsets)), desc="offsets", disable=not progress):
            outputs = []
            for batch, options in input_batches(tower, pixel_values, batch_size):
                output = tower.module(batch, **options)
                found = getattr(output, "pooler_output", None)
                outputs.append(output.last_hidden_state.flatten(1) if found is None else found)
            pooled[offset] = torch.cat(outputs).float().cpu()  # (images, features)
    reference = pooled[0.0]
    changes = [(pooled[offset] - reference).norm(dim=1) / reference.norm(dim=1) for offset in offsets]
    return OutputChange(torch.tensor(offsets), torch.stack(changes))
