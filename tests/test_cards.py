"""Model cards: nothing stands in one that was not measured, and the Hub accepts every one."""

import dataclasses
import json
import re

import pytest
import torch
import yaml
from hub_client import client, online
from hub_server import HubServer
from hub_storage import validate_card
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import hf_liere
from hf_liere.cards import (
    FOLDER,
    PICTURE,
    Card,
    FactsError,
    common_facts,
    facts_of_run,
    load_facts,
    push_card,
    render,
)
from hf_liere.cli import main
from hf_liere.hub import HubError
from hf_liere.publishing import publish, push, saved_weights_digest


FACTS = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "common")
INTENDED = {
    f"{encoding}_{data}"
    for encoding in ("liere8", "liere64", "rope_mixed", "comrope_ap", "comrope_ld")
    for data in ("imagenet", "cifar100", "ucf101")
}
INTENDED |= {f"arrows_{encoding}" for encoding in ("absolute", "rope_mixed", "liere8", "comrope_ld")}
INTENDED |= {f"converted_rope_mixed_deit_{size}" for size in ("small", "base", "large")}


def test_there_are_facts_for_every_checkpoint():
    assert set(FACTS) == INTENDED


@pytest.mark.parametrize("name", FACTS)
def test_facts_render_and_the_hub_accepts_them(name):
    facts = load_facts(name)
    config_class = hf_liere.LieREVideoConfig if "num_frames" in facts.model else hf_liere.LieREViTConfig
    config_class(**facts.model)
    text = render(facts, f"me/{name}").text
    assert validate_card(text, "model") == ([], [])
    assert "None" not in text and "{%" not in text and "Undefined" not in text
    paper = common_facts()["papers"][common_facts()["encodings"][facts.encoding]["paper"]]
    assert paper["bibtex"].strip() in text and paper["url"] in text
    data = ModelCard(text).data
    assert ("**Not trained.**" in text) == (not facts.results) == (data.eval_results is None)
    if facts.paper_figures:
        assert "**not of this checkpoint**" in text
        # What a paper reports is no result of ours.
        published = {result.metric_value for result in data.eval_results or []}
        assert not published & {figure["accuracy"] for figure in facts.paper_figures}


def test_the_hub_validates_a_card_before_anything_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    with HubServer(tmp_path / "hub") as hub:
        online(monkeypatch, hub, tmp_path / "home")
        card = render(load_facts("arrows_liere8"))
        Card(card.text.replace("license: apache-2.0", "license: mine")).write(folder)
        with pytest.raises(HubError, match='"license" must be one of'):
            publish(folder, "tester/model", message="Never", api=client(hub))
        assert not hub.count("/commit/")
        card.write(folder)
        publish(folder, "tester/model", message="Card", api=client(hub))
        assert hub.count("validate-yaml") == 2


@pytest.fixture
def run(tiny, tmp_path):
    """A finished run as the training script leaves it, and its weights' digest."""
    folder = tmp_path / "run"
    torch.manual_seed(0)
    model = hf_liere.LieREViTForImageClassification(tiny(block_size=4))
    model.save_pretrained(folder)
    digest = saved_weights_digest(folder)
    records(folder, digest, accuracy=0.625, size=16)
    return folder, digest


def records(folder, digest, accuracy, size):
    folder.mkdir(exist_ok=True)
    metrics = {"eval_accuracy": accuracy, "eval_accuracy_low": accuracy - 0.01, "eval_accuracy_high": accuracy + 0.01}
    metrics |= {"eval_loss": 1.25, "eval_samples": 10_000}
    (folder / "eval_results.json").write_text(json.dumps(metrics))
    extra = {"parameters": 139_594, "train_images_per_second": 481.0, "train_runtime": 1039.2}
    (folder / "all_results.json").write_text(json.dumps(metrics | extra))
    training = {
        "seed": 7,
        "learning_rate": 1e-3,
        "num_train_epochs": 10,
        "per_device_train_batch_size": 64,
        "bf16": False,
    }
    data = {"dataset_name": "uoft-cs/cifar10", "eval_split": None}
    augmentation = {"crop_padding": 4, "rand_augment_ops": 0, "rand_augment_magnitude": 9, "mixing_probability": 1.0}
    content = {"training": training, "data": data, "augmentation": augmentation, "image_size": [size, size]}
    (folder / "run_config.json").write_text(json.dumps(content))
    libraries = {"torch": "2.15.0", "transformers": "5.23.0"}
    environment = {"libraries": libraries, "world_size": 1, "device": "cpu", "accelerator": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "weights.json").write_text(json.dumps({"sha256": digest, "step": 100}))


