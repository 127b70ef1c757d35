"""Model cards: nothing stands in one that was not measured, and the Hub accepts every one."""

import dataclasses
import json
import re

import pytest
import torch
import yaml
from checkout import ROOT
from encoding_cases import OWN_PLAIN
from hub_cards import validate_card
from hub_client import client
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

import hf_liere
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.hub.cards import NO_LICENSE, PICTURE, Card, push_card, render_card
from hf_liere.tools.hub.checked_facts import facts_of_run, is_describable
from hf_liere.tools.hub.facts import FOLDER, Facts, FactsError, common_facts, load_facts
from hf_liere.tools.hub.publishing import publish, push


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
    text = render_card(facts, f"me/{name}").text
    assert validate_card(text) == []
    assert "None" not in text and "{%" not in text and "Undefined" not in text
    paper = common_facts()["papers"][common_facts()["encodings"][facts.encoding]["paper"]]
    assert paper["bibtex"].strip() in text and paper["url"] in text
    data = ModelCard(text).data
    assert ("**Not trained.**" in text) == (not facts.results) == (data.eval_results is None)
    if facts.paper_figures:
        assert "**not of this checkpoint**" in text
        # What a paper reports is no result of ours.
        published = {result.metric_value for result in data.eval_results or []}
        assert not published & {figure.numbers["accuracy"] for figure in facts.paper_figures}


def test_every_encoding_has_a_description_and_a_paper():
    common = common_facts()
    assert set(common["encodings"]) == {"none", "absolute", *OWN_PLAIN}
    assert {encoding["paper"] for encoding in common["encodings"].values()} == set(common["papers"])


@pytest.mark.parametrize("name", [name for name in FACTS if name.split("_")[-1] in ("imagenet", "cifar100", "ucf101")])
def test_facts_of_a_paper_are_its_recipe(name):
    """What a card says of the model and its training, before there is one, is what the recipe in full makes."""
    data, is_comrope = name.split("_")[-1], name.startswith("comrope") and not name.endswith("cifar100")
    recipe = ROOT / "training" / "recipes" / f"{data}{'_comrope' * is_comrope}.yaml"
    facts, recipe = load_facts(name), yaml.safe_load(recipe.read_text(encoding="utf-8"))
    fields = {field.name for field in dataclasses.fields(hf_liere.LieREVideoConfig)}
    # What is not told of the model concerns its training, or is the encoding that the card is about.
    training = {"hidden_dropout_prob", "mlp_dropout_prob", "position_perturbation", "position_encoding"}
    training |= {"token_initializer_range"}
    told = {**facts.recipe, **facts.model}
    for key in set(recipe) & fields - {"position_encoding"}:
        assert key in facts.model or key in training, key
        assert key not in told or told[key] == recipe[key], key
    assert {"coordinates", "block_size"} <= set(facts.model)
    for key in set(recipe) & set(facts.recipe):
        assert facts.recipe[key] == recipe[key], key
    assert all("Table 1," in f"{figure.where}," or "Table 3" in figure.where for figure in facts.paper_figures)


def test_the_hub_validates_a_card_before_anything_is_written(hub, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    card = render_card(load_facts("arrows_liere8"))
    card.with_license("mine").write(folder)
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
    model = hf_liere.LieREViTForImageClassification(tiny(block_size=4, num_labels=10))
    model.save_pretrained(folder)
    digest = SavedModel(folder).digest
    records(folder, digest, accuracy=0.625, size=16)
    return folder, digest


def records(folder, digest, accuracy, size):
    folder.mkdir(exist_ok=True)
    metrics = {"eval_accuracy": accuracy, "eval_accuracy_low": accuracy - 0.01, "eval_accuracy_high": accuracy + 0.01}
    metrics |= {"eval_loss": 1.25, "eval_samples": 10_000}
    (folder / "eval_results.json").write_text(json.dumps(metrics))
    extra = {"train_images_per_second": 481.0, "train_runtime": 1039.2}
    (folder / "all_results.json").write_text(json.dumps(metrics | extra))
    training = {
        "seed": 7,
        "learning_rate": 1e-3,
        "num_train_epochs": 10,
        "per_device_train_batch_size": 64,
        "bf16": False,
    }
    data = {"dataset_name": "uoft-cs/cifar10", "eval_split": None}
    sides = {"name": "uoft-cs/cifar10", "config": None, "files": [], "folder": None}
    examples = {
        "train": sides | {"split": "train", "samples": 49_000},
        "evaluation": sides | {"split": "test", "samples": 10_000},
    }
    augmentation = {"crop_padding": 4, "rand_augment_ops": 0, "rand_augment_magnitude": 9, "mixing_probability": 1.0}
    content = {"training": training, "data": data, "augmentation": augmentation, "image_size": [size, size]}
    content["examples"] = examples
    (folder / "run_config.json").write_text(json.dumps(content))
    libraries = {"torch": "2.15.0", "transformers": "5.23.0"}
    environment = {"libraries": libraries, "world_size": 1, "device": "cpu", "accelerator": None}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "weights.json").write_text(json.dumps({"sha256": digest, "step": 100}))


