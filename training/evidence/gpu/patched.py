"""Frozen models with learned rotations beside the same with LoRA: a DINOv2-small, and a Llama of a billion weights."""

from typing import Any

import torch
import transformers
from torch import nn

from hf_liere import RotaryPatchConfig, patch
from training.evidence.gpu import models
from training.evidence.gpu.comparisons import compare
from training.evidence.speed.models import Settings, compile_function
from training.evidence.speed.runner import Runner


# What is trained: LoRA, rotations, or both; of DINOv2 always its classifier too.
DINOV2 = ["lora", "classifier", "rope_mixed", "comrope_ld8", "liere8", "lora+comrope_ld8", "lora+liere8"]
LLAMA = ["lora", "rope_mixed", "comrope_ld8", "liere8", "lora+liere8"]
RANK = 8
TARGETS = r".*\.(query|key|[qk]_proj)"
LLAMA_SIZE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_SIZE |= {"intermediate_size": 8192, "vocab_size": 32000}
QUICK_SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
QUICK_SIZE |= {"intermediate_size": 32, "vocab_size": 32}


class AdapterRunner(Runner):
    """A model in training that computes its own loss from these inputs."""

    def __init__(self, settings: Settings, model: nn.Module, inputs: dict[str, torch.Tensor]):
        self.settings, self.training, self.model, self.inputs = settings, True, model.train(), inputs
        self.call = compile_function(settings, model)
        self.pixels = next(iter(inputs.values()))

    def loss(self) -> torch.Tensor:
        return self.call(**self.inputs).loss


def measure_patched(checks: models.Settings, section: str) -> None:
    """Adds the lines that the record lacks."""
    dtype = str(checks.half).removeprefix("torch.")
    batch, length = (2, 16) if checks.quick else (4, 1024)
    cases = {"DINOv2-small at 98 px": (DINOV2, 2 if checks.quick else 32, build_dinov2)}
    cases[f"Llama of {'one layer' if checks.quick else '1e9 weights'}, {length} tokens"] = (LLAMA, batch, build_llama)
    for name, (rows, size, build) in cases.items():
        settings = Settings("small", 12, size, 98, 14, None, checks.device, dtype, "sdpa", False)
        case = {"title": f"{name}, batch {size}, {dtype}", "batch_size": size, "device": checks.device}
        compare(
            checks,
            section,
            {"case": case, "phase": "training"},
            rows[:3] if checks.quick else rows,
            lambda row, settings=settings, build=build: build(checks, settings, row),
        )


def build_dinov2(checks: models.Settings, settings: Settings, row: str) -> AdapterRunner:
    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6}
    sizes |= {"num_hidden_layers": 1} if checks.quick else {}
    config = transformers.Dinov2Config(image_size=98, patch_size=14, num_labels=10, **sizes)
    torch.manual_seed(0)
    pixels = settings.pixels()
    model = adapt(transformers.Dinov2ForImageClassification(config).to(settings.device), row, {}, ["classifier"])
    labels = torch.arange(settings.batch_size, device=settings.device) % config.num_labels
    return AdapterRunner(settings, model, {"pixel_values": pixels, "labels": labels})


def build_llama(checks: models.Settings, settings: Settings, row: str) -> AdapterRunner:
    config = transformers.LlamaConfig(**(QUICK_SIZE if checks.quick else LLAMA_SIZE))
    torch.manual_seed(0)
    with torch.device(settings.device):
        # `to` would round the frequencies.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=settings.torch_dtype)
        shape = settings.batch_size, 16 if checks.quick else 1024
        tokens = torch.randint(config.vocab_size, shape)
    model = adapt(model, row, {"rotary_init": "pretrained"}, None)
    return AdapterRunner(settings, model, {"input_ids": tokens, "labels": tokens})


def adapt(model: nn.Module, row: str, start: dict[str, Any], head: list[str] | None) -> nn.Module:
    """Freezes a model but for its head, and adds what the row names."""
    import peft

    model.requires_grad_(False)
    for name in head or []:
        model.get_submodule(name).requires_grad_()
    for part in row.split("+"):
        encoding = part.rstrip("0123456789")
        if encoding not in ("lora", "classifier"):
            size = part.removeprefix(encoding)
            patch(model, RotaryPatchConfig(position_encoding=encoding, block_size=int(size) if size else None, **start))
    if "lora" in row:
        rotations = [p for p in model.parameters() if p.requires_grad]
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=TARGETS))
        # peft freezes whatever is not its own.
        for parameter in rotations:
            parameter.requires_grad_()
    return model
