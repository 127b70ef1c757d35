"""Pretrained models as the trainer takes them, perhaps inside peft's, and which of their parameters are trained."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from hf_liere import rotary_parameters
from training.engine.patching import unwrap_peft


class WrappedModel(nn.Module):
    """
    A pretrained model; subclasses return its logits.

    Not a `PreTrainedModel`, so that Trainer saves all weights, including rotations and LoRA, under their names in
    memory. transformers saves some families under older names, which Trainer does not find when it resumes.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        # Trainer reads the configuration of its model.
        self.config = model.config

    @property
    def pretrained(self) -> PreTrainedModel:
        """The transformers model, without the peft wrapper."""
        return unwrap_peft(self.model)

    def rotary_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return rotary_parameters(self)

    def head_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of a classifier that is trained with rotations or LoRA, if any."""
        return iter(())

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that stay frozen for every `--trainable`."""
        return iter(())

    def freeze(self, trainable: str) -> int:
        """Freezes all parameters but those that `trainable` names; returns the number of trained parameters."""
        head = [parameter for _, parameter in self.head_parameters()]
        chosen = {
            "rotary": [],
            "rotary+head": head,
            "lora+rotary": [parameter for name, parameter in self.named_parameters() if "lora_" in name] + head,
            "all": list(self.parameters()),
        }[trainable]
        self.requires_grad_(False)
        for parameter in [*chosen, *(parameter for _, parameter in self.rotary_parameters())]:
            parameter.requires_grad_(True)
        for parameter in self.frozen_parameters():
            parameter.requires_grad_(False)
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def set_attn_implementation(self, name: str) -> None:
        self.pretrained.set_attn_implementation(name)

    def gradient_checkpointing_enable(self, **kwargs) -> None:
        self.model.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs) -> None:
        """The name of `gradient_checkpointing_enable` in newer releases of transformers."""
        self.model.activation_checkpointing_enable(**kwargs)