def test_a_run_gives_its_card(run):
    folder, digest = run
    text = push_card(SavedModel(folder), "me/liere8-cifar10").text
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert ModelCard(text).data.license is None
    assert validate_card(text) == []
    for line in (
        "# liere8-cifar10",
        "| 16 × 16 (as trained) | 10,000 | 62.5% (61.5% – 63.5%) | 1.25 |",
        "One training run (seed 7)",
        "| `learning_rate` | 0.001 |",
        "| `crop_padding` | 4 |",
        "| `block_size` | 4 |",
        f"| parameters | {parameters:,} |",
        "| training | CIFAR-10 | `train` | 49,000 |",
        "| evaluation | CIFAR-10 | `test` | 10,000 |",
        "Measured on CIFAR-10, split `test`;",
        "| images/s in inference | not measured |",
        "torch 2.15.0, transformers 5.23.0, 1 process on cpu",
        f"SHA-256 `{digest}`",
        'repository = "me/liere8-cifar10"',
        "repository, revision=commit, code_revision=commit, trust_remote_code=True",
        NO_LICENSE,
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
    card = push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])
    rows = re.findall(r"^\| (\d+ × \d+)(?: \(as trained\))? \| 10,000 \| (\d+\.\d)%", card.text, re.M)
    assert rows == [("16 × 16", "62.5"), ("32 × 32", "50.0")]
    assert card.pictures[PICTURE].startswith(b"\x89PNG") and f"]({PICTURE})" in card.text
    assert len(ModelCard(card.text).data.eval_results) == 4
    card.write(folder)
    assert Card.read(SavedModel(folder)) == card


def test_half_an_interval_is_not_shown(run):
    folder, _ = run
    (folder / "eval_results.json").write_text('{"eval_accuracy": 0.625, "eval_accuracy_high": 0.75}')
    assert "| 62.5% |" in push_card(SavedModel(folder), "me/x").text


def test_figures_of_other_weights_are_refused(run, tmp_path):
    folder, _ = run
    records(tmp_path / "at_32", "0" * 64, accuracy=0.5, size=32)
    with pytest.raises(FactsError, match="32 × 32 px was measured with weights 000000000000…, the card is for"):
        push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])
    (folder / "weights.json").unlink()
    with pytest.raises(FactsError, match="was measured with unknown weights"):
        push_card(SavedModel(folder), "me/x")
    with pytest.raises(FactsError, match="is not the output of an evaluation"):
        push_card(SavedModel(folder), "me/x", evaluations=[tmp_path])


