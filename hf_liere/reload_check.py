"""
What a user gets who loads a published model without this package: run by [`publishing`] in a process of its own.

    python reload_check.py REPOSITORY COMMIT OUTPUT

It loads the model with the code of that commit, runs it on fixed inputs and writes its outputs as safetensors.
"""

import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def example_inputs(config) -> dict[str, torch.Tensor]:
    """One input of the size that a model was trained on; text too, where the model takes it."""
    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
    shape = [1, *frames, vision.num_channels, height, width]
    pixels = torch.linspace(-1, 1, steps=torch.Size(shape).numel()).sin().view(shape)
    return {"pixel_values": pixels}


@torch.no_grad()
def outputs(model) -> dict[str, torch.Tensor]:
    """All output tensors of a model in evaluation mode, in float32, by name."""
    model = model.eval()
    inputs = {name: value.to(model.dtype) for name, value in example_inputs(model.config).items()}
    if hasattr(model.config, "text_config"):
        text = model.config.text_config
        inputs["input_ids"] = torch.tensor([[text.bos_token_id or 0, 1, text.eos_token_id or 2]]) % text.vocab_size
    values = model(**inputs)
    tensors = {}
    for name, value in values.items():
        for index, tensor in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(tensor, torch.Tensor):
                tensors[f"{name}.{index}"] = tensor.float().contiguous().clone()
    return tensors


def main(repository: str, commit: str, output: str) -> None:
    pinned = {"revision": commit, "code_revision": commit}
    config = AutoConfig.from_pretrained(repository, trust_remote_code=True, **pinned)
    module = config.auto_map["AutoModel"].rpartition("--")[2].partition(".")[0]
    model_class = get_class_from_dynamic_module(f"{module}.{config.architectures[0]}", repository, **pinned)
    model, info = model_class.from_pretrained(repository, revision=commit, config=config, output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(f"{repository} at {commit} does not hold exactly the model's weights: {wrong}")
    save_file(outputs(model), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
