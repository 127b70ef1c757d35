"""The module of learned parameters of rotations, in our models and in those of others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)


class LearnedRotations(nn.Module):
    """Parameters of rotations, which must not be rounded to half types; `config` names the encoding."""

    def __init__(self):
        super().__init__()
        # The type of the model. Fixed rotations have no parameter that shows it.
        self.model_dtype = torch.get_default_dtype()
        # The `ContentPositions` that move tokens, if the configuration says so.
        self.content: Any = None

    @staticmethod
    def new_parameter(*shape: int) -> nn.Parameter:
        """In the default dtype, but at least float32: rounded generators rotate distant patches wrongly."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LearnedRotations":
        before = {parameter.dtype for parameter in self.parameters()}
        result = super()._apply(fn, recurse)
        self.model_dtype = fn(torch.empty(0, dtype=self.model_dtype, device="cpu")).dtype
        rounded = ({parameter.dtype for parameter in self.parameters()} - before) & {torch.float16, torch.bfloat16}
        if rounded:
            logger.warning_once(
                f"The generators of {self.config.position_encoding} were rounded to {rounded.pop()}: rotations of "
                "distant patches are off by up to 0.1 on a 64 × 64 grid. Keep them in float32: from_pretrained(…, "
                "dtype=…) does so for models and autocast in training. In your own model convert the other modules: "
                "layers in float32 take queries of every type."
            )
        return result