def test_facts_without_figures_cannot_be_pushed(run, tmp_path, capsys):
    folder, _ = run
    for name in ("eval_results.json", "all_results.json", "run_config.json"):
        (folder / name).unlink()
    (tmp_path / "planned.yaml").write_text("title: A plan\nencoding: liere\ndataset: cifar10\n")
    with pytest.raises(FactsError, match="A plan is not trained"):
        push_card(SavedModel(folder), "me/x", load_facts(tmp_path / "planned.yaml"))
    with pytest.raises(FactsError, match="contains no README.md"):
        push_card(SavedModel(folder), "me/x")
    assert main(["push", str(folder), "me/x", "--card", str(tmp_path / "planned.yaml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hf-liere push: A plan is not trained") and error.count("\n") == 1


def test_facts_of_another_model_are_refused_with_every_contradiction(run, capsys):
    """A small model of ten classes does not become LieRE8 ViT-B/4 on CIFAR-100."""
    folder, _ = run
    assert main(["push", str(folder), "me/x", "--card", "liere8_cifar100"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for contradiction in (
        "block_size is 8 in the facts and 4 in the folder",
        "image_size is 32 in the facts and 16 in the folder",
        "hidden_size is 768 in the facts and 48 in the folder",
        "num_hidden_layers is 12 in the facts and 2 in the folder",
        "num_labels is 100 in the facts and 10 in the folder",
        "training data is 'uoft-cs/cifar100' in the facts and 'uoft-cs/cifar10' in the folder",
        "evaluation data is 'uoft-cs/cifar100' in the facts and 'uoft-cs/cifar10' in the folder",
        "num_train_epochs is 200 in the facts and 10 in the folder",
        "total_train_batch_size is 512 in the facts and 64 in the folder",
        "learning_rate is 0.0001 in the facts and 0.001 in the folder",
    ):
        assert contradiction in error, contradiction
    assert "patch_size" not in error and "position_encoding" not in error


AGREEING = {
    "title": "Small",
    "encoding": "liere",
    "dataset": "cifar10",
    "architecture": "LieREViTForImageClassification",
    "model": {"hidden_size": 48, "image_size": [16, 16], "num_labels": 10},
    "training_data": {"split": "train", "samples": 49_000},
    "recipe": {"num_train_epochs": 10.0, "total_train_batch_size": 64, "optimizer": "planned"},
    "seeds": [7],
    "environment": {"libraries": {"torch": "2.15.0"}},
    "cost": {"train_runtime": 1039.2},
    "notes": "What no record knows.",
}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"encoding": "rope_mixed"}, "encoding is 'rope_mixed' in the facts and 'liere' in the folder"),
        ({"architecture": "LieREViTModel"}, "architecture is 'LieREViTModel' in the facts"),
        ({"model": {"num_labels": 3}}, "num_labels is 3 in the facts and 10 in the folder"),
        ({"model": {"depth": 3}}, "depth is 3 in the facts, and the checkpoint has no such field"),
        ({"cost": {"parameters": 139_594}}, r"parameters is 139594 in the facts and \d+ in the folder"),
        ({"cost": {"train_runtime": 3.0}}, "train_runtime is 3.0 in the facts and 1039.2 in the folder"),
        (
            {"dataset": {"name": "flowers"}},
            "evaluation data is 'flowers' in the facts and 'uoft-cs/cifar10' in the",
        ),
        (
            {"training_data": {"samples": 50_000}},
            "training data: samples is 50000 in the facts and 49000 in the folder",
        ),
        ({"evaluation_data": {"split": "train"}}, "evaluation data: split is 'train' in the facts and 'test' in the"),
        ({"recipe": {"crop_padding": 0}}, "crop_padding is 0 in the facts and 4 in the folder"),
        ({"seeds": [0]}, r"seeds is \[0\] in the facts and \[7\] in the folder"),
        (
            {"environment": {"libraries": {"torch": "2.9.0"}}},
            "torch is '2.9.0' in the facts and '2.15.0' in the folder",
        ),
        ({"weights": "0" * 64}, "weights is '0000000"),
        ({"base_model": "google/vit"}, "base_model is 'google/vit' in the facts and None in the folder"),
        ({"results": [{"image_size": 16, "accuracy": 0.99}]}, "accuracy at 16 × 16 px is 0.99 in the facts and 0.625"),
    ],
)
def test_every_fact_is_compared(run, tmp_path, change, message):
    folder, _ = run
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(AGREEING | change))
    with pytest.raises(FactsError, match=f"The facts of 'Small' contradict .*{message}"):
        push_card(SavedModel(folder), "me/x", load_facts(tmp_path / "facts.yaml"))


def test_facts_that_agree_and_records_together(run, tmp_path):
    """The records tell what was run, the facts the rest; planned settings do not pass for those of the run."""
    folder, _ = run
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump(AGREEING))
    known = facts_of_run(SavedModel(folder), load_facts(tmp_path / "facts.yaml"))
    assert known.title == "Small" and known.notes == "What no record knows."
    assert known.recipe["learning_rate"] == 1e-3 and "optimizer" not in known.recipe
    assert known.model["intermediate_size"] == 64 and known.evaluation_data.samples == 10_000


