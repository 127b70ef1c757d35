"""Model cards: nothing stands in one that was not measured, and the Hub accepts every one."""

import dataclasses
import re

import pytest
import yaml
from checkout import ROOT
from encoding_cases import OWN_PLAIN
from hub_cards import validate_card
from hub_client import client
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries
from run_records import AGREEING, edit, save_run, write_records
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

import hf_liere
from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.cli import main
from hf_liere.tools.hub.cards import LEADERBOARD_FILE, NO_LICENSE, PICTURE, Card, push_card, render_card
from hf_liere.tools.hub.checked_facts import facts_of_run
from hf_liere.tools.hub.facts import FOLDER, Data, Facts, FactsError, common_facts, load_facts
from hf_liere.tools.hub.publishing import publish, push, verify
from hf_liere.tools.hub.reload_check import outputs


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
def run(tmp_path):
    """A finished run as the training script leaves it, and its weights' digest."""
    return tmp_path / "run", save_run(tmp_path / "run")


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
    write_records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    card = push_card(SavedModel(folder), "me/x", evaluations=[tmp_path / "at_32"])
    rows = re.findall(r"^\| (\d+ × \d+)(?: \(as trained\))? \| 10,000 \| (\d+\.\d)%", card.text, re.M)
    assert rows == [("16 × 16", "62.5"), ("32 × 32", "50.0")]
    assert card.files[PICTURE].startswith(b"\x89PNG") and f"]({PICTURE})" in card.text
    assert len(ModelCard(card.text).data.eval_results) == 4
    card.write(folder)
    assert Card.read(SavedModel(folder)) == card


def test_leaderboards_get_what_was_measured_on_data_of_the_hub(run, tmp_path):
    folder, digest = run
    write_records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    facts = facts_of_run(SavedModel(folder), evaluations=[tmp_path / "at_32"])
    about = "top-1 accuracy at {0} × {0} px, test, 10000 examples"
    measured = [("default", 0.625, about.format(16)), ("default", 0.5, about.format(32))]

    def entries(facts, repo_id="me/x"):
        content = render_card(facts, repo_id).files.get(LEADERBOARD_FILE, b"[]")
        return parse_eval_result_entries(yaml.safe_load(content))

    expected = [EvalResultEntry("uoft-cs/cifar10", task, value, notes=notes) for task, value, notes in measured]
    assert entries(facts) == expected
    named, private = (
        dataclasses.replace(facts, results=[dataclasses.replace(one, data=data) for one in facts.results])
        for data in (Data("GPQA", hub_id="me/gpqa", config="gpqa_diamond"), Data("Mine", split="test"))
    )
    assert {(one.dataset_id, one.task_id) for one in entries(named)} == {("me/gpqa", "gpqa_diamond")}
    unfinished = dataclasses.replace(facts, progress={"step": 1, "max_steps": 2, "metrics": None})
    assert (
        entries(private) == entries(unfinished) == entries(facts, None) == entries(load_facts("liere8_cifar100")) == []
    )


def test_half_an_interval_is_not_shown(run):
    folder, _ = run
    (folder / "eval_results.json").write_text('{"eval_accuracy": 0.625, "eval_accuracy_high": 0.75}')
    assert "| 62.5% |" in push_card(SavedModel(folder), "me/x").text


def test_a_card_without_figures_says_so(run, tmp_path):
    folder, digest = run
    for name in ("eval_results.json", "all_results.json", "run_config.json"):
        (folder / name).unlink()
    (tmp_path / "planned.yaml").write_text("title: A plan\nencoding: liere\ndataset: cifar10\n")
    for facts in (load_facts(tmp_path / "planned.yaml"), None):
        text = push_card(SavedModel(folder), "me/x", facts).text
        assert "**Not evaluated.** Nobody has recorded an accuracy" in text and f"SHA-256 `{digest}`" in text
        assert validate_card(text) == [] and "Undefined" not in text and "None" not in text


