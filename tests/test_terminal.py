"""Names in files of others contain any character; none of them may move the cursor or set the title of a terminal."""

import contextlib
import json
import logging
import os
import re
import shutil
import warnings

import pytest
import torch
from PIL import Image

import hf_liere
from hf_liere.errors import InputError, printable, printable_messages
from hf_liere.storage.client import HubError
from hf_liere.tools.cli import main
from hf_liere.tools.inspection.classes import Answer
from hf_liere.tools.inspection.prediction import Prediction
from training.engine.runs import start


# The title, an empty screen in seven and eight bits, the start of a line, the direction of text, and what is no text.
HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b2J\rx\b\x7f\u202egpj\u2066\u2028\udcff"
CONTROL = re.compile("[^\n\t -~\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\ufefe]")


def test_control_characters_are_shown_and_others_kept():
    ordinary = "naïve «\xa0chat\xa0» 猫 🐈 نامه\u200cها a\tb\n"
    assert printable(ordinary) == ordinary
    assert printable("a\nb\tc", keep="") == r"a\nb\tc"
    # Also within json.
    assert json.loads(printable(json.dumps({HOSTILE: 1}, ensure_ascii=False))) == {HOSTILE: 1}
    assert not CONTROL.search(printable(HOSTILE)) and CONTROL.search(HOSTILE)


def hostile_model(folder, tiny, **fields):
    hf_liere.LieREViTForImageClassification(tiny(**fields)).save_pretrained(folder)
    return folder / "config.json"


def rewrite(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def predict_labels(tmp_path, tiny):
    hostile_model(tmp_path / "model", tiny, id2label={0: HOSTILE[:-1] + "\ncat 99%", 1: "dog"})
    shutil.copy(tmp_path / "image.png", tmp_path / "\x1b[2J.png")
    return ["predict", tmp_path / "model", tmp_path / "\x1b[2J.png"]


def predict_as_json(tmp_path, tiny):
    return [*predict_labels(tmp_path, tiny), "--json"]


def model_type(tmp_path, tiny):
    rewrite(hostile_model(tmp_path / "model", tiny), model_type=HOSTILE[:-1], architectures=[HOSTILE[:-1]], auto_map={})
    return ["predict", tmp_path / "model", tmp_path / "image.png"]


def name_of_a_tensor(tmp_path, tiny):
    hostile_model(tmp_path / "model", tiny)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model" / "model.safetensors"
    save_file({**load_file(path), HOSTILE[:-1]: torch.zeros(1)}, path)
    return ["inspect", tmp_path / "model", "--output", tmp_path / "out"]


def name_of_a_shard(tmp_path, tiny):
    hostile_model(tmp_path / "model", tiny)
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": {"a": HOSTILE[:-1]}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["push", tmp_path / "model", "me/model"]


def file_of_bytes(tmp_path, tiny):
    """A file name that is no text, as archives of other systems have them."""
    name = os.fsencode(tmp_path) + b"/\xff\x1b[2J.png"
    with open(name, "wb") as file:
        file.write(b"no picture")
    hostile_model(tmp_path / "model", tiny)
    return ["predict", tmp_path / "model", os.fsdecode(name)]


def absent_checkpoint(tmp_path, tiny):
    return ["convert", tmp_path / HOSTILE[:-1], tmp_path / "out"]


def unknown_option(tmp_path, tiny):
    return ["predict", "model", "file", "--" + HOSTILE[:-1]]


def facts_of_a_card(tmp_path, tiny):
    (tmp_path / "facts.yaml").write_text(json.dumps({HOSTILE[:-1]: 1}))
    return ["card", tmp_path / "facts.yaml"]


def remark_of_the_processor(tmp_path, tiny):
    """Which transformers logs."""
    hostile_model(tmp_path / "model", tiny)
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": HOSTILE[:-1]}))
    return ["predict", tmp_path / "model", tmp_path / "image.png"]


@pytest.mark.parametrize(
    "case",
    [
        *(predict_labels, predict_as_json, model_type, name_of_a_tensor, name_of_a_shard, file_of_bytes),
        *(absent_checkpoint, unknown_option, facts_of_a_card, remark_of_the_processor),
    ],
)
def test_no_command_prints_control_characters(case, tiny, tmp_path, capfd):
    Image.new("RGB", (16, 16)).save(tmp_path / "image.png")
    arguments = [str(word) for word in case(tmp_path, tiny)]
    capfd.readouterr()
    with contextlib.suppress(SystemExit):
        main(arguments)
    output = capfd.readouterr()
    # The client's progress bars rewrite their line.
    said = [line for line in (output.out + output.err).split("\n") if "it/s]" not in line]
    assert "2J" in str(said) or case is remark_of_the_processor, said
    assert not any(map(CONTROL.search, said)), said
    if case is predict_labels:
        assert output.out.count("\n") == 1


def test_results_and_errors_are_printable_as_text():
    assert not CONTROL.search(f"{Prediction(HOSTILE, [Answer(HOSTILE, 0, 0.5)])}")
    for error in (InputError, HubError):
        assert not CONTROL.search(str(error(f"{HOSTILE} is wrong")))


def test_logs_and_warnings_of_scripts(capfd):
    def script():
        logging.getLogger("any.library").warning("%s is new", HOSTILE)
        warnings.warn(HOSTILE, stacklevel=1)
        raise InputError(HOSTILE)

    factory, layout = logging.getLogRecordFactory(), warnings.formatwarning
    handler = logging.StreamHandler()
    logging.getLogger("any.library").addHandler(handler)
    try:
        with pytest.raises(SystemExit) as stopped, pytest.warns(UserWarning):
            start(script)
        with printable_messages():
            assert not CONTROL.search(warnings.formatwarning(HOSTILE, UserWarning, "file.py", 1))
    finally:
        logging.getLogger("any.library").removeHandler(handler)
    assert not CONTROL.search(str(stopped.value) + capfd.readouterr().err)
    assert (factory, layout) == (logging.getLogRecordFactory(), warnings.formatwarning)