def test_a_figure_is_attached_to_the_data_that_the_record_names_and_to_no_other(run, tmp_path):
    """Files have no other name than their own, whatever the facts call them."""
    folder, _ = run
    content = json.loads((folder / "run_config.json").read_text())
    files = {"name": None, "files": ["test.parquet"], "split": None, "samples": 10_000}
    content["examples"]["evaluation"] = files
    content["examples"]["train"] = files | {"files": ["train.parquet"], "samples": 600}
    (folder / "run_config.json").write_text(json.dumps(content))
    text = push_card(SavedModel(folder), "me/x").text
    for line in ("| training | `train.parquet` |  | 600 |", "| evaluation | `test.parquet` |  | 10,000 |"):
        assert line in text
    data = ModelCard(text).data
    assert data.get("datasets") is None
    assert {(one.dataset_name, one.dataset_type) for one in data.eval_results} == {("test.parquet", "custom")}
    for dataset in ("cifar10", {"name": "CIFAR-10", "files": ["test.parquet"]}):
        (tmp_path / "facts.yaml").write_text(yaml.safe_dump({"title": "T", "encoding": "liere", "dataset": dataset}))
        with pytest.raises(
            FactsError, match="evaluation data is '(uoft-cs/cifar10|CIFAR-10)' in the facts and 'test.parquet' in"
        ):
            push_card(SavedModel(folder), "me/x", load_facts(tmp_path / "facts.yaml"))
    (folder / "run_config.json").write_text('{"image_size": [16, 16]}')
    (tmp_path / "facts.yaml").write_text("title: T\nencoding: liere\ndataset: cifar10\n")
    with pytest.raises(FactsError, match="evaluation data is 'uoft-cs/cifar10' in the facts and 'not recorded' in"):
        push_card(SavedModel(folder), "me/x", load_facts(tmp_path / "facts.yaml"))


def test_evaluations_of_other_data_or_under_a_condition_are_refused(run, tmp_path):
    folder, digest = run
    records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    content = json.loads((tmp_path / "at_32" / "run_config.json").read_text())

    def changed(**groups):
        (tmp_path / "at_32" / "run_config.json").write_text(json.dumps(content | groups))
        return pytest.raises(FactsError, match=groups.pop("match"))

    other = {"evaluation": content["examples"]["evaluation"] | {"name": "mnist"}}
    with changed(examples=other, match="data is 'uoft-cs/cifar10' in .* and 'mnist' in "):
        push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])
    with changed(condition={"evaluation_shuffle": "patches"}, match="with evaluation_shuffle patches; accepted: eval"):
        push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])
    with changed(model={"coordinates": "index"}, match="coordinates is 'index' in .* and 'train_grid' in config.json"):
        push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])


def test_a_licence_is_chosen_or_said_not_to_be(run, tmp_path):
    folder, _ = run
    card = push_card(SavedModel(folder), "me/x", license="mit")
    assert card.license == "mit" and "The licence of these weights is `mit`." in card.text
    (tmp_path / "facts.yaml").write_text("title: T\nencoding: liere\nlicense: apache-2.0\n")
    facts = load_facts(tmp_path / "facts.yaml")
    assert push_card(SavedModel(folder), "me/x", facts).license == "apache-2.0"
    with pytest.raises(FactsError, match="names the licence 'apache-2.0', not 'mit'; change one of them"):
        push_card(SavedModel(folder), "me/x", facts, license="mit")
    # A card that lies in the folder, of a user or rendered before.
    for text in ("# Mine\n", push_card(SavedModel(folder), "me/x").text):
        card = Card(text).with_license("mit")
        assert card.license == "mit" and NO_LICENSE not in card.text and card.with_license("mit") == card
        with pytest.raises(FactsError, match="names the licence 'mit', not 'gpl-3.0'"):
            card.with_license("gpl-3.0")


def test_a_table_beside_the_rotations_is_told(tiny, tmp_path):
    for table in (False, True):
        config = tiny(position_encoding="rope_mixed", use_absolute_position_embeddings=table)
        hf_liere.LieREViTForImageClassification(config).save_pretrained(tmp_path / str(table))
        facts = facts_of_run(SavedModel(tmp_path / str(table)))
        assert ("adds a table of absolute positions" in render_card(facts).text) == table


def test_a_card_of_other_weights_is_not_pushed_with_these(run):
    folder, digest = run
    push_card(SavedModel(folder), "me/x").write(folder)
    (folder / "eval_results.json").unlink()
    assert push_card(SavedModel(folder), "me/x").text
    hf_liere.LieREViTModel(hf_liere.LieREViTConfig.from_pretrained(folder)).save_pretrained(folder)
    with pytest.raises(FactsError, match=f"is for weights {digest[:12]}…, not for {SavedModel(folder).digest[:12]}…"):
        push_card(SavedModel(folder), "me/x")


