"""
Loads a published model as a user without this package would; [`publishing`] runs it in a separate process.

    python reload_check.py FOLDER OUTPUT

It loads a commit with the commit's own code, runs the model on fixed inputs and writes the outputs as safetensors. It
must not import this package, so it checks the loaded keys without the package's loader.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def example_inputs(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """One input of the trained size; three tokens of text, and eight with positions, which have no size."""
    if hasattr(config, "feature_size"):
        features, positions = (torch.linspace(-1, 1, 8 * size).sin() for size in (config.feature_size, config.num_axes))
        return {"inputs_embeds": features.view(1, 8, -1), "positions": positions.view(1, 8, -1)}
    vision = getattr(config, "vision_config", config)
    tokens = {}
    if hasattr(config, "text_config") or not hasattr(vision, "image_size"):
        text = config.get_text_config()
        tokens["input_ids"] = torch.tensor([[text.bos_token_id or 0, 1, text.eos_token_id or 2]]) % text.vocab_size
    if not hasattr(vision, "image_size"):
        return tokens
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
    shape = [1, *frames, vision.num_channels, height, width]
    pixels = torch.linspace(-1, 1, steps=torch.Size(shape).numel()).sin().view(shape)
    return {"pixel_values": pixels, **tokens}


@torch.no_grad()
def outputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All output tensors of a model in evaluation mode, in float32, by name."""
    model = model.eval()
    inputs = example_inputs(model.config)
    values = model(**{name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()})
    tensors = {}
    for name, value in values.items():
        for index, tensor in enumerate(value if isinstance(value, (tuple, list)) else [value]):
            if isinstance(tensor, torch.Tensor):
                tensors[f"{name}.{index}"] = tensor.float().contiguous().clone()
    return tensors


def main(folder: str, output: str) -> None:
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    architecture, auto_map = config["architectures"][0], config["auto_map"]
    # AutoBackbone accepts only configurations.
    auto_classes = [name for name, to in auto_map.items() if to.endswith(f".{architecture}") and name != "AutoBackbone"]
    if auto_classes:
        loader, options = getattr(transformers, auto_classes[0]), {"trust_remote_code": True}
    else:
        reference = f"{auto_map['AutoModel'].partition('.')[0]}.{architecture}"
        loader, options = get_class_from_dynamic_module(reference, folder), {}
    model, info = loader.from_pretrained(folder, output_loading_info=True, **options)
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise SystemExit(f"It does not contain exactly the model's weights: {wrong}")
    save_file(outputs(model), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
