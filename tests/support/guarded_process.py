"""
A process in which the package is imported last: `python guarded_process.py FOLDER NAME…` prints as json what has become
of functions of other libraries (`module:name`) and of the gradients of four models, patched and unpatched.
"""

import importlib
import json
import sys
import warnings
from functools import reduce
from inspect import getattr_static

import diffusers
import peft
import timm
import torch
import transformers
from torch import nn


TEXT = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
IMAGE = {"img_size": 32, "depth": 2, "num_heads": 2, "embed_dim": 16, "num_classes": 3}
FLUX = {"num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4), "in_channels": 4}
FLUX |= {"num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8}
TOKENS = torch.arange(12).view(2, 6)
INPUTS = {
    "transformers": {"input_ids": TOKENS},
    "peft": {"input_ids": TOKENS},
    "timm": {"x": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)},
    "diffusers": {
        "hidden_states": torch.linspace(-1, 1, 32).view(1, 8, 4),
        "encoder_hidden_states": torch.linspace(-1, 1, 24).view(1, 3, 8),
        "pooled_projections": torch.linspace(-1, 1, 8).view(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(3, 3),
    },
}


def build() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    found = {name: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)) for name in ("transformers", "peft")}
    adapter = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found["peft"] = peft.get_peft_model(found["peft"], adapter)
    found["timm"] = timm.create_model("vit_tiny_patch16_224", **IMAGE)
    found["timm"].set_grad_checkpointing()
    found["diffusers"] = diffusers.FluxTransformer2DModel(**FLUX)
    return found


def gradients(models: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    found = {}
    for name, model in models.items():
        model.zero_grad()
        output = model(**INPUTS[name])
        (output if isinstance(output, torch.Tensor) else output[0]).square().mean().backward()
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name}.{parameter_name}"] = parameter.grad.clone()
    return found


def functions(names: list[str]) -> dict[str, object]:
    """Those with these names, and all that modules of timm contain."""
    found = {}
    for name in names:
        module, _, path = name.partition(":")
        *around, last = path.split(".")
        found[name] = getattr_static(reduce(getattr, around, importlib.import_module(module)), last)
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "timm":
            found |= {f"{name}:{key}": value for key, value in vars(module).items() if callable(value)}
    return found


def main(folder: str, *names: str) -> None:
    models, before = build(), functions([*names])
    plain = gradients(models)

    def changed() -> list[str]:
        now = functions([*names])
        return sorted(name for name in before if now[name] is not before[name])

    import hf_liere
    from hf_liere.patching.guards import install_guards, uninstall_guards

    report = {"imported": changed()}
    planes = hf_liere.RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
    # A part, so that saving the whole needs the package.
    hf_liere.patch(models["transformers"].model, planes)
    hf_liere.patch(models["peft"].get_base_model(), planes)
    hf_liere.patch(models["diffusers"], planes)
    hf_liere.patch(models["timm"], hf_liere.RotaryPatchConfig(position_encoding="liere", block_size=4))
    rotations = [value.requires_grad_() for model in models.values() for _, value in hf_liere.rotary_parameters(model)]
    start = gradients(models)
    report["start"] = max((start[name] - plain[name]).abs().max().item() for name in plain)
    torch.optim.SGD(rotations, lr=0.1).step()
    report["trained"] = all(value.grad.any() for value in rotations)
    report["warned"] = {}
    for name, model in models.items():
        if name != "timm":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.save_pretrained(f"{folder}/{name}")
            report["warned"][name] = [str(one.message) for one in caught if "hf_liere" in str(one.message)]
    report["patched"] = changed()
    for name, model in models.items():
        hf_liere.unpatch(model.get_base_model() if name == "peft" else model)
    uninstall_guards()
    report["uninstalled"] = changed()
    after = gradients(models)
    report["gradients"] = after.keys() == plain.keys() and all(torch.equal(after[name], plain[name]) for name in plain)
    loaded = hf_liere.load_peft(f"{folder}/peft", build()["peft"].unload())
    report["restored"] = any(hf_liere.is_patched(part) for part in loaded.modules())
    install_guards()
    report["again"] = changed()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