def test_a_video_is_measured_at_its_height(tiny_video, tmp_path):
    """The size of a clip starts with its frames; a table and a plot by image size do not."""
    model = hf_liere.LieREVideoForVideoClassification(tiny_video(num_labels=10))
    model.save_pretrained(tmp_path / "run")
    digest = SavedModel(tmp_path / "run").digest
    for name, size in (("run", 8), ("wide", 16)):
        records(tmp_path / name, digest, accuracy=0.5, size=size)
        path = tmp_path / name / "run_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"image_size": [4, size, size]}))
    card = push_card(SavedModel(tmp_path / "run"), "me/x", evaluations=[tmp_path / "wide"])
    assert "| 4 × 8 × 8 (as trained) |" in card.text and "| 4 × 16 × 16 |" in card.text and PICTURE in card.pictures


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("eval_results.json", "{", "eval_results.json is not a json file"),
        ("eval_results.json", "[1]", "eval_results.json contains a list; accepted: a json object"),
        (
            "eval_results.json",
            '{"eval_accuracy": NaN}',
            "{'accuracy': nan}: accepted is finite numbers, accuracy as a share of 1",
        ),
        (
            "eval_results.json",
            '{"eval_accuracy": "high"}',
            "{'accuracy': 'high'}: accepted is finite numbers, accuracy as a share of 1",
        ),
        (
            "eval_results.json",
            '{"eval_map": 0.5}',
            "numbers {}: accepted is finite numbers, accuracy as a share of 1",
        ),
        (
            "eval_results.json",
            '{"eval_accuracy": 0.5, "eval_loss": Infinity}',
            "'loss': inf}: accepted is finite numbers",
        ),
        ("run_config.json", '{"training": 3}', "run_config.json: training 3: accepted is a json object"),
        ("run_config.json", '{"model_name_or_path": 3}', "run_config.json: model_name_or_path 3: accepted is a name"),
        ("weights.json", '{"sha256": 3}', "weights 3: accepted is the digest of the evaluated weights"),
        ("config.json", "{}", "config.json is not a configuration of hf_liere: None is none of our models"),
        ("config.json", '{"architectures": ["LieREViTModel"], "hidden_size": "wide"}', "is not a configuration"),
        ("weights.json", "not json", "weights.json is not a json file"),
    ],
)
def test_records_that_cannot_be_read(run, name, content, message):
    folder, _ = run
    (folder / name).write_text(content)
    with pytest.raises(FactsError, match=message):
        push_card(SavedModel(folder), "me/x")


def test_a_card_of_a_run_that_goes_on(run):
    folder, _ = run
    progress = {"step": 8, "max_steps": 100, "metrics": None}
    text = render_card(facts_of_run(SavedModel(folder), progress=progress), "me/x").text
    assert "**In training**, step 8 of 100. These weights have not been evaluated." in text
    assert "62.5%" not in text and ModelCard(text).data.eval_results is None


def test_a_card_of_an_adapter(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    clip = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=4))
    hf_liere.patch(clip, hf_liere.RotaryPatchConfig(position_encoding="comrope_ld"))
    hf_liere.save_rotary(clip, tmp_path)
    text = push_card(
        SavedModel(tmp_path), "me/x", Facts("A", "comrope_ld", base_model="openai/clip-vit-base-patch16")
    ).text
    assert 'load_rotary(AutoModel.from_pretrained("openai/clip-vit-base-patch16"), repository, revision=' in text
    assert "yu2025comrope" in text and "trust_remote_code" not in text and "adds a table" in text
    with pytest.raises(FactsError, match="encoding is 'liere' in the facts and 'comrope_ld' in"):
        push_card(SavedModel(tmp_path), "me/x", Facts("A", "liere"))


