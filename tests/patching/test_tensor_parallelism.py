"""Rotations in models whose heads two processes share (`tp_plan` of transformers): the same as in one process."""

import parallel_worker
import pytest
import torch
import torch.distributed as dist
import transformers
from fresh_process import run_two_processes
from patching_cases import IMAGE
from rope_cases import HEADS, PLANES, TEXT
from torch.distributed.tensor import Shard, distribute_tensor

from hf_liere import RotaryPatchConfig, patch, rotary_parameters
from hf_liere.patching.modeling_patched import split_rotations


ENCODINGS = {
    "planes": PLANES,
    "liere": RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained"),
    "comrope_ld": RotaryPatchConfig(position_encoding="comrope_ld", block_size=4, rotary_init="pretrained"),
    "shared": RotaryPatchConfig(
        position_encoding="cayley_string", block_size=4, rotary_init="pretrained", share_heads=True
    ),
}
FAMILIES = {"llama": ("Llama", {}), "qwen3": ("Qwen3", HEADS), "phi3": ("Phi3", {})}


def save(folder, family, encoding, **fields):
    """A patched model with rotations that differ in every head."""
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**TEXT, **sizes, **fields})
    model = patch(getattr(transformers, f"{name}ForCausalLM")(config), ENCODINGS[encoding])
    with torch.no_grad():
        for _, parameter in rotary_parameters(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def check(folder, names, refused=None):
    """What two processes compute, and why they refuse others."""
    refused = refused or {}
    run_two_processes(parallel_worker.__file__, folder, *names, *refused)
    for name, reason in refused.items():
        assert reason in torch.load(folder / f"{name}-0.pt")
    for name in names:
        found, other = (torch.load(folder / f"{name}-{rank}.pt") for rank in range(2))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        expected = parallel_worker.compute(model)
        # Sums of two processes in float32, in another order.
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        learned = found["two"]
        assert learned and all(value.abs().max() > 1e-4 for value in learned.values())
        # Otherwise the copies of the processes would move apart.
        assert all(torch.equal(value, other["two"][each]) for each, value in learned.items())
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-again")
        state = model.state_dict()
        assert again.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[each]) for each, value in again.state_dict().items())


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    names = ["llama-liere", "llama-planes"]
    for name in names:
        save(tmp_path / name, *name.split("-"))
    save(tmp_path / "one_key_head", "llama", "planes", num_key_value_heads=1)
    save(tmp_path / "odd_heads", "llama", "liere", hidden_size=36, num_attention_heads=3, num_key_value_heads=3)
    check(
        tmp_path,
        names,
        refused={
            "one_key_head": "k_proj: tensor parallelism cannot divide the number of heads, 1,",
            "odd_heads": "3, among 2",
        },
    )


@pytest.mark.slow
def test_other_families_and_encodings(tmp_path):
    names = [f"{family}-{encoding}" for family in FAMILIES for encoding in ENCODINGS]
    for name in names:
        save(tmp_path / name, *name.split("-"))
    check(tmp_path, names)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def split(model, projection, mesh):
    weight = distribute_tensor(projection.weight.detach(), mesh, [Shard(0)])
    projection.weight = torch.nn.Parameter(weight)
    model._tp_size = 2


def test_split_weights_are_not_patched(mesh):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    split(model, model.model.layers[1].self_attn.q_proj, mesh)
    for config in ENCODINGS.values():
        with pytest.raises(
            ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight.*over processes: patch the whole model"
        ):
            patch(model, config)
    assert type(model) is transformers.LlamaForCausalLM


def test_vision_towers_are_not_split(mesh):
    """But a text part may be, beside a vision tower with rotations."""
    config = RotaryPatchConfig(position_encoding="liere", block_size=4)
    model = patch(transformers.ViTModel(transformers.ViTConfig(**IMAGE)), config)
    attention = model.get_submodule(model.rotary_patch.attention_names[0])
    name, projection = next((n, m) for n, m in attention.named_modules() if isinstance(m, torch.nn.Linear))
    split(model, projection, mesh)
    split_rotations(model)
    model.tp_plan = {f"{model.rotary_patch.attention_names[0]}.{name}": "colwise"}
    with pytest.raises(
        ValueError, match=r"\(tp_plan\) divides the heads of ViTModel.*accepted: rotary_init='pretrained'"
    ):
        split_rotations(model)
