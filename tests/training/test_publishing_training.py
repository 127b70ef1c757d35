"""Training runs that push to a local Hub: commits hold their step, failures are loud, another machine goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from checkout import ROOT
from hub_client import READ, WRITE, client, run_as_user
from training_helpers import (
    SCRIPT,
    TINY_MODEL,
    TINY_RUN,
    assert_same_weights,
    main,
    pictures,
    train,
    train_with_torchrun,
    write_images,
)

from hf_liere.storage.client import HubError
from hf_liere.storage.saved_model import SavedModel
from hf_liere.tools.hub.pulling import pull
from training.common.arguments import InputError
from training.engine.pushing import warn_of_other_settings
from training.engine.trainer import ClassificationTrainer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), 40, 12)


STOCHASTIC = ["--drop_path_rate", 0.2, "--position_perturbation", 0.5, "--crop_padding", 2, "--mixup_alpha", 0.8]
PUSH = ["--push_to_hub", "--hub_model_id", "tester/run", "--do_eval", "--hub_always_push", "true"]
SAVES = ["--save_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2, "--num_train_epochs", 2]


def commits(hub):
    with hub.store.lock:
        repo = hub.repo("tester/run")
        return repo and {commit["title"]: (oid, commit["tree"]) for oid, commit in repo.history(repo.resolve("main"))}


def content(hub, tree, name):
    return json.loads(hub.repo("tester/run").read(tree[name]))


@pytest.mark.slow
def test_every_commit_holds_the_step_it_names(hub, files, tmp_path):
    """The pushes are slower than the training; the model is loaded again in a process of its own at the end."""
    hub.fail("/preupload/", delay=0.5, times=-1)
    train(tmp_path / "run", *files, *PUSH, *SAVES, "--hub_token", WRITE)
    found = commits(hub)
    steps = range(2, 11, 2)
    assert list(found)[-2::-1] == [*(f"Training in progress, step {step}" for step in steps), "Trained model, step 10"]
    for step in steps:
        oid, tree = found[f"Training in progress, step {step}"]
        pulled = pull("tester/run", tmp_path / "at" / str(step), revision=oid, api=client(hub))
        digest = SavedModel(pulled.folder).digest
        assert digest == SavedModel(tmp_path / "run" / f"checkpoint-{step}").digest
        assert content(hub, tree, "weights.json") == {"sha256": digest, "step": step}
        card = (pulled.folder / "README.md").read_text()
        assert f"**In training**, step {step} of 10. The figures below are of this step." in card and digest in card
        assert "modeling_liere.py" in tree and "preprocessor_config.json" in tree and "run_config.json" in tree
    oid, tree = found["Trained model, step 10"]
    results = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    card = hub.repo("tester/run").read(tree["README.md"]).decode()
    assert f"value: {results['eval_accuracy']}" in card and "In training" not in card
    assert "eval_results.json" in tree
    every_file = {name for _, tree in found.values() for name in tree}
    assert not {name for name in every_file if name.endswith((".bin", ".pt", ".pth")) or "checkpoint" in name}
    for path in (tmp_path / "run").rglob("*"):
        assert path.name != "training_args.bin" and ".hub" not in path.parts, path
    for _, tree in found.values():
        for name, entry in tree.items():
            text = hub.repo("tester/run").read(entry)
            assert WRITE.encode() not in text and str(tmp_path).encode() not in text, name


@pytest.mark.slow
def test_the_card_of_a_run_names_its_data_and_its_code_runs(hub, files, tmp_path, caplog):
    """As a visitor of the Hub reads it; the code is run by a process that does not import hf_liere."""
    with caplog.at_level("WARNING"):
        train(tmp_path / "run", *files, *PUSH, "--hub_strategy", "end", "--max_steps", 2, "--train_fraction", 0.5)
    assert caplog.text.count("No licence was chosen") == 1
    card = hub.repo("tester/run").read(hub.files("tester/run")["README.md"]).decode()
    for line in (
        "| training | `train.parquet` |  | 20 |",
        "| evaluation | `test.parquet` |  | 12 |",
        "3 classes: `class0`, `class1`, `class2`.",
        "No licence was chosen for these weights.",
        "| `max_steps` | 2 |",
    ):
        assert line in card, line
    # Two steps are not the three epochs that Trainer has by default, and of three classes all are among the top five.
    assert "license:" not in card and "num_train_epochs" not in card and "top-5" not in card
    home = tmp_path / "visitor"
    home.mkdir()
    pictures(1)[0].save(home / "picture.png")
    code = re.search(r"```python\n(.*?)```", card, re.S)[1] + "\nimport sys\nassert 'hf_liere' not in sys.modules\n"
    output, _ = run_as_user(["-c", code], hub, home)
    assert len(re.findall(r"^class\d: \d+\.\d%$", output, re.M)) == 3


@pytest.mark.slow
def test_the_licence_of_a_run(hub, files, tmp_path):
    train(tmp_path / "run", *files, *PUSH, *SAVES, "--max_steps", 2, "--hub_license", "mit")
    for _, tree in list(commits(hub).values())[:2]:
        card = hub.repo("tester/run").read(tree["README.md"]).decode()
        assert "license: mit" in card and "The licence of these weights is `mit`." in card


@pytest.mark.slow
def test_another_machine_goes_on_to_the_same_result(hub, files, tmp_path, caplog):
    flags = [*files, *STOCHASTIC, *SAVES]
    train(tmp_path / "whole", *flags, "--do_eval")
    genuine = ClassificationTrainer.training_step
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(trainer, *args, **kwargs):
            if trainer.state.global_step == 7:
                trainer._finish_current_push()
                raise KeyboardInterrupt
            return genuine(trainer, *args, **kwargs)

        patch.setattr(ClassificationTrainer, "training_step", interrupted)
        train(tmp_path / "first", *flags, *PUSH, "--hub_strategy", "checkpoint")
    _, tree = commits(hub)["Training in progress, step 6"]
    assert {"last-checkpoint/optimizer.pt", "last-checkpoint/trainer_state.json", "model.safetensors"} <= set(tree)
    assert "last-checkpoint/training_args.bin" not in tree
    assert content(hub, tree, "last-checkpoint/trainer_state.json")["global_step"] == 6

    with caplog.at_level("WARNING", "training.engine.pushing"):
        train(tmp_path / "second", *flags, *PUSH, "--hub_strategy", "checkpoint", "--resume_from_hub")
    assert "Resuming from step 6 of tester/run" in caplog.text and "other settings" not in caplog.text
    assert_same_weights(tmp_path / "whole", tmp_path / "second")
    results = [json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("whole", "second")]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    assert "checkpoint-2" not in {path.name for path in (tmp_path / "second").iterdir()}
    # The finished model comes without states of training.
    assert not {name for name in hub.files("tester/run") if name.startswith("last-checkpoint")}
    with pytest.raises(InputError, match="has no folder 'last-checkpoint'.*Only unfinished runs"):
        train(tmp_path / "third", *flags, *PUSH, "--hub_strategy", "checkpoint", "--resume_from_hub")


@pytest.mark.slow
def test_a_step_that_was_not_pushed_makes_the_run_fail(hub, files, tmp_path):
    for skipped, refused in ((1, 2), (3, 1)):
        hub.fail("POST .*/commit/", status=400, skip=skipped, times=refused)
    lacks = r"tester/run lacks step 4 \(.*\); step 6 \(.*\); the trained model \(.*\)\. Everything is in"
    with pytest.raises(HubError, match=lacks):
        train(tmp_path / "run", *files, *PUSH, *SAVES)
    assert [title[-2:] for title in commits(hub)][-2::-1] == [" 2", " 8", "10"]
    assert (tmp_path / "run" / "eval_results.json").is_file()


def test_a_final_push_that_fails_makes_the_run_fail(hub, files, tmp_path):
    hub.fail("POST .*/commit/", status=500, times=-1, headers={"Retry-After": "0"})
    with pytest.raises(HubError, match=r"tester/run lacks the trained model \(.*after 5 attempts"):
        train(tmp_path / "run", *files, *PUSH, "--hub_strategy", "end", "--max_steps", 1)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_refused_before_training(hub, files, tmp_path):
    with pytest.raises(HubError, match="is read-only"):
        train(tmp_path / "run", *files, *PUSH, "--hub_token", READ)
    for flags, message in (
        ([*PUSH, "--hub_strategy", "all_checkpoints"], "accepted: end, every_save"),
        (["--push_to_hub", "--hub_model_id", "tester/run"], "a card must contain figures"),
        ([*PUSH, "--resume_from_hub", "--resume_from_checkpoint", "last"], "cannot be combined with"),
        (["--resume_from_hub", "--hub_model_id", "run"], "needs the repository with its owner"),
        (["--resume_from_hub", "--hub_model_id", "tester/absent"], "There is no tester/absent"),
    ):
        with pytest.raises(InputError, match=message):
            train(tmp_path / "run", *files, *flags)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_evaluation_records_the_weights_it_was_made_with(files, tmp_path):
    """An evaluation at another size belongs to the checkpoint it was made with, and to no other."""
    train(tmp_path / "run", *files, "--max_steps", 1, "--do_eval")
    flags = ["--model_name_or_path", tmp_path / "run", "--do_eval", "--image_size", 24, *files[2:], *TINY_RUN]
    main([*map(str, flags), "--output_dir", str(tmp_path / "at_24")])
    recorded = [json.loads((tmp_path / name / "weights.json").read_text())["sha256"] for name in ("run", "at_24")]
    assert recorded == [SavedModel(tmp_path / "run").digest] * 2


def test_other_settings_are_named(tmp_path, caplog):
    resolved = {"data": {"train_split": "train"}, "augmentation": {}, "training": {"learning_rate": 0.1, "seed": 0}}
    (tmp_path / "run_config.json").write_text(json.dumps(resolved))
    with caplog.at_level("WARNING", "training.engine.pushing"):
        warn_of_other_settings(tmp_path, resolved)
        assert not caplog.text
        warn_of_other_settings(tmp_path, resolved | {"training": {"learning_rate": 0.2, "seed": 0}})
    assert "learning_rate 0.1 there, 0.2 here" in caplog.text and "seed" not in caplog.text


@pytest.mark.slow
def test_killed_processes_go_on_elsewhere(hub, files, tmp_path):
    """Two processes that are killed when the Hub has their fourth step, against two that nothing happens to."""
    flags = [*files, *STOCHASTIC, *SAVES, "--do_eval", "--per_device_train_batch_size", 4]
    train_with_torchrun(tmp_path / "whole", *flags)
    push = [*PUSH, "--hub_strategy", "checkpoint"]
    hub.fail("POST .*/commit/", delay=2, times=-1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += ["--output_dir", str(tmp_path / "first"), "--do_train", *TINY_MODEL, *TINY_RUN, *map(str, flags + push)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    while process.poll() is None and "Training in progress, step 4" not in (commits(hub) or {}):
        time.sleep(0.2)
    for running in (*psutil.Process(process.pid).children(recursive=True), process):
        running.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()[-4000:]
    assert "Trained model, step 10" not in commits(hub)
    hub.reset()
    train_with_torchrun(tmp_path / "second", *flags, *push, "--resume_from_hub")
    assert_same_weights(tmp_path / "whole", tmp_path / "second")
    assert list(commits(hub))[0] == "Trained model, step 10"