def test_a_card_of_an_adapter_says_what_its_files_say(tmp_path):
    """And nothing of images, of a table of positions or of accuracy, for rotations of a language model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50))
    hf_liere.patch(llama, hf_liere.RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"))
    hf_liere.save_rotary(llama, tmp_path)
    text = push_card(SavedModel(tmp_path), "me/x", license="mit").text
    parameters = sum(parameter.numel() for parameter in load_file(tmp_path / "rotary.safetensors").values())
    for line in (
        "license: mit",
        "> **Not evaluated.** Nobody has recorded an accuracy of these weights.",
        "Rotations for the attention of a pretrained `llama` with 3 layers of 2 heads. RoPE-Mixed: query and key",
        "These files do not name it: replace `BASE`",
        f"| parameters | {parameters} |",
    ):
        assert line in text, line
    prose = re.sub(r"## Citation.*", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(vision|image|patches|table|absolute)", prose), prose


@pytest.mark.parametrize(
    "architecture, described",
    [
        ("LieREViTForImageClassification", True),
        # Of classes that take one kind of input, transformers gives its name, of others a tuple.
        ("RotaryVideoMAEForVideoClassification", True),
        ("RotaryCLIPModel", True),
        ("RotaryLlamaForCausalLM", False),
        ("LieRETokensForTokenClassification", False),
    ],
)
def test_models_of_images_and_videos_have_cards(tmp_path, architecture, described):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert is_describable(SavedModel(tmp_path)) == described


def test_a_card_of_a_model_that_no_auto_class_loads(run):
    folder, _ = run
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LieREViTBackbone"]}))
    text = push_card(SavedModel(folder), "me/x").text
    assert '"modeling_liere.LieREViTBackbone", repository, revision=commit, code_revision=commit' in text
    assert "model = model_class.from_pretrained(repository, revision=commit)" in text


@pytest.mark.slow
def test_the_card_that_was_rendered_is_the_card_on_the_hub(run, hub, tmp_path):
    folder, digest = run
    records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    card = push_card(SavedModel(folder), "tester/model", evaluations=[tmp_path / "at_32"])
    push(folder, "tester/model", card=card, api=client(hub), reload=False)
    files = hub.files("tester/model")
    assert hub.repo("tester/model").read(files["README.md"]).decode() == card.text
    assert hub.repo("tester/model").read(files[PICTURE]) == card.pictures[PICTURE]
    assert "weights.json" in files and "run_config.json" in files


@pytest.mark.parametrize(
    "change, message",
    [
        ({"accuraccy": 1}, r"facts.yaml: unknown key \['accuraccy'\]; accepted: title, encoding"),
        ({"encoding": "sine"}, "encoding 'sine': accepted are liere, rope_mixed"),
        ({"dataset": "mnist"}, "dataset 'mnist': accepted are imagenet"),
        ({"paper_figures": [{"image_size": 224, "accuracy": 69.6, "where": "Table 2"}]}, "69.6% is 0.696"),
        ({"title": None}, "facts.yaml: title None: accepted is a heading"),
        ({"model": 3}, "facts.yaml: model 3: accepted is configuration fields"),
        (
            {"results": [{"image_size": 224, "accuracy": 0.5, "low": 0.4}]},
            r"facts.yaml: results: unknown key \['low'\]; accepted: image_size, numbers",
        ),
        ({"results": [{"accuracy": 0.5}]}, "facts.yaml: results: image_size None: accepted is a number of pixels"),
        (
            {"dataset": {"name": "x", "files": "a.parquet"}},
            "facts.yaml: dataset: files 'a.parquet': accepted is a list of",
        ),
        ({"dataset": {"name": "x", "sise": 3}}, r"facts.yaml: dataset: unknown key \['sise'\]; accepted: name, type"),
    ],
)
def test_facts_that_mean_nothing(tmp_path, change, message):
    content = {"title": "T", "encoding": "liere", "dataset": "cifar10"} | change
    (tmp_path / "facts.yaml").write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(FactsError, match=message):
        load_facts(tmp_path / "facts.yaml")


def test_facts_that_are_no_yaml(tmp_path, capsys):
    (tmp_path / "facts.yaml").write_text("title: [\nencoding: liere\n")
    assert main(["card", str(tmp_path / "facts.yaml")]) == 1
    error = capsys.readouterr().err
    assert "facts.yaml is not a readable yaml file, line " in error and error.count("\n") == 1


def test_facts_that_do_not_exist():
    with pytest.raises(FactsError, match="No facts 'liere9'; accepted: a yaml file or one of arrows_absolute"):
        load_facts("liere9")


def test_the_command_prints_a_card(capsys):
    assert main(["card", "liere64_cifar100"]) == 0
    assert capsys.readouterr().out.strip() == render_card(load_facts("liere64_cifar100")).text.strip()
