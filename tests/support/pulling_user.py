"""
A user of published models in a process of its own: loads all kinds and writes their outputs.

    python pulling_user.py OUTPUT BASE package|remote REVISION
"""

import json
import sys

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    AutoModelForVideoClassification,
    AutoVideoProcessor,
    CLIPModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def outputs(models: dict) -> dict[str, torch.Tensor]:
    """What each kind of model says about fixed inputs."""
    models = {kind: model.eval() for kind, model in models.items()}
    text = {"input_ids": torch.tensor([[1, 5, 2]])}
    results = {
        "image": models["image"](pixels(1, 3, 16, 16)).logits,
        "video": models["video"](pixels(1, 4, 3, 8, 8)).logits,
        "tokens": models["tokens"](pixels(1, 5, 2), pixels(5, 3)).logits,
        "backbone": models["backbone"](pixels(1, 3, 16, 16)).feature_maps[-1].contiguous(),
        "clip": models["clip"](pixel_values=pixels(1, 3, 16, 16), **text).logits_per_image,
    }
    if "adapter" in models:
        results["adapter"] = models["adapter"](pixel_values=pixels(1, 3, 16, 16), **text).logits_per_image
    return results


def main(output: str, base: str, way: str, revision: str) -> None:
    revisions = json.loads(revision)

    def pinned(kind: str) -> dict:
        commit = {"revision": revisions[kind]}
        return commit if way == "package" else commit | {"code_revision": revisions[kind], "trust_remote_code": True}

    if way == "package":
        import hf_liere
    else:
        # For the process that comes after this one and has no connection.
        snapshot_download("tester/adapter", revision=revisions["adapter"])
    models = {
        "image": AutoModelForImageClassification.from_pretrained("tester/image", **pinned("image")),
        "video": AutoModelForVideoClassification.from_pretrained("tester/video", **pinned("video")),
        "tokens": AutoModelForTokenClassification.from_pretrained("tester/tokens", **pinned("tokens")),
        "clip": AutoModel.from_pretrained("tester/clip", **pinned("clip")),
    }
    if way == "package":
        backbone = hf_liere.LieREViTBackbone
        models["adapter"] = hf_liere.load_rotary(
            CLIPModel.from_pretrained(base), "tester/adapter", revision=revisions["adapter"]
        )
    else:
        config = AutoConfig.from_pretrained("tester/backbone", **pinned("backbone"))
        reference = config.auto_map["AutoBackbone"].rpartition("--")[2]
        backbone = get_class_from_dynamic_module(
            reference, "tester/backbone", revision=revisions["backbone"], code_revision=revisions["backbone"]
        )
    models["backbone"] = backbone.from_pretrained("tester/backbone", revision=revisions["backbone"])
    AutoImageProcessor.from_pretrained("tester/image", revision=revisions["image"])
    AutoVideoProcessor.from_pretrained("tester/video", **pinned("video"))
    modules = {type(model).__module__.partition(".")[0] for kind, model in models.items() if kind != "adapter"}
    assert modules == {"hf_liere" if way == "package" else "transformers_modules"}, modules
    assert way == "package" or "hf_liere" not in sys.modules
    save_file(outputs(models), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