def test_facts_of_another_model_are_refused_with_every_contradiction(run, capsys):
    """A small model of ten classes does not become LieRE8 ViT-B/4 on CIFAR-100."""
    folder, _ = run
    assert main(["push", str(folder), "me/x", "--card", "liere8_cifar100"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for contradiction in (
        "block_size is 8 in the facts and 4 in the folder",
        "num_labels is 100 in the facts and 10 in the folder",
        "training data is 'uoft-cs/cifar100' in the facts and 'uoft-cs/cifar10' in the folder",
        "total_train_batch_size is 512 in the facts and 64 in the folder",
        "learning_rate is 0.0001 in the facts and 0.001 in the folder",
    ):
        assert contradiction in error, contradiction
    assert "patch_size" not in error and "position_encoding" not in error


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
    files = {"name": None, "files": ["test.parquet"], "split": None, "samples": 10_000}
    train = files | {"files": ["train.parquet"], "samples": 600}
    edit(folder / "run_config.json", examples={"evaluation": files, "train": train})
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


def test_a_licence_is_chosen_or_said_not_to_be(run, tmp_path):
    folder, _ = run
    card = push_card(SavedModel(folder), "me/x", license="mit")
    assert card.license == "mit" and "The licence of these weights is `mit`." in card.text
    (tmp_path / "facts.yaml").write_text("title: T\nencoding: liere\nlicense: apache-2.0\n")
    facts = load_facts(tmp_path / "facts.yaml")
    assert push_card(SavedModel(folder), "me/x", facts).license == "apache-2.0"
    # A card that lies in the folder, of a user or rendered before.
    for text in ("# Mine\n", push_card(SavedModel(folder), "me/x").text):
        card = Card(text).with_license("mit")
        assert card.license == "mit" and NO_LICENSE not in card.text and card.with_license("mit") == card


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
        write_records(tmp_path / name, digest, accuracy=0.5, size=size)
        edit(tmp_path / name / "run_config.json", image_size=[4, size, size])
    card = push_card(SavedModel(tmp_path / "run"), "me/x", evaluations=[tmp_path / "wide"])
    assert "| 4 × 8 × 8 (as trained) |" in card.text and "| 4 × 16 × 16 |" in card.text and PICTURE in card.files


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


def test_models_of_tokens_and_text_have_cards_without_images(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50))
    hf_liere.patch(llama, hf_liere.RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"))
    tokens = hf_liere.LieRETokensConfig(**sizes, feature_size=2, num_axes=3, num_labels=3)
    for model, lines in (
        (llama, ("pipeline_tag: text-generation", "AutoModelForCausalLM.from_pretrained(", '{"input_ids": ')),
        (hf_liere.LieRETokensForTokenClassification(tokens), ("torch.rand(1, 8, 2)", "torch.rand(1, 8, 3)")),
    ):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        # Figures of other inputs than images are on no card.
        (folder / "eval_results.json").write_text('{"eval_accuracy": 0.5}')
        text = push_card(SavedModel(folder), "me/x").text
        assert validate_card(text) == [] and all(line in text for line in lines), text
        prose = re.sub(r"## Citation.*", "", text, flags=re.DOTALL)
        assert not re.search(r"\b(vision|image|pixel|patches|None|Undefined|50\.0%)", prose), prose
        # A push compares these with what another process computes.
        assert set(outputs(model)) == {"logits.0"}


def test_a_card_of_a_model_that_no_auto_class_loads(run):
    folder, _ = run
    edit(folder / "config.json", architectures=["LieREViTBackbone"])
    text = push_card(SavedModel(folder), "me/x").text
    assert '"modeling_liere.LieREViTBackbone", repository, revision=commit, code_revision=commit' in text
    assert "model = model_class.from_pretrained(repository, revision=commit)" in text


@pytest.mark.slow
def test_the_card_that_was_rendered_is_the_card_on_the_hub(run, hub, tmp_path):
    folder, digest = run
    write_records(tmp_path / "at_32", digest, accuracy=0.5, size=32)
    card = push_card(SavedModel(folder), "tester/model", evaluations=[tmp_path / "at_32"])
    push(folder, "tester/model", card=card, api=client(hub), reload=False)
    files = hub.files("tester/model")
    assert hub.repo("tester/model").read(files["README.md"]).decode() == card.text
    assert {name: hub.repo("tester/model").read(files[name]) for name in (PICTURE, LEADERBOARD_FILE)} == card.files
    verify(folder, "tester/model", api=client(hub))
    assert "weights.json" in files and "run_config.json" in files


def test_the_command_prints_a_card(capsys):
    assert main(["card", "liere64_cifar100"]) == 0
    assert capsys.readouterr().out.strip() == render_card(load_facts("liere64_cifar100")).text.strip()