def test_a_run_gives_its_card(run):
    folder, digest = run
    text = push_card(folder, digest, "me/liere8-cifar10").text
    assert validate_card(text, "model") == ([], [])
    for line in (
        "# liere8-cifar10",
        "| 16 × 16 (as trained) | 10,000 | 62.5% (61.5% – 63.5%) | 1.25 |",
        "One training run (seed 7)",
        "| `learning_rate` | 0.001 |",
        "| `crop_padding` | 4 |",
        "| `block_size` | 4 |",
        "| parameters | 139,594 |",
        "| images/s in inference | not measured |",
        "torch 2.15.0, transformers 5.23.0, 1 process on cpu",
        f"SHA-256 `{digest}`",
        'AutoModelForImageClassification.from_pretrained("me/liere8-cifar10", revision=commit)',
        '"me/liere8-cifar10", revision=commit, code_revision=commit, trust_remote_code=True',
        "Accuracy at other image sizes: not measured.",
        "ostmeier2025liere",
    ):
        assert line in text, line
    assert "rand_augment" not in text and "bf16" not in text and "top-5" not in text
    accuracy, loss = ModelCard(text).data.eval_results
    assert accuracy.metric_value == 0.625 and accuracy.dataset_type == "uoft-cs/cifar10"
    assert accuracy.metric_args == {
        "image_size": [16, 16],
        "samples": 10_000,
        "low": 0.615,
        "high": 0.635,
        "confidence": 0.95,
    }
    assert loss.metric_type == "loss" and loss.metric_value == 1.25


def test_evaluations_at_other_sizes_make_a_table_and_a_plot(run, tmp_path):
    folder, digest = run
    records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    card = push_card(folder, digest, "me/x", evaluations=[tmp_path / "at_32"])
    rows = re.findall(r"^\| (\d+ × \d+)(?: \(as trained\))? \| 10,000 \| (\d+\.\d)%", card.text, re.M)
    assert rows == [("16 × 16", "62.5"), ("32 × 32", "50.0")]
    assert card.pictures[PICTURE].startswith(b"\x89PNG") and f"]({PICTURE})" in card.text
    assert len(ModelCard(card.text).data.eval_results) == 4
    card.write(folder)
    assert Card.read(folder) == card


def test_figures_of_other_weights_are_refused(run, tmp_path):
    folder, digest = run
    records(tmp_path / "at_32", "0" * 64, accuracy=0.5, size=32)
    with pytest.raises(FactsError, match="32 × 32 px was measured with weights 000000000000…, the card is for"):
        push_card(folder, digest, "me/x", evaluations=[tmp_path / "at_32"])
    (folder / "weights.json").unlink()
    with pytest.raises(FactsError, match="was measured with unknown weights"):
        push_card(folder, digest, "me/x")
    with pytest.raises(FactsError, match="is no output of an evaluation"):
        push_card(folder, digest, "me/x", evaluations=[tmp_path])


