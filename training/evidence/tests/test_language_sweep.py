"""A sweep over language models: a line for every length, losses of documents, and the rows of the report."""

import json

import numpy as np
import pytest
import torch
import transformers
import yaml

from training.data.texts import byte_tokenizer
from training.evidence import evaluate_sweep, report
from training.evidence.reporting import result_lines


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_model(folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, vocab_size=257, max_position_embeddings=32, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def write_texts(folder):
    for number in range(12):
        file = folder / ("validation" if number < 5 else "train") / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("def f(x): return x\n" * (3 + number))
    return str(folder)


@pytest.mark.slow
def test_a_sweep_leaves_a_line_for_every_length_and_a_report(tmp_path):
    recipe = {"do_train": True, "max_length": 16, "evaluation_lengths": [32, 64], "max_steps": 2}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    settings = [[{"position_encoding": "none"}, {"position_encoding": "rope_mixed"}], [{"seed": 0}, {"seed": 1}]]
    sweep = {"script": "language_modeling", "recipe": str(tmp_path / "tiny.yaml"), "train": settings}
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(sweep))
    flags = ["--text_folder", write_texts(tmp_path / "texts"), "--model_name_or_path", write_model(tmp_path / "llama")]
    flags += ["--use_cpu", "true", "--disable_tqdm", "true"]
    results = evaluate_sweep.main([str(tmp_path / "words.yaml"), "--output_dir", str(tmp_path / "out"), *flags])
    lines = result_lines.read_results(results)
    assert [line["condition"] for line in lines] == [{}, {"max_length": 32}, {"max_length": 64}] * 4
    saved = json.loads((tmp_path / "out/position_encoding=rope_mixed,seed=1/eval_results.json").read_text())
    keys = ("eval_perplexity", "eval_32_perplexity", "eval_64_perplexity")
    assert [line["metrics"]["eval_perplexity"] for line in lines[-3:]] == [saved[key] for key in keys]
    for line in lines:
        losses, sizes = (result_lines.decode_numbers(line, key) for key in ("losses", "sizes"))
        # The last token of a block predicts nothing.
        length = line["condition"].get("max_length", 16)
        assert sizes.sum() % (length - 1) == 0 and len(sizes) > 1
        # In half precision.
        assert np.average(losses, weights=sizes) == pytest.approx(line["metrics"]["eval_loss"], rel=1e-3)
    text = report.main([str(results), "--output_dir", str(tmp_path / "report")]).read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| RoPE as it was", "| RoPE-Mixed"))]
    assert len(rows) == 2 and all(row.count("perplexity") == 3 for row in rows)
