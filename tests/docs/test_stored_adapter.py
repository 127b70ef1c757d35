"""The stored adapter for DINOv2: against its card, by hand on random weights, and on test images if its base exists."""

import hashlib
import json
import re

import datasets
import pytest
import torch
from checkout import ROOT
from fresh_process import run_code
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoImageProcessor, Dinov2Config, Dinov2ForImageClassification

import hf_liere


STORED = ROOT / "training" / "checkpoints" / "dinov2_cifar100"
# Written by docs/real_weights.md.
BASE = ROOT / "outputs" / "dinov2"
# The images of the evaluation, not part of the repository.
CIFAR100 = ROOT.parent / "shared" / "data" / "cifar100" / "test-00000-of-00001.parquet"
SIZES = {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518, "patch_size": 14, "use_mask_token": False}

needs_base = pytest.mark.skipif(not BASE.is_dir(), reason="outputs/dinov2, of docs/real_weights.md, does not exist")
with torch.device("meta"):
    LAYERS = [name for name, _ in Dinov2ForImageClassification(Dinov2Config(**SIZES)).named_modules()]
names_fit = pytest.mark.skipif(
    not any(name.endswith("q_proj") for name in LAYERS),
    reason="this release of transformers has other names in DINOv2 than the one that saved the adapter",
)


@pytest.fixture(scope="module")
def evaluations():
    return json.loads((STORED / "evaluations.json").read_text())


def test_it_is_small_and_the_one_that_was_measured(evaluations):
    files = {path.name: path for path in STORED.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) < 4_000_000
    found = {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in evaluations["sha256"]}
    assert found == evaluations["sha256"] and set(found) == {"adapter_model.safetensors", "rotary.safetensors"}
    # Generators are not rounded.
    types = {name: {value.dtype for value in load_file(files[name]).values()} for name in found}
    assert types == {"adapter_model.safetensors": {torch.float16}, "rotary.safetensors": {torch.float32}}
    assert json.loads(files["adapter_config.json"].read_text())["base_model_name_or_path"] == "facebook/dinov2-small"


def test_its_card_states_what_was_measured(evaluations):
    card = ModelCard.load(STORED / "README.md")
    for one in evaluations["resolutions"]:
        shown = "{accuracy:.1%} ({accuracy_low:.1%} – {accuracy_high:.1%})".format(**one)
        (row,) = (line for line in card.text.splitlines() if line.startswith(f"| {one['model']} |"))
        assert row.endswith(f"| {one['computed_in']} | {one['samples']:,} | {shown} |")
    (stated,) = card.data.eval_results
    assert stated.metric_value == evaluations["resolutions"][0]["accuracy"]


@names_fit
def test_it_loads_onto_another_dinov2_of_the_same_shape(tmp_path):
    """In a fresh process, without a download; LoRA and classifier against their matrices, added by hand."""
    torch.manual_seed(0)
    plain = Dinov2ForImageClassification(Dinov2Config(**SIZES, num_labels=100)).eval()
    plain.save_pretrained(tmp_path / "random")
    pixels = torch.randn(2, 3, 98, 98)
    torch.save(pixels, tmp_path / "pixels.pt")
    lines = run_code(
        f"""
        import torch
        from transformers import Dinov2ForImageClassification

        stored = {str(STORED)!r}
        try:
            hf_liere.load_peft(stored, "random")
        except ValueError as error:
            print(error)
        base = Dinov2ForImageClassification.from_pretrained("random")
        hf_liere.load_rotary(base, stored, check_weights=False)
        model = hf_liere.load_peft(stored, base).eval()
        with torch.no_grad():
            torch.save(model(pixel_values=torch.load("pixels.pt")).logits, "logits.pt")
        """,
        tmp_path,
    )
    assert any("was trained on other weights" in line for line in lines)
    values = {name: value.float() for name, value in load_file(STORED / "adapter_model.safetensors").items()}
    config = json.loads((STORED / "adapter_config.json").read_text())
    weights, scale = plain.state_dict(), config["lora_alpha"] / config["r"]
    adapted = {name.split(".lora_")[0] for name in values if ".lora_" in name}
    assert len(adapted) == 4 * 12 and len(values) == 2 * len(adapted) + 2
    with torch.no_grad():
        for name in adapted:
            change = scale * values[f"{name}.lora_B.weight"] @ values[f"{name}.lora_A.weight"]
            weights[f"{name.removeprefix('base_model.model.')}.weight"] += change
        for name in ("classifier.weight", "classifier.bias"):
            weights[name].copy_(values[f"base_model.model.{name}"])
        unrotated = plain(pixels).logits
        logits = hf_liere.load_rotary(plain, STORED, check_weights=False)(pixels).logits
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    # The order of float32 sums differs.
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-4 * logits.abs().max().item())
    assert (logits - unrotated).abs().max() > 100 * (found - logits).abs().max()


@names_fit
@needs_base
def test_its_accuracy_on_the_first_images_is_that_of_the_evaluation():
    """Kernels that round otherwise may decide an even image or two."""
    if not CIFAR100.is_file():
        pytest.skip(f"{CIFAR100} does not exist")
    rows = datasets.Dataset.from_parquet(str(CIFAR100))
    assert json.loads((STORED / "labels.json").read_text())["names"] == rows.features["label"].names
    model = hf_liere.load_peft(STORED, str(BASE)).eval()
    processor = AutoImageProcessor.from_pretrained(STORED)
    right, count = 0, 500
    for batch in rows.take(count).iter(100):
        with torch.no_grad():
            answers = model(**processor(batch["image"], return_tensors="pt")).logits.argmax(1)
        right += int((answers == torch.tensor(batch["label"])).sum())
    ranks = load_file(STORED / "eval_examples.safetensors")["98_ranks"]
    assert len(ranks) == 5_000 and right == pytest.approx(int((ranks[:count] < 1).sum()), abs=2)


@names_fit
@needs_base
def test_the_code_of_its_card_and_its_page_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (STORED / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code in (ROOT / "docs" / "real_weights.md").read_text(encoding="utf-8")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("rocket: ")
