"""Weights with other names in files than in the model are read by `from_pretrained`, and by Trainer to the bit."""

import pytest
import torch
import transformers
from patching_cases import CASES, CLIP_TEXT, IMAGE
from rope_cases import PLANES, TEXT
from safetensors.torch import load_file
from slow_cases import slow_except
from torch import nn

from hf_liere import RotaryPatchConfig, patch


ZEROS = RotaryPatchConfig(position_encoding="comrope_ld", block_size=4)
TOWERS = {"text_config": CLIP_TEXT, "vision_config": IMAGE, "num_labels": 3}


class Classifier(nn.Module):
    """DINOv3 has no class with labels."""

    def __init__(self):
        super().__init__()
        self.tower = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**IMAGE))
        self.head = nn.Linear(32, 3)

    def forward(self, pixel_values, labels):
        logits = self.head(self.tower(pixel_values).pooler_output)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def image_model(config, **fields):
    return lambda: transformers.AutoModelForImageClassification.from_config(config(**fields))


MODELS = {
    "vit": (image_model(transformers.ViTConfig, **IMAGE, num_labels=3), ZEROS),
    "dinov2": (image_model(transformers.Dinov2Config, **IMAGE, num_labels=3), ZEROS),
    "dinov3": (Classifier, PLANES),
    "clip": (image_model(transformers.CLIPConfig, **TOWERS), ZEROS),
    "siglip": (image_model(transformers.SiglipConfig, **TOWERS), ZEROS),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)), PLANES),
}


def build_mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=2))


def change(model):
    """No parameter at its initial value, which would hide that it was not read."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def require_same(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("name", CASES)
def test_a_state_with_the_names_of_files_is_read(name, tmp_path):
    model, other = (patch(CASES[name].build(), ZEROS) for _ in range(2))
    change(model).save_pretrained(tmp_path)
    change(other).load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    require_same(other.state_dict(), model.state_dict())


def test_weights_that_files_contain_apart_are_refused(tmp_path):
    model = change(patch(build_mixtral(), PLANES))
    model.save_pretrained(tmp_path)
    require_same(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="experts.* is stored apart in files.*from_pretrained"):
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    # As of any module.
    with pytest.raises(RuntimeError, match="Unexpected key.*elsewhere"):
        model.load_state_dict({**model.state_dict(), "elsewhere": torch.zeros(1)})


class Recorder(transformers.TrainerCallback):
    """The weights of every evaluation, of which the first is the best."""

    def __init__(self):
        self.states = []

    def on_evaluate(self, args, state, control, model, metrics, **_):
        self.states.append({name: value.clone() for name, value in model.state_dict().items()})
        metrics["eval_order"] = -len(self.states)


@pytest.mark.parametrize("name", slow_except(("clip",), MODELS))
def test_trainer_resumes_and_loads_the_best_model_to_the_bit(name, tmp_path):
    build, config = MODELS[name]
    torch.manual_seed(1)
    if name == "llama":
        data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 60, (8, 8))]
    else:
        data = [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(torch.randn(8, 3, 16, 16))]

    def train(folder, resume=None, **options):
        torch.manual_seed(0)
        options |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 4, "learning_rate": 1e-2}
        quiet = {"use_cpu": True, "report_to": "none", "weight_decay": 0.0, "per_device_train_batch_size": 4}
        arguments = transformers.TrainingArguments(folder, label_names=["labels"], **options, **quiet)
        recorder = Recorder()
        parts = {"train_dataset": data, "eval_dataset": data, "callbacks": [recorder]}
        trainer = transformers.Trainer(patch(build(), config), arguments, **parts)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict(), recorder.states

    whole, _ = train(tmp_path / "run")
    again, _ = train(tmp_path / "run", str(tmp_path / "run" / "checkpoint-2"))
    require_same(again, whole)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "order", "greater_is_better": True}
    loaded, states = train(tmp_path / "best", **best)
    require_same(loaded, states[0])
    assert any(not torch.equal(loaded[key], states[-1][key]) for key in loaded)
