"""Tasks of users: a file with a data set, its flags and its samples, which the scripts register."""

import json

import pytest
from checkout import ROOT
from fresh_process import run_python
from slow_cases import slow_except
from training_helpers import TINY_MODEL, TINY_RUN

from hf_liere.errors import InputError
from training import image_classification, token_classification, video_classification


FILE = """
from dataclasses import dataclass

import numpy as np

from training.common.arguments import flag
from training.common.tasks import Task, register_task
from training.data.clips import ClipArray


class Planes:
    def __init__(self, count, shape, is_clip):
        self.count, self.shape, self.is_clip = count, shape, is_clip

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        plane = np.full(self.shape, 255 * (index % 2), np.uint8)
        return (ClipArray(plane, str(index)) if self.is_clip else plane), index % 2


@register_task
@dataclass
class {name}(Task):
    name, inputs, labels = "{name}", "{inputs}", ("dark", "light")
    sizes = {{"training": 8, "evaluation": None}}
    evaluated_{name}: int = flag(6, "Samples to evaluate.")

    def samples(self, part, request=None):
        count = self.count(part) or self.evaluated_{name}
        if count > 20:
            raise ValueError(f"{{count}} samples; accepted: 20.")
        if request is not None:
            frames = (request.num_frames,) * (self.inputs == "clips")
            return Planes(count, (*frames, *request.image_size, request.num_channels), self.inputs == "clips")
        labels = np.arange(count) % 2
        features, positions = labels.repeat(3).reshape(-1, 3, 1), np.zeros((count, 3, 2))
        return {{"features": features, "positions": positions, "labels": labels}}
"""
SCRIPTS = {"tokens": token_classification, "images": image_classification, "clips": video_classification}
FLAGS = {"tokens": TINY_MODEL[:8], "images": TINY_MODEL, "clips": [*TINY_MODEL, "--num_frames", "4"]}


def write_task(folder, inputs):
    name = f"own_{inputs}"
    (folder / f"{name}.py").write_text(FILE.format(name=name, inputs=inputs))
    return name


@pytest.mark.parametrize("inputs", slow_except(("tokens", "images"), SCRIPTS))
def test_a_task_of_a_user_trains_with_its_flags(inputs, tmp_path):
    """The recipe names the file relative to its own folder."""
    name = write_task(tmp_path, inputs)
    (tmp_path / "own.yaml").write_text(
        f"register: {name}.py\ndataset_name: {name}\nevaluated_{name}: 4\ndo_eval: true\n"
    )
    flags = ["--do_train", *FLAGS[inputs], *TINY_RUN, "--output_dir", str(tmp_path / "run"), "--max_train_samples", "6"]
    metrics = SCRIPTS[inputs].main([str(tmp_path / "own.yaml"), *flags])
    assert metrics["eval_samples"] == 4
    record = json.loads((tmp_path / "run" / "run_config.json").read_text())
    assert record["data"][f"evaluated_{name}"] == 4 and record["examples"]["train"]["samples"] == 6
    assert record["training"]["register"] == [f"{name}.py"]
    # A name that the script does not have, a flag that only its task has, and what the task refuses.
    other = SCRIPTS["images" if inputs == "clips" else "clips"]
    for script, given, message in (
        (other, ["--dataset_name", name, "--output_dir", "unused", "--do_train"], name),
        (SCRIPTS[inputs], ["--do_train", f"--evaluated_{name}", "3", "--output_dir", "unused"], "There is no flag"),
        (
            SCRIPTS[inputs],
            [*flags, "--overwrite_output_dir", "--dataset_name", name, "--max_train_samples", "21"],
            "21 samples; accepted: 20",
        ),
    ):
        with pytest.raises(Exception, match=message) as refusal:
            script.main(["--register", str(tmp_path / f"{name}.py"), *given])
        assert isinstance(refusal.value, InputError) or script is image_classification


def test_the_help_has_the_flags_of_a_registered_task(tmp_path):
    name = write_task(tmp_path, "tokens")
    script = ROOT / "training" / "token_classification.py"
    text = run_python(script, "--register", tmp_path / f"{name}.py", "--help").stdout
    assert f"--evaluated_{name} INT" in text and "Samples to evaluate. (default: 6)" in text