def test_facts_without_figures_cannot_be_pushed(run, tmp_path, capsys):
    folder, digest = run
    for name in ("eval_results.json", "all_results.json", "run_config.json"):
        (folder / name).unlink()
    with pytest.raises(FactsError, match="ViT-B/16 on ImageNet-1k is not trained"):
        push_card(folder, digest, "me/x", load_facts("liere8_imagenet"))
    with pytest.raises(FactsError, match="holds no README.md"):
        push_card(folder, digest, "me/x")
    assert main(["push", str(folder), "me/x", "--card", "liere8_imagenet"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hf-liere push: LieRE8 ViT-B/16 on ImageNet-1k is not trained") and error.count("\n") == 1


def test_facts_and_records_together(run):
    """The records tell what was run, the facts the rest; planned settings do not pass for those of the run."""
    folder, digest = run
    facts = load_facts("comrope_ld_imagenet")
    known = facts_of_run(folder, digest, facts)
    assert known.title == facts.title and known.paper_figures == facts.paper_figures
    assert known.recipe["num_train_epochs"] == 10 and "total_batch_size" not in known.recipe
    assert known.model["hidden_size"] == 48 and known.recipe_source is None and facts.recipe["num_train_epochs"] == 200


def test_a_card_of_a_run_that_goes_on(run):
    folder, digest = run
    progress = {"step": 8, "max_steps": 100, "metrics": None}
    text = render(facts_of_run(folder, digest, progress=progress), "me/x").text
    assert "**In training**, step 8 of 100. These weights have not been evaluated." in text
    assert "62.5%" not in text and ModelCard(text).data.eval_results is None


def test_a_card_of_an_adapter(tmp_path):
    (tmp_path / "rotary_config.json").write_text(json.dumps({"rotary_patch": {"position_encoding": "comrope_ld"}}))
    save_file({"0.generators": torch.zeros(1)}, tmp_path / "rotary.safetensors")
    facts = facts_of_run(tmp_path, saved_weights_digest(tmp_path))
    text = render(dataclasses.replace(facts, base_model="openai/clip-vit-base-patch16"), "me/x").text
    assert 'load_rotary(AutoModel.from_pretrained("openai/clip-vit-base-patch16"), "me/x", revision=commit)' in text
    assert "yu2025comrope" in text and "trust_remote_code" not in text


def test_a_card_of_a_model_that_no_auto_class_loads(run):
    folder, digest = run
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LieREViTBackbone"]}))
    text = push_card(folder, digest, "me/x").text
    assert "from hf_liere.modeling_liere import LieREViTBackbone\nfrom transformers import AutoImageProcessor\n" in text
    assert 'model = LieREViTBackbone.from_pretrained("me/x", revision=commit)' in text


def test_the_card_that_was_rendered_is_the_card_on_the_hub(run, tmp_path, monkeypatch):
    folder, digest = run
    records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    card = push_card(folder, digest, "tester/model", evaluations=[tmp_path / "at_32"])
    with HubServer(tmp_path / "hub") as hub:
        online(monkeypatch, hub, tmp_path / "home")
        push(folder, "tester/model", card=card, api=client(hub), reload=False)
        files = hub.files("tester/model")
        assert hub.repo("tester/model").read(files["README.md"]).decode() == card.text
        assert hub.repo("tester/model").read(files[PICTURE]) == card.pictures[PICTURE]
        assert "weights.json" in files and "run_config.json" in files


@pytest.mark.parametrize(
    "change, message",
    [
        ({"accuraccy": 1}, r"facts.yaml: \['accuraccy'\] means nothing; accepted: title, encoding"),
        ({"encoding": "sine"}, "encoding 'sine': accepted are liere, rope_mixed"),
        ({"dataset": "mnist"}, "dataset 'mnist': accepted are imagenet"),
        ({"paper_figures": [{"image_size": 224, "accuracy": 69.6, "where": "Table 2"}]}, "69.6% is 0.696"),
        ({"title": None}, "facts.yaml: title missing"),
    ],
)
def test_facts_that_mean_nothing(tmp_path, change, message):
    content = {"title": "T", "encoding": "liere", "dataset": "cifar10"} | change
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(FactsError, match=message):
        load_facts(tmp_path / "facts.yaml")


def test_facts_that_do_not_exist():
    with pytest.raises(
        FactsError, match="There are no facts 'liere9'; accepted: a yaml file or one of arrows_absolute"
    ):
        load_facts("liere9")


def test_the_command_prints_a_card(capsys):
    assert main(["card", "liere64_cifar100"]) == 0
    assert capsys.readouterr().out.strip() == render(load_facts("liere64_cifar100")).text.strip()
