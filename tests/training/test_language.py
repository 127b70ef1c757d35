"""training/language_modeling.py on tiny models and texts: blocks, perplexities, what is learnt, saved and resumed."""

import json
import math

import datasets
import numpy as np
import pytest
import torch
import transformers
from checkout import ROOT
from fresh_process import run_warm
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_liere import is_patched, load_rotary, rotary_parameters, unpatch
from training.data.augmentation import IGNORED_LABEL, PADDING
from training.data.texts import TextDataArguments, TokenBlocks, TokenStream, byte_tokenizer, collate_blocks, load_texts
from training.language_modeling import main


SCRIPT = ROOT / "training" / "language_modeling.py"
TINY_RUN = "--use_cpu true --disable_tqdm true --per_device_train_batch_size 4 --do_train --do_eval".split()
TINY_RUN += "--max_length 16 --evaluation_lengths 32 64 --max_steps 2".split()
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "tie_word_embeddings": True}
PLANES = "--position_encoding rope_mixed".split()
BLOCKS = "--position_encoding liere --block_size 4".split()
WEIGHTS = "checkpoint-2/model.safetensors"


def documents(count, seed=0):
    """Texts of words, each of another length."""
    generator = np.random.default_rng(seed)
    words = ["def", "return", "größer", "x", "=", "1\n", "für", "in", "語"]
    return [" ".join(generator.choice(words, 20 + 3 * number)) for number in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 12), ("validation", 5)):
        datasets.Dataset.from_dict({"text": documents(count, len(split))}).to_parquet(folder / f"{split}.parquet")
    return ["--train_files", str(folder / "train.parquet"), "--validation_files", str(folder / "validation.parquet")]


def train(folder, data, *flags):
    return main(["--output_dir", str(folder), *data, *TINY_RUN, *map(str, flags)])


def new_model(folder, data, model_type="llama", *flags):
    overrides = json.dumps(TINY | {"initializer_range": 0.2})
    return train(folder, data, "--model_type", model_type, "--config_overrides", overrides, *flags)


@pytest.fixture(scope="module")
def llama(data, tmp_path_factory):
    """The folder of a trained model with tied embeddings, and its metrics."""
    folder = tmp_path_factory.mktemp("llama") / "run"
    return folder, new_model(folder, data)


