"""What a training step takes, counted on `meta`: parameters, saved activations, FLOPs, bytes and operations."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import hf_liere
from hf_liere.fast import dispatch


def vit(width: int, layers: int, heads: int, patch_size: int, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width, "image_size": 224, "patch_size": patch_size, **fields}


SIZES: dict[str, dict[str, Any]] = {
    "ViT-B/16": vit(768, 12, 12, 16, num_labels=1000),
    "ViT-L/16": vit(1024, 24, 16, 16, num_labels=1000),
    "ViT-H/14": vit(1280, 32, 16, 14, num_labels=1000),
    "video ViT-B": vit(768, 12, 12, 16, num_labels=400, num_frames=16, tubelet_size=2),
    # The config.json of Llama 3 8B.
    "Llama-3-8B": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}
NUM_TOKENS = 4096
# Operators that are loops of operations on GPUs; rotations of queries and keys are one kernel.
LOOPS = ("batched_rotations", "batched_backward")
ATTENTION = "counted"


def attend(module: nn.Module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
    """Attention that saves its inputs, its output and one number per row, as on GPUs."""
    output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, module.is_causal)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class CountWork(TorchDispatchMode):
    """
    Adds to `work`: `operations` that are no views; `bytes` that they read and write, none fused with others; `flops` of
    matrix products, and `double_flops` of those in float64 and of eigenvectors.
    """

    def __init__(self, work: Counter):
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        packet, options = function._overloadpacket, options or {}
        name = packet._qualified_op_name.split("::")[-1]
        with self:
            if function.namespace == "hf_liere" and name in LOOPS:
                return dispatch.plain_functions[packet](*arguments)
            if (results := function.decompose(*arguments, **options)) is not NotImplemented:
                return results
        results = function(*arguments, **options)
        given = {id(x): x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}.values()
        made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        is_view = not function._schema.is_mutable and all(x.untyped_storage()._cdata in known for x in made)
        if is_view or "empty" in name:
            return results
        # In-place products have the formula of the others.
        formula = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), packet))
        flops = formula(*arguments, **options, out_val=results) if formula else 0
        if name == "_linalg_eigh":
            # About 9 n³ for a real matrix (Golub and Van Loan, §8.3), four times as many for a complex one.
            flops = 36 * math.prod(made[1].shape) * made[1].shape[-1]
        double = any(x.dtype in (torch.float64, torch.complex128) for x in made)
        moved = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in (*given, *made))
        self.work.update(operations=1, bytes=moved, flops=flops * (not double), double_flops=flops * double)
        return results


def build(name: str, encoding: str, block_size: int | None) -> nn.Module:
    """A model in bfloat16 on `meta`, with generators in float32; encoding `none` is without rotations of ours."""
    fields = {**SIZES[name], "attn_implementation": ATTENTION}
    if "vocab_size" in fields:
        config = LlamaConfig(**fields)
        with torch.device("meta"):
            model: nn.Module = LlamaForCausalLM(config)
        # Patching reads its frequencies.
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        if encoding != "none":
            patch = hf_liere.RotaryPatchConfig(position_encoding=encoding, rotary_init="pretrained")
            hf_liere.patch(model, patch).model.rotary_encoding.to("meta")
    else:
        fields |= {"position_encoding": encoding, "block_size": block_size}
        with torch.device("meta"):
            if "num_frames" in fields:
                model = hf_liere.LieREVideoForVideoClassification(hf_liere.LieREVideoConfig(**fields))
            else:
                model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**fields))
    for parameter_name, parameter in model.named_parameters():
        if "rotary_encoding" not in parameter_name:
            parameter.data = parameter.data.bfloat16()
    return model.train()


def inputs(name: str, batch: int) -> dict[str, torch.Tensor]:
    size = SIZES[name]
    if "vocab_size" in size:
        tokens = torch.empty(batch, NUM_TOKENS, dtype=torch.long, device="meta")
        # A mask that is given keeps Transformers from looking for packed sequences, by values.
        return {"input_ids": tokens, "labels": tokens, "attention_mask": tokens}
    frames = (size["num_frames"],) if "num_frames" in size else ()
    shape = (batch, *frames, 3, size["image_size"], size["image_size"])
    labels = torch.empty(batch, dtype=torch.long, device="meta")
    return {"pixel_values": torch.empty(shape, dtype=torch.bfloat16, device="meta"), "labels": labels}


@contextmanager
def count_saved(model: nn.Module, layers: nn.ModuleList, work: Counter) -> Iterator[None]:
    """
    Adds the bytes that layers save for the backward pass (`inside`), those saved elsewhere (`outside`), and the `input`
    of a layer. Each storage is counted once, and weights are not.
    """
    seen: dict[int, torch.Tensor] = {parameter.untyped_storage()._cdata: parameter for parameter in model.parameters()}
    place = ["outside"]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            # A reference, so that no other storage gets its address.
            seen[storage._cdata] = tensor
            work[place[0]] += storage.nbytes()
        return tensor

    def enter(layer: nn.Module, arguments: tuple) -> None:
        place[0], work["input"] = "inside", arguments[0].nbytes

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: place.__setitem__(0, "outside")) for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    for hook in hooks:
        hook.remove()


def count(name: str, encoding: str, block_size: int | None = None) -> dict[str, Any]:
    """
    Shapes of the parameters, and the work of a forward and backward pass, which is linear in the batch: `sample` is the
    slope between batches of 2 and 3, `fixed` what is left at batch 0.
    """
    model, works = build(name, encoding, block_size), (Counter(), Counter())
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    of_layers = {id(parameter) for parameter in layers.parameters()}
    # `meta` computes rotations as CPUs do, layer by layer, unless it is told otherwise.
    with mock.patch.object(dispatch, "_one_by_one", dispatch._one_by_one - {"meta"}):
        for batch, work in zip((2, 3), works):
            with CountWork(work):
                with count_saved(model, layers, work):
                    loss = model(**inputs(name, batch)).loss
                loss.backward()
            model.zero_grad()
    two, three = works
    return {
        "model": name,
        "encoding": encoding,
        "block_size": block_size,
        "layers": len(layers),
        "layer": [list(parameter.shape) for parameter in layers[0].parameters()],
        "root": [list(parameter.shape) for parameter in model.parameters() if id(parameter) not in of_layers],
        "sample": {key: three[key] - two[key] for key in two},
        "fixed": {key: 3 * two[key] - 2 * three[key] for key in two},
    }
