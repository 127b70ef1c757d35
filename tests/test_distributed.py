"""DDP, FSDP2 and ZeRO-3 in two processes give the logits and the step of one process, also by accumulated gradients."""

import pytest
import torch
from checkout import SUPPORT
from fresh_process import run_two_processes

import hf_liere


# Kinds, of which several share two processes, whose start takes seconds.
CASES = [("ddp_accumulated,fsdp", "comrope_ld")]
CASES += [
    pytest.param(kind, encoding, marks=pytest.mark.slow)
    for kind, encoding in (
        ("fsdp_small", "comrope_ld"),
        ("ddp", "liere"),
        ("ddp_accumulated", "liere"),
        ("ddp", "rope_mixed"),
        ("ddp", "comrope_ld"),
        ("fsdp", "rope_mixed"),
        ("fsdp", "liere"),
        ("fsdp_accumulated", "liere"),
    )
]
CASES += [pytest.param("zero3", encoding, marks=pytest.mark.slow) for encoding in ("liere", "comrope_ld")]


@pytest.mark.parametrize("kinds, encoding", CASES)
def test_two_processes_take_the_step_of_one(tiny, tmp_path, kinds, encoding):
    if kinds == "zero3":
        pytest.importorskip("deepspeed", reason="deepspeed is an extra of its own")
    # Wide weights, so that generators move by more than the tolerance.
    config = tiny(position_encoding=encoding, block_size=2 if encoding == "rope_mixed" else 4, initializer_range=0.2)
    config.save_pretrained(tmp_path)
    batch = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 2, 0])}
    torch.save(batch, tmp_path / "batch.pt")
    torch.manual_seed(0)
    model = hf_liere.LieREViTForImageClassification(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = model(**batch)
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    arguments = [tmp_path, tmp_path / "batch.pt", tmp_path]
    run_two_processes(SUPPORT / "distributed_worker.py", kinds, *arguments, DS_ACCELERATOR="cpu")
    for kind in kinds.split(","):
        saved = torch.load(tmp_path / f"{kind}.pt")
        # float32, some of it in another basis.
        torch.testing.assert_close(saved["logits"], outputs.logits.detach()[::2], rtol=0, atol=1e-5, msg=kind)
        for name, expected in model.state_dict().items():
            # Means of two halves in float32 instead of one mean.
            torch.testing.assert_close(saved["weights"][name], expected, rtol=0, atol=1e-6, msg=f"{kind}: {name}")
        generators = "liere.rotary_encoding.generators"
        assert (saved["weights"][generators] - before[generators]).abs().max() > 1e-4
