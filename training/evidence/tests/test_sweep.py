"""Sweeps: what they leave, how they go on, share their runs and choose seeds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from checkout import ROOT
from PIL import Image
from training_helpers import TINY_MODEL, TINY_RUN, main, write_images

import hf_liere
from training.common.arguments import InputError
from training.evidence import evaluate_sweep, inspect_sweep
from training.evidence.reporting import result_lines, result_table, sweeps


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), 24)


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
    content = {
        "script": "image_classification",
        "recipe": "cifar100",
        "report": ["losses"],
        "train": [[{"position_encoding": "absolute"}], [{"seed": 0}, {"seed": 1}]],
        "mini": {
            "recipe": str(tmp_path_factory.mktemp("recipe") / "tiny.yaml"),
            "train": [
                [{"position_encoding": "absolute"}, {"position_encoding": "liere", "block_size": 4}],
                [{"seed": 0}, {"seed": 1}],
            ],
            "evaluate": [[{}, {"image_size": 24}, {"evaluation_shuffle": "patches"}]],
        },
    }
    fields = dict(zip([flag.lstrip("-") for flag in TINY_MODEL[::2]], map(int, TINY_MODEL[1::2])))
    recipe = {**fields, "do_train": True, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with open(content["mini"]["recipe"], "w") as file:
        yaml.safe_dump(recipe, file)
    path = tmp_path_factory.mktemp("sweep") / "tiny_sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def swept(sweep_file, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    return evaluate_sweep.main([str(sweep_file), "--mini", "--output_dir", str(folder), *files, *TINY_RUN])


def test_a_sweep_leaves_a_line_for_every_model_and_condition(swept, sweep_file):
    results = [json.loads(line) for line in swept.read_text().splitlines()]
    assert swept.name == "tiny_sweep.jsonl" and len(results) == 2 * 2 * 3
    assert swept.with_suffix(".yaml").read_text() == sweep_file.read_text()
    assert len({json.dumps([result["settings"], result["condition"]], sort_keys=True) for result in results}) == 12
    for result in results:
        assert set(result) == set(result_lines.RESULT_KEYS) - {"sizes", "right"}
        correct, losses = result_lines.correct_examples(result), result_lines.decode_numbers(result, "losses")
        assert correct.shape == losses.shape == (13,) and correct.mean() == result["metrics"]["eval_accuracy"]
        # In half precision.
        assert losses.mean() == pytest.approx(result["metrics"]["eval_loss"], rel=1e-3)
        assert [epoch for epoch, _ in result["history"]] == [1.0, 2.0]
        assert result["run"]["model"]["position_encoding"] == result["settings"]["position_encoding"]
        assert result["run"]["training"]["seed"] == result["settings"]["seed"]
        assert result["environment"]["libraries"]["torch"] and result["train_metrics"]["parameters"] > 0
        assert result["command"][:2] == ["tiny_sweep.yaml", "--mini"] and "train.parquet" in result["command"]
    losses = [result["metrics"]["eval_loss"] for result in results]
    assert len(set(losses)) == 12
    assert not any(str(swept.parent) in json.dumps(result) for result in results)


def test_lines_are_enough_to_repeat_a_result(swept, files, tmp_path):
    line = json.loads(swept.read_text().splitlines()[3])
    assert line["condition"] == {} and line["settings"]["seed"] == 1
    model = line["run"]["model"]
    flags = [part for name in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
             for part in (f"--{name}", str(model[name]))]  # fmt: skip
    flags += ["--image_size", str(model["image_size"]), "--patch_size", str(model["patch_size"])]
    flags += ["--position_encoding", line["settings"]["position_encoding"], "--seed", "1", "--num_train_epochs", "2"]
    metrics = main([*files, *flags, *TINY_RUN, "--do_train", "--do_eval", "--output_dir", str(tmp_path)])
    assert metrics["eval_loss"] == line["metrics"]["eval_loss"]


def test_a_sweep_goes_on_where_it_stopped(swept, sweep_file, files, monkeypatch):
    command = [str(sweep_file), "--mini", "--output_dir", str(swept.parent), *files, *TINY_RUN]
    before = swept.read_text()
    folder = swept.parent / "position_encoding=liere,block_size=4,seed=1"
    (folder / "eval_results.json").unlink()
    # Died before the first checkpoint, one in training and one in an evaluation.
    dead = swept.parent / "position_encoding=absolute,seed=0"
    for place in (dead, folder / "conditions" / "image_size=24"):
        for path in place.iterdir():
            if path.is_dir() and path.name != "conditions":
                shutil.rmtree(path)
            elif path.name not in ("conditions", "flags.json", "run_config.json"):
                path.unlink()
    trained = {path: path.stat().st_mtime_ns for path in swept.parent.glob("*/model.safetensors")}
    evaluate_sweep.main(command)
    again = {path for path, time in trained.items() if path.stat().st_mtime_ns != time}
    assert again == {folder / "model.safetensors"} and (dead / "model.safetensors").is_file()
    results = [
        [json.loads(line)["metrics"]["eval_loss"] for line in text.splitlines()] for text in (before, swept.read_text())
    ]
    assert results[0] == results[1]
    with pytest.raises(InputError, match="seed=0 contains a run with other flags, .*accepted: the same, or another"):
        evaluate_sweep.main([*command, "--weight_decay", "0.5"])


@pytest.mark.slow
def test_two_processes_share_a_sweep(swept, sweep_file, files, tmp_path):
    """The last to finish leaves the file that one process would have left, whichever runs were its own."""
    command = [str(sweep_file), "--mini", "--output_dir", str(tmp_path), *files, *TINY_RUN]
    folders = sorted(path.name for path in swept.parent.iterdir() if path.is_dir())
    for part, trained in ((2, 2), (1, 4)):
        path = evaluate_sweep.main([*command, "--part", f"{part}/2"])
        assert len(result_lines.read_results(path)) == 3 * trained
        assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == trained
    assert sorted(folder.name for folder in tmp_path.iterdir() if folder.is_dir()) == folders
    results = [[json.loads(line) for line in file.read_text().splitlines()] for file in (swept, path)]
    for key in ("settings", "condition", "flags", "correct", "losses"):
        assert [line[key] for line in results[0]] == [line[key] for line in results[1]], key
    assert not any("--part" in line["command"] for line in results[1])
    for wrong in ("3/2", "0/2", "half"):
        with pytest.raises(SystemExit):
            evaluate_sweep.main([*command, "--part", wrong])


def test_a_sweep_trains_only_what_stored_results_lack(swept, sweep_file, files, tmp_path):
    lines = result_lines.read_results(swept)
    stored, folder = tmp_path / "stored.jsonl", tmp_path / "new"
    # A model without its last condition is not finished.
    result_lines.write_results(stored, [*lines[3:6], *lines[:3], *lines[6:-1]], as_changes=True)
    command = [str(sweep_file), "--mini", *files, *TINY_RUN, "--stored", str(stored)]
    path = evaluate_sweep.main([*command, "--output_dir", str(folder)])
    (trained,) = (place.name for place in folder.iterdir() if place.is_dir())
    assert trained == "position_encoding=liere,block_size=4,seed=1"
    merged = result_lines.read_results(path)
    for key in ("settings", "condition", "flags", "correct", "losses"):
        assert [line[key] for line in merged] == [line[key] for line in lines], key
    assert not any("--stored" in line["command"] for line in merged)
    again = evaluate_sweep.main([*command[:-1], str(path), "--output_dir", str(tmp_path / "again")])
    assert [line["correct"] for line in result_lines.read_results(again)] == [line["correct"] for line in lines]
    assert {place.name for place in (tmp_path / "again").iterdir()} == {again.name, sweep_file.name}
    # Other flags make other models.
    other = [*command, "--weight_decay", "0.5", "--output_dir", str(tmp_path / "other"), "--dry_run"]
    assert evaluate_sweep.main(other) and not (tmp_path / "other").exists()


@pytest.mark.slow
def test_stored_evaluations_at_further_lengths_are_kept(swept, sweep_file, files):
    """As `language_modeling.py` makes them: no condition of the sweep names them."""
    lines = result_lines.read_results(swept)[:3]
    longer = {**lines[0], "condition": {"max_length": 512}}
    sweep = sweeps.read_sweep(sweep_file, True)
    run = sweeps.Run(sweep, lines[0]["settings"], [*files, *TINY_RUN], swept.parent)
    assert run.conditions == [line["condition"] for line in lines]
    assert run.pick_stored([*lines, longer]) == [*lines, longer]
    assert run.pick_stored([*lines[1:], longer]) == []


def test_seeds_replace_those_of_the_sweep(tmp_path, capsys):
    """In the place of its own seeds, before rows without any, and from models of their seed after another sweep."""

    def flags(name, count):
        path = ROOT / "training" / "evidence" / "sweeps" / f"{name}.yaml"
        evaluate_sweep.main([str(path), "--mini", "--output_dir", str(tmp_path), "--seeds", str(count), "--dry_run"])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    def values(lines, name):
        return [line[line.index(name) + 1] for line in lines]

    own = flags("encodings", 3)
    assert len(own) == 39 and values(own, "--seed")[:4] == ["0", "1", "2", "0"]
    assert values(flags("model_size", 5), "--seed") == [str(seed) for seed in range(5) for _ in range(4)]
    after = flags("coordinates_256", 2)
    assert values(after, "--seed") == ["0", "0", "1", "1"] * 2
    assert [Path(source).parts[-2:] for source in values(after[4:], "--model_name_or_path")] == [
        ("resolutions_liere", f"seed={seed},position_encoding=liere") for seed in (0, 0, 1, 1)
    ]
    with pytest.raises(InputError, match="--seeds 0; accepted: 1 or more"):
        flags("encodings", 0)
    with pytest.raises(InputError, match="this sweep has {.*'seed': 0.*}; accepted: entries whose only setting is the"):
        flags("dinov3", 5)


@pytest.mark.parametrize("mini", [False, True])
def test_every_run_has_a_folder_of_its_own(mini):
    """File systems take names of 255 bytes."""
    for path in (ROOT / "training" / "evidence" / "sweeps").glob("*.yaml"):
        runs = [
            {name: value for name, value in settings.items() if name != "model_name_or_path"}
            for settings in sweeps.combinations(sweeps.read_sweep(path, mini).get("train", []))
        ]
        different = [settings for at, settings in enumerate(runs) if settings not in runs[:at]]
        names = [sweeps.slug(settings) for settings in different]
        assert len(set(names)) == len(different) and max(len(name.encode()) for name in names) <= 255, path.name


@pytest.mark.slow
def test_processes_that_finish_at_once_leave_a_whole_file(tmp_path):
    code = (
        "import sys; from pathlib import Path; from training.common.records import write_text\n"
        "for _ in range(500): write_text(Path(sys.argv[1]), sys.argv[2] * 1000)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "results.jsonl")]
    writers = [subprocess.Popen([*command, letter], cwd=ROOT) for letter in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    assert (tmp_path / "results.jsonl").read_text() in ("a" * 1000, "b" * 1000)


def test_conditions_may_name_the_models_they_apply_to():
    fixed = {"coordinates": "fixed_grid"}
    axes = [[{}, {**fixed, "rows": [{"coordinates": "train_grid"}]}], [{}, {"image_size": 64}]]
    sizes = [{}, {"image_size": 64}]
    for coordinates, wanted in (
        ("train_grid", [*sizes, *({**fixed, **size} for size in sizes)]),
        ("centred_grid", sizes),
    ):
        assert sweeps.Run({"evaluate": axes}, {"seed": 1, "coordinates": coordinates}, [], Path()).conditions == wanted


def test_models_of_a_sweep_are_inspected_side_by_side(tiny, tmp_path):
    """The deviations of what was saved (ComRoPE Table 8), and a picture for each size."""
    deviations = {}
    for seed, name in enumerate(("block_size=2", "block_size=4")):
        torch.manual_seed(seed)
        model = hf_liere.LieREViTForImageClassification(tiny(block_size=int(name[-1])))
        model.save_pretrained(tmp_path / "models" / name)
        deviations[name] = model.base_model.rotary_encoding.generators.std(correction=0).item()
    hf_liere.LieREViTModel(tiny(position_encoding="absolute")).save_pretrained(tmp_path / "models" / "absolute")
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / "black.png")
    flags = [
        "--image",
        str(tmp_path / "black.png"),
        "--image_sizes",
        "16",
        "24",
        "--output_dir",
        str(tmp_path / "seen"),
    ]
    seen = inspect_sweep.main([str(tmp_path / "models"), *flags])
    rows = [line.split(" | ") for line in (seen / "angle_matrices.md").read_text().splitlines()[2:]]
    assert rows == [[f"| {name}", f"{deviation:.3f} |"] for name, deviation in deviations.items()]
    pictures = {path.name for path in seen.glob("*.png")}
    assert pictures == {"angle_matrices.png", "attention_16.png", "attention_24.png"}
    with pytest.raises(InputError, match="contains no folder with a model"):
        inspect_sweep.main([str(tmp_path), *flags])
    with pytest.raises(InputError, match="need --image and --image_sizes; accepted: both or none"):
        inspect_sweep.main([str(tmp_path / "models"), *flags[2:]])


def test_a_sweep_trains_the_models_that_it_starts_from(files, tmp_path):
    """With a learning rate of 0 they stay the same, in a folder of their sweep's name."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    recipe = {"do_train": True, **dict(zip([flag.lstrip("-") for flag in TINY_MODEL[::2]], TINY_MODEL[1::2]))}
    (tmp_path / "first_recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "second_recipe.yaml").write_text(yaml.safe_dump({"do_train": True, "learning_rate": 0.0}))
    row = {"position_encoding": "rope_mixed"}
    common = {"script": "image_classification"}
    first.write_text(yaml.safe_dump({**common, "recipe": str(tmp_path / "first_recipe.yaml"), "train": [[row]]}))
    row["model_name_or_path"] = "position_encoding=rope_mixed"
    second.write_text(
        yaml.safe_dump({**common, "after": "first", "recipe": str(tmp_path / "second_recipe.yaml"), "train": [[row]]})
    )
    flags = [flag for flag in TINY_RUN if flag not in ("--learning_rate", "1e-3")]
    evaluate_sweep.main([str(second), "--output_dir", str(tmp_path / "out"), *files, *flags])
    (before,) = map(json.loads, (tmp_path / "out" / "first" / "first.jsonl").read_text().splitlines())
    (after,) = map(json.loads, (tmp_path / "out" / "second.jsonl").read_text().splitlines())
    assert after["metrics"]["eval_loss"] == before["metrics"]["eval_loss"]
    assert after["run"]["training"]["learning_rate"] == 0 < before["run"]["training"]["learning_rate"]
    with pytest.raises(InputError, match="--part: second.yaml starts from the models of first, .*accepted: without"):
        evaluate_sweep.main([str(second), "--output_dir", str(tmp_path / "out"), *files, *flags, "--part", "1/2"])


def test_sweeps_are_listed_and_checked(sweep_file, tmp_path, capsys):
    evaluate_sweep.main([str(sweep_file), "--mini", "--output_dir", str(tmp_path), "--dry_run"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("evaluated under 3 conditions" in line for line in lines)
    with pytest.raises(InputError, match="There is no sweep 'nothing.yaml'; .* block_size, "):
        evaluate_sweep.main(["nothing.yaml", "--output_dir", str(tmp_path)])
    for content, message in (
        ({"script": "x", "recipe": "y", "train": []}, "script 'x'; accepted: image_classification"),
        (
            {"script": "image_classification", "recipe": "y", "train": [[{"script": "x"}]]},
            "script 'x'; accepted: image_classification",
        ),
        ({"script": "image_classification", "recipe": "y"}, "contains script, recipe; accepted: script, recipe, train"),
        (
            {"script": "image_classification", "recipe": "y", "train": [], "compare": [{"rows": []}]},
            "compare {'rows': .*accepted: against or against_condition, with others of rows",
        ),
        (
            {
                **{"script": "image_classification", "recipe": "y", "train": [], "solved_at": 0.9},
                "compare": [{"against": {"seed": 0}, "metric": "loss"}],
            },
            "'metric': 'loss'} with solved_at, which is an accuracy of rows; accepted: against without ",
        ),
        (
            {"script": "image_classification", "recipe": "y", "train": [], "paired": "seeds"},
            "paired 'seeds'; accepted: true, false",
        ),
        (
            {"script": "image_classification", "recipe": "y", "after": "x", "train": [[{"seed": 0}]]},
            "train {'seed': 0} after x; accepted: rows with the model_name_or_path",
        ),
    ):
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        with pytest.raises(InputError, match=message):
            sweeps.read_sweep(tmp_path / "bad.yaml", False)
    with pytest.raises(InputError, match="has no small version"):
        sweeps.read_sweep(tmp_path / "bad.yaml", True)


def test_fine_tuned_towers_are_swept_too(files, tmp_path):
    """The scripts' own evaluations at several sizes become conditions; no rotations leave CLIP its table."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "vision_config": tower | {"image_size": 16, "patch_size": 4},
        "eval_image_sizes": [16, 24],
        "do_train": True,
    }
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(recipe | {"image_size": 16, "baseline": False, "max_steps": 2})
    )
    sweep = {
        "script": "clip_finetuning",
        "recipe": str(tmp_path / "recipe.yaml"),
        "train": [[{"position_encoding": "none"}, {"position_encoding": "comrope_ld", "block_size": 4}]],
    }
    (tmp_path / "towers.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    command = [str(tmp_path / "towers.yaml"), "--output_dir", str(tmp_path / "swept"), *files, *TINY_RUN]
    path = evaluate_sweep.main(command)
    results = result_lines.read_results(path)
    table = result_table.arrange(results)
    assert list(table) == ["Absolute", "ComRoPE-LD, block_size 4"]
    for (row, cells), model in zip(table.items(), ("unpatched", "patched")):
        assert list(cells) == ["as trained", "24 px"]
        folder = next((tmp_path / "swept").glob(f"*/{model}"))
        written = json.loads((folder / "resolutions.json").read_text())["resolutions"]
        for cell, entry in zip(cells.values(), written, strict=True):
            metrics = cell.results[0]["metrics"]
            assert (cell.mean, metrics["eval_accuracy_low"], metrics["eval_accuracy_high"]) == tuple(
                entry[name] for name in ("accuracy", "accuracy_low", "accuracy_high")
            ), row
            # Those of single images, for tests in pairs.
            assert result_lines.correct_examples(cell.results[0]).mean() == pytest.approx(entry["accuracy"])
            # One seed has no interval.
            assert cell.interval is None
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "swept").rglob("resolutions.json")}
    evaluate_sweep.main(command)
    assert result_lines.read_results(path) == results
    assert times == {file: file.stat().st_mtime_ns for file in times}