def perplexity(model, folder, data, length):
    """Of blocks of this length, by transformers' own loss and without the script's packing."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = datasets.load_dataset("parquet", data_files=data[3], split="train")["text"]
    stream = [token for text in rows for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    blocks = torch.tensor([stream[start : start + length] for start in range(0, len(stream) - length + 1, length)])
    with torch.no_grad():
        return math.exp(model.eval()(input_ids=blocks, labels=blocks).loss.item())


def assert_same_perplexities(metrics, model, folder, data):
    for length, key in ((16, "eval_perplexity"), (32, "eval_32_perplexity"), (64, "eval_64_perplexity")):
        # Means of float32 losses in another order.
        assert metrics[key] == pytest.approx(perplexity(model, folder, data, length), rel=1e-5)
        assert metrics[f"{key}_low"] < metrics[key] < metrics[f"{key}_high"]


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_of_any_text_come_back(text):
    tokenizer = byte_tokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert len(tokens) == len(text.encode()) and len(tokenizer) == 257


@pytest.mark.parametrize("origin", ["parquet", "json", "files", "folder", "split_folder", "name"])
def test_texts_of_every_origin_are_packed_alike(origin, tmp_path):
    texts, tokenizer = documents(4), byte_tokenizer()
    table = datasets.Dataset.from_dict({"content": texts, "number": list(range(4))})
    table.to_parquet(tmp_path / "t.parquet")
    for file in ("t.jsonl", "repository/data/train.jsonl"):
        table.to_json(tmp_path / file, force_ascii=False)
    for place in ("", "train", "validation"):
        (tmp_path / "texts" / place).mkdir(exist_ok=True, parents=True)
        for number, text in enumerate(texts):
            (tmp_path / "texts" / place / f"{number}.py").write_text(text)
    names = [str(tmp_path / "texts" / f"{number}.py") for number in range(4)]
    fields = {
        "parquet": {"train_files": [str(tmp_path / "t.parquet")]},
        "json": {"train_files": [str(tmp_path / "t.jsonl")], "dataset_text_field": "content"},
        "files": {"train_files": names},
        "folder": {"text_folder": str(tmp_path / "texts" / "train"), "text_patterns": ["*.py"]},
        "split_folder": {"text_folder": str(tmp_path / "texts"), "text_patterns": ["*.py"]},
        # A folder that is laid out as a repository of the Hub.
        "name": {"dataset_name": str(tmp_path / "repository"), "dataset_text_field": "content"},
    }[origin]
    arguments = TextDataArguments(max_length=16, **fields)
    found = load_texts(arguments, tokenizer, ("training",), seed=0).train.blocks
    end = tokenizer.decode([tokenizer.eos_token_id])
    expected = tokenizer(end.join(texts) + end)["input_ids"]
    assert found.shape == (len(expected) // 16, 16)
    assert found.ravel().tolist() == expected[: found.size]
    some = TextDataArguments(max_length=16, train_fraction=0.5, max_train_samples=5, **fields)
    drawn = load_texts(some, tokenizer, ("training",), seed=1).train.blocks
    assert len(drawn) == 5 and set(map(tuple, drawn)) < set(map(tuple, found))


def test_every_token_but_the_last_is_told_the_next():
    blocks = TokenBlocks(np.arange(12, dtype=np.int32).reshape(3, 4))
    batch = collate_blocks([blocks[(0, 1)], blocks[(0, PADDING)]])
    assert batch["input_ids"][0].tolist() == [4, 5, 6, 7]
    assert batch["labels"].tolist() == [[5, 6, 7, IGNORED_LABEL], [IGNORED_LABEL] * 4]


def test_intervals_resample_documents_or_where_these_are_few_stretches_of_equal_length():
    many = TokenStream(np.zeros(120), np.repeat(np.arange(30), 4))
    # The token that is predicted at each place is the next one.
    assert many.units(8, 16)[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    few = TokenStream(np.zeros(120), np.repeat(np.arange(3), 40))
    for length in (4, 8, 16):
        units = few.units(length, 16)[:, :-1]
        assert (units == (np.arange(len(units)) * length // 16)[:, None]).all()


def test_perplexities_are_those_of_the_saved_model(llama, data):
    folder, metrics = llama
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == 257 and not is_patched(model)
    assert_same_perplexities(metrics, model, folder, data)
    again = main(["--output_dir", str(folder / "again"), *data, *TINY_RUN, "--do_train", "false"] +
                 ["--model_name_or_path", str(folder)])  # fmt: skip
    assert again["eval_64_perplexity"] == metrics["eval_64_perplexity"]


@pytest.mark.parametrize(
    "flags, tolerance",
    [pytest.param(PLANES, 0, id="planes", marks=pytest.mark.slow), pytest.param(BLOCKS, 1e-5, id="blocks")],
)
def test_learned_rotations_start_at_the_pretrained_model(flags, tolerance, llama, data, tmp_path):
    """Planes to the last bit; blocks round otherwise."""
    folder, before = llama
    patched = train(tmp_path, data, "--model_name_or_path", folder, "--learning_rate", 0, *flags)
    for name in ("eval_perplexity", "eval_32_perplexity", "eval_64_perplexity"):
        assert patched[name] == pytest.approx(before[name], rel=tolerance, abs=0)


@pytest.mark.parametrize("flags", [pytest.param(PLANES, marks=pytest.mark.slow), BLOCKS], ids=["planes", "blocks"])
@pytest.mark.parametrize("trainable", ["rotary", pytest.param("all", marks=pytest.mark.slow)])
def test_complete_models_hold_what_was_learnt(trainable, flags, llama, data, tmp_path):
    metrics = train(tmp_path, data, "--model_name_or_path", llama[0], *flags, "--trainable", trainable)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert is_patched(model)
    assert_same_perplexities(metrics, model, tmp_path, data)
    before, after = (load_file(folder / "model.safetensors") for folder in (llama[0], tmp_path))
    learnt = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert {name for name, _ in rotary_parameters(model)} <= learnt
    assert trainable == "all" or all("rotary_encoding" in name for name in learnt)
    more = train(tmp_path / "more", data, "--model_name_or_path", tmp_path, "--do_train", "false")
    assert more["eval_64_perplexity"] == metrics["eval_64_perplexity"]


@pytest.mark.parametrize("flags", [pytest.param(PLANES, marks=pytest.mark.slow), BLOCKS], ids=["planes", "blocks"])
def test_lora_and_rotations_load_again_by_their_own_libraries(flags, llama, data, tmp_path):
    peft = pytest.importorskip("peft")
    flags = ["--model_name_or_path", llama[0], *flags, "--trainable", "lora+rotary", "--learning_rate", 1e-2]
    metrics = train(tmp_path, data, *flags)
    assert not (tmp_path / "model.safetensors").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(llama[0])
    model = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
    load_rotary(model.get_base_model(), tmp_path / "rotary")
    assert any(value.abs().max() > 0 for name, value in model.named_parameters() if "lora_B" in name)
    assert_same_perplexities(metrics, model, tmp_path, data)
    before = perplexity(transformers.AutoModelForCausalLM.from_pretrained(llama[0]), llama[0], data, 16)
    assert metrics["eval_perplexity"] != pytest.approx(before, rel=1e-4)


@pytest.mark.slow
def test_lora_in_a_model_that_is_patched_already(llama, data, tmp_path):
    peft = pytest.importorskip("peft")
    train(tmp_path / "patched", data, "--model_name_or_path", llama[0], *BLOCKS)
    flags = ["--model_name_or_path", tmp_path / "patched", "--trainable", "lora+rotary", "--lora_targets", "0.*k_proj"]
    metrics = train(tmp_path / "run", data, *flags)
    base = unpatch(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "patched"))
    model = peft.PeftModel.from_pretrained(load_rotary(base, tmp_path / "run/rotary"), tmp_path / "run/lora")
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"base_model.model.model.layers.0.self_attn.k_proj"}
    assert_same_perplexities(metrics, model, tmp_path / "run", data)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["plain", "patched", "unpatched"])
def test_adapters_are_a_starting_point(start, llama, data, tmp_path):
    """Of a plain model, of one that was patched before, and without any rotations."""
    peft = pytest.importorskip("peft")
    base = llama[0]
    if start == "patched":
        base = tmp_path / "base"
        train(base, data, "--model_name_or_path", llama[0], *BLOCKS)
    rotations = {"plain": BLOCKS, "patched": [], "unpatched": ["--position_encoding", "none"]}[start]
    flags = ["--model_name_or_path", base, *rotations, "--trainable", "lora+rotary", "--lora_rank", 2]
    metrics = train(tmp_path / "first", data, *flags, "--learning_rate", 1e-2)
    again = ["--model_name_or_path", tmp_path / "first", "--trainable", "lora+rotary"]
    evaluated = train(tmp_path / "evaluated", data, *again[:2], "--do_train", "false")
    assert evaluated["eval_64_perplexity"] == metrics["eval_64_perplexity"]
    further = train(tmp_path / "further", data, *again, "--learning_rate", 1e-2)
    found = transformers.AutoModelForCausalLM.from_pretrained(base)
    found = unpatch(found) if start == "patched" else found
    if start != "unpatched":
        load_rotary(found, tmp_path / "further" / "rotary")
    found = peft.PeftModel.from_pretrained(found, tmp_path / "further" / "lora")
    assert found.peft_config["default"].r == 2
    assert_same_perplexities(further, found, tmp_path / "further", data)
    before, after = (load_file(tmp_path / run / "lora" / "adapter_model.safetensors") for run in ("first", "further"))
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)


def test_adapters_that_cannot_be_trained_further_say_why(llama, data, tmp_path):
    pytest.importorskip("peft")
    flags = ["--model_name_or_path", llama[0], *PLANES, "--trainable", "lora+rotary"]
    train(tmp_path / "first", data, *flags)
    given = ["--model_name_or_path", tmp_path / "first", "--trainable"]
    with pytest.raises(ValueError, match="--trainable all: .*first contains adapters for the weights of .*run"):
        train(tmp_path / "all", data, *given, "all")
    with pytest.raises(ValueError, match="is patched with rope_mixed; accepted: the same"):
        train(tmp_path / "other", data, *given, "rotary", *BLOCKS)
    config = tmp_path / "first" / "lora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="first is for .*gone: no such file or directory"):
        train(tmp_path / "gone_base", data, *given, "rotary")
    config.write_text("{")
    with pytest.raises(ValueError, match="first: its adapters cannot be read"):
        train(tmp_path / "damaged", data, *given, "rotary")


@pytest.mark.slow
def test_every_family_leaves_a_whole_model(data, tmp_path):
    new_model(tmp_path / "qwen", data, "qwen3")
    metrics = train(tmp_path / "run", data, "--model_name_or_path", tmp_path / "qwen", *BLOCKS)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(model).__name__ == "RotaryQwen3ForCausalLM"
    assert_same_perplexities(metrics, model, tmp_path / "run", data)


@pytest.mark.slow
def test_data_sets_of_the_hub_are_read_by_their_name(llama, tmp_path):
    """A folder is laid out as a repository, and is given by its name in its place."""
    for split, count in (("train", 12), ("validation", 5)):
        table = datasets.Dataset.from_dict({"text": documents(count, len(split))})
        table.to_json(tmp_path / "repository" / "data" / f"{split}.jsonl", force_ascii=False)
        table.to_parquet(tmp_path / f"{split}.parquet")
    files = ["--train_files", str(tmp_path / "train.parquet")]
    files += ["--validation_files", str(tmp_path / "validation.parquet")]
    flags = ["--model_name_or_path", llama[0], *PLANES]
    expected = train(tmp_path / "files", files, *flags)
    found = train(tmp_path / "name", ["--dataset_name", str(tmp_path / "repository")], *flags)
    assert found["eval_64_perplexity"] == expected["eval_64_perplexity"]
    first, second = (load_file(tmp_path / run / "model.safetensors") for run in ("files", "name"))
    assert all(torch.equal(first[key], second[key]) for key in first)


CHECKPOINT = "CHECKPOINT"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_length", 1], "--max_length 1 .*accepted: 2 and above"),
        (["--evaluation_lengths", 100_000], "fewer than a block of 100000"),
        (["--text_folder", "."], "accepted: one of --dataset_name, --text_folder"),
        (["--dataset_text_field", "story"], "'story'; columns with texts: text"),
        (["--model_type", "lama"], "'lama' is unknown"),
        (["--config_overrides", '{"hidden_size": "x"}'], "hidden_size"),
        (["--config_overrides", '{"vocab_size": 100}'], "tokenizer has 257 tokens, the model 100"),
        (["--model_type", "gpt2", "--config_overrides", '{"n_positions": 32, "n_embd": 24}'], "has 32 positions"),
        (["--trainable", "rotary"], "a new model has nothing pretrained"),
        ([CHECKPOINT, "--block_size", 4], "block_size without --position_encoding has no effect"),
        ([CHECKPOINT, "--trainable", "rotary"], "nothing is patched; accepted: with --position_encoding"),
        ([CHECKPOINT, "--config_overrides", "{}"], "--config_overrides is for new models"),
        ([CHECKPOINT, *PLANES, "--rotary_init", "zeros"], "pass rotary_init='pretrained'"),
        ([CHECKPOINT, "--position_encoding", "liere", "--block_size", 32], "block_size"),
        ([CHECKPOINT, "--position_encoding", "sinusoid"], "'sinusoid'; accepted are liere"),
        ([CHECKPOINT, *PLANES, "--do_train", "false"], "accepted with --do_train only"),
        ([CHECKPOINT, "--trainable", "lora+rotary", "--lora_targets", "up_proj"], "'up_proj' matches none of .*q_proj"),
        ([CHECKPOINT, "--trainable", "lora+rotary", "--lora_targets", "("], "accepted: a regular expression"),
        ([CHECKPOINT, "--attn_implementation", "fast"], "--attn_implementation fast: .*; accepted: sdpa, eager"),
        (["--push_to_hub"], "--push_to_hub"),
        (["--resume_from_checkpoint", "last"], "contains no complete checkpoint"),
        (["--blocksize", 4], "the closest is 'block_size'"),
    ],
)
def test_bad_input_is_refused_before_any_training(flags, message, llama, data, tmp_path):
    flags = [word for flag in flags for word in (("--model_name_or_path", llama[0]) if flag == CHECKPOINT else (flag,))]
    with pytest.raises(ValueError, match=message):
        train(tmp_path, data, *flags)
    assert not list(tmp_path.glob("**/checkpoint-*"))


@pytest.mark.slow
def test_files_that_cannot_be_read_are_named_without_a_traceback(tmp_path):
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "good.txt").write_text("good")
    arguments = ["--output_dir", tmp_path / "out", "--train_files", tmp_path / "latin.txt"]
    arguments += ["--use_cpu", "true", "--do_train"]
    errors = run_warm(SCRIPT, *arguments, status=1).stderr
    assert "latin.txt' cannot be read as UTF-8 text" in errors.splitlines()[-1], errors
    assert "Traceback" not in errors and not list((tmp_path / "out").glob("*"))
    with pytest.raises(ValueError, match="There is no file"):
        load_texts(TextDataArguments(train_files=[str(tmp_path / "none.txt")]), byte_tokenizer(), ("training",), 0)
    arguments = TextDataArguments(text_folder=str(tmp_path), max_length=4)
    # Of a folder the others are read.
    assert len(load_texts(arguments, byte_tokenizer(), ("training",), 0).train) == 1
    for pattern in ("/absolute/*.py", ""):
        arguments = TextDataArguments(text_folder=str(tmp_path), text_patterns=[pattern], max_length=4)
        with pytest.raises(ValueError, match=f"--text_patterns '{pattern.partition('*')[0]}.*patterns in the folder"):
            load_texts(arguments, byte_tokenizer(), ("training",), 0)
