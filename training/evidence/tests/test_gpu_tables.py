"""evidence/gpu_tables.py with small models: its rows, its plan, and that what ends it loses nothing."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from fresh_process import run_warm
from safetensors.torch import load_file

from hf_liere.errors import InputError
from training.common.command_line import parse_arguments
from training.data.arrows import Arrows
from training.engine.saving import StoppedError
from training.evidence import gpu_tables
from training.evidence.gpu import rows
from training.evidence.reporting.result_lines import correct_examples, read_results


FLAGS = "--scale 3e-4 --bf16 false --use_cpu true --disable_tqdm true".split()
ROW, OTHER = "arrows_108-liere8", "arrows_108-comrope_ld8"
KILLED = """
import os, signal
from training.engine.trainer import RotaryTrainer
from training.evidence import gpu_tables
save = RotaryTrainer._save_checkpoint
RotaryTrainer._save_checkpoint = lambda *given: (save(*given), os.kill(os.getpid(), signal.SIGKILL))
gpu_tables.main({})
"""


def run(folder: Path, *names: str, flags: tuple[str, ...] = ()) -> list[dict]:
    """The lines of the record."""
    path = gpu_tables.main([*FLAGS, *flags, "--rows", *names, "--output_dir", str(folder)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcomes(lines: list[dict]) -> list[tuple]:
    """What does not depend on the clock, of every evaluation."""
    found = [one for line in lines if "result" in line for one in rows.result_lines(line["result"])]
    return [(one["condition"], one["metrics"]["eval_loss"], one["history"], one["correct"]) for one in found]


def test_rows_are_the_papers_models(tmp_path):
    names = [row.name for row in rows.rows_of(list(rows.TABLES))]
    assert len(set(names)) == len(names) == 6 + 5 + 4 + 6 + 4 + 2 + 2
    assert [row.name for row in rows.rows_of(["tiny_others", ROW])] == [ROW, *names[-2:]]
    for row in rows.rows_of(names):
        made = row.run(tmp_path, ["--train_files", "a", "--validation_files", "b"], 1.0, ["--use_cpu", "true"])
        words = [*made.flags, "--output_dir", str(tmp_path)]
        model, data, *_, args = parse_arguments(words, made.module.ARGUMENT_CLASSES)
        config, kind = model.config_class(**model.architecture()), row.name.partition("-")[0]
        size = int(kind[-3:]) if row.draws_arrows else 32
        assert (config.image_size, config.hidden_size) == (size, 384 if "tiny" in kind else 768)
        assert row.name == f"{kind}-{config.position_encoding}{row.settings.get('block_size', '')}"
        assert (config.num_hidden_layers, args.total_train_batch_size, args.seed) == (12, 512, 0)
        length = (1, 800_000) if row.draws_arrows else (200, None)
        assert (args.num_train_epochs, data.max_train_samples) == length
        assert data.train_fraction == (0.2 if kind == "fraction" else 1)


def test_killed_rows_go_on_and_leave_the_same(tmp_path, monkeypatch):
    """Lines, results and a file; a row that fails does not end the others."""
    header, measured, _ = lines = run(tmp_path, ROW)
    assert header["machine"]["scale"] == 3e-4 and measured["row"] == ROW and measured["measured"]["steps"] == 4
    found = read_results(tmp_path / "results" / "arrows.jsonl")
    assert [line["condition"] for line in found] == [{}, {"image_size": 168}, {"image_size": 276}]
    stored, arrows = load_file(tmp_path / "stored" / f"{ROW}.safetensors"), Arrows("validation", 20)
    right = [int(answer) == arrows[index][1] for index, answer in enumerate(stored["logits"].argmax(1))]
    assert right == correct_examples(found[0]).tolist() and stored["logits"].dtype == torch.float16
    assert any("rotary_encoding" in name for name in stored) and len(stored) > 10
    assert found[0]["history"] and found[0]["environment"]["libraries"] and not list((tmp_path / "runs").iterdir())
    # Nothing is measured or trained again, and other settings are told apart.
    assert run(tmp_path, ROW) == lines
    with pytest.raises(InputError, match="was measured with flags"):
        run(tmp_path, ROW, flags=("--learning_rate", "1e-3"))
    words = [*FLAGS, "--rows", ROW, "--output_dir", str(tmp_path / "cut")]
    run_warm("-c", KILLED.format(words), status=-signal.SIGKILL)
    again = run(tmp_path / "cut", ROW)
    assert outcomes(again) == outcomes(lines) and len(outcomes(again)) == len(again) == 3
    # Of large models only the rotations stay.
    monkeypatch.setattr(rows, "LARGEST_FILE", 100_000)
    train, fail = gpu_tables.finish, lambda *_: torch.zeros(2) @ torch.ones(3)
    monkeypatch.setattr(gpu_tables, "finish", lambda row, *given: (train if row.name == OTHER else fail)(row, *given))
    *_, failed, last = lines = run(tmp_path, "arrows_108-absolute", OTHER)
    assert failed["row"] == "arrows_108-absolute" and "RuntimeError" in failed["failed"] and last["row"] == OTHER
    names = set(load_file(tmp_path / "stored" / f"{OTHER}.safetensors"))
    assert len(names) > 1 and all(name == "logits" or "rotary_encoding." in name for name in names)
    assert outcomes(lines)[:3] != outcomes(lines)[3:] and len(read_results(tmp_path / "results" / "arrows.jsonl")) == 6


def test_the_minutes_end_everything(tmp_path, capsys):
    assert rows.fitting([5, 9, 3, 2, 1], 10) == [True, False, True, True, False]
    with pytest.raises(StoppedError), gpu_tables.Alarm(time.time() + 0.01):
        time.sleep(60)
    assert len(run(tmp_path, ROW, "tiny", flags=("--minutes", "0"))) == 1
    assert re.search(rf"\| {ROW} \|.*\| not measured \| no \|", text := capsys.readouterr().out), text
    assert f"Not finished: {ROW}; the same command goes on." in text
