"""The Trainer of transformers itself, with `push_to_hub`."""

import json

import torch
from hub_client import WRITE, history, run_as_user
from transformers import Trainer, TrainingArguments

import hf_liere


LOAD = """
import json, torch
from transformers import AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("tester/run", trust_remote_code=True).eval()
with torch.no_grad():
    print(json.dumps([type(model).__module__.partition(".")[0], model(torch.ones(1, 3, 16, 16)).logits.tolist()]))
"""


def test_a_trainer_pushes_a_model_that_loads_without_the_package(tiny, hub, tmp_path):
    model = hf_liere.LieREViTForImageClassification(tiny())
    rows = [{"pixel_values": torch.full((3, 16, 16), number / 8), "labels": number % 3} for number in range(8)]
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        push_to_hub=True,
        hub_model_id="tester/run",
        hub_token=WRITE,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    assert history(hub, "tester/run")[-1] == "End of training"
    with torch.no_grad():
        expected = model.eval()(torch.ones(1, 3, 16, 16)).logits
    (tmp_path / "reader").mkdir()
    module, logits = json.loads(run_as_user(["-c", LOAD], hub, tmp_path / "reader", token=None)[0].splitlines()[-1])
    assert module == "transformers_modules"
    torch.testing.assert_close(torch.tensor(logits), expected)
