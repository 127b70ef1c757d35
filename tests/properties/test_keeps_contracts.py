"""What Trainer, accelerate and the loaders of transformers ask of a model: a row each, for each kind of ours."""

import copy
import inspect
import logging

import pytest
import rope_cases
import torch
import transformers
from torch import nn

import hf_liere
from hf_liere import RotaryPatchConfig, patch


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {**SIZES, "image_size": 8, "patch_size": 4}
TOKENS = {**SIZES, "feature_size": 3, "num_axes": 2}
CLIP = {**PICTURE, "num_frames": 2}
LABELS = {"num_labels": 3}
SEVERAL = {**LABELS, "problem_type": "multi_label_classification"}
ONE_NUMBER = {"num_labels": 1, "problem_type": "regression"}
TEXT = {**rope_cases.TEXT, "num_hidden_layers": 1}
PLANES = rope_cases.PLANES


def ours(name, config, **fields):
    return lambda: getattr(hf_liere, name)(getattr(hf_liere, config)(**fields))


def patched(name, config, patch_config, **fields):
    def build():
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
        patch(model, patch_config)
        return model

    return build


def classes(count):
    return torch.arange(count) % 3


def shares(count):
    """Of several labels, or soft ones."""
    return torch.rand(count, 3)


def numbers(count):
    return torch.linspace(-2, 3, count)


def pictures(labels, count=16):
    return {"pixel_values": torch.randn(count, 3, 8, 8), "labels": labels(count)}


def clips(labels, count=16):
    return {"pixel_values": torch.randn(count, 2, 3, 8, 8), "labels": labels(count)}


def masked(count=16):
    return {"pixel_values": torch.randn(count, 3, 8, 8), "bool_masked_pos": torch.arange(4).expand(count, -1) % 2 == 0}


def points(labels, count=16):
    return {"inputs_embeds": torch.randn(count, 5, 3), "positions": torch.rand(count, 5, 2), "labels": labels(count)}


def some_tokens(count):
    """Samples with different numbers of labels."""
    labels = torch.randint(0, 3, (count, 5))
    return labels.masked_fill(torch.arange(5) > torch.arange(count).unsqueeze(1) % 5, -100)


def no_tokens_in_some(count):
    """Whole batches without a label."""
    return some_tokens(count).masked_fill(torch.arange(count).unsqueeze(1) < 4, -100)


def sentences(labels, count=16):
    return {"input_ids": torch.randint(3, 60, (count, 5)), "labels": labels(count)}


IMAGES = ("LieREViTForImageClassification", "LieREViTConfig")
VIDEO = ("LieREVideoForVideoClassification", "LieREVideoConfig")
POINTS = ("LieRETokensForSequenceClassification", "LieRETokensConfig")
EACH_POINT = ("LieRETokensForTokenClassification", "LieRETokensConfig")
LLAMA = ("LlamaForSequenceClassification", "LlamaConfig", PLANES)
VIT = ("ViTForImageClassification", "ViTConfig", RotaryPatchConfig("liere", block_size=4))
# A model, its data, and the size of its accumulated batches.
STEPS = {
    "images": (ours(*IMAGES, **PICTURE, **LABELS), pictures(classes), 4),
    "images, a last batch of two": (ours(*IMAGES, **PICTURE, **LABELS), pictures(classes, 10), 4),
    "images, several labels": (ours(*IMAGES, **PICTURE, **SEVERAL), pictures(shares), 4),
    "images, several labels, a last batch of two": (ours(*IMAGES, **PICTURE, **LABELS), pictures(shares, 10), 4),
    "images, regression": (ours(*IMAGES, **PICTURE, **ONE_NUMBER), pictures(numbers), 4),
    "images, by one": (ours(*IMAGES, **PICTURE, **SEVERAL), pictures(shares), 1),
    "masked images": (ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE), masked(), 4),
    "masked images with labels": (
        ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE),
        {**masked(), "labels": classes(16)},
        4,
    ),
    "video": (ours(*VIDEO, **CLIP, **LABELS), clips(classes), 4),
    "video, several labels": (ours(*VIDEO, **CLIP, **SEVERAL), clips(shares), 4),
    "video, regression": (ours(*VIDEO, **CLIP, **ONE_NUMBER), clips(numbers), 4),
    "points": (ours(*POINTS, **TOKENS, **LABELS), points(classes), 4),
    "points, several labels": (ours(*POINTS, **TOKENS, **SEVERAL), points(shares), 4),
    "points, regression": (ours(*POINTS, **TOKENS, **ONE_NUMBER), points(numbers), 4),
    "each point": (ours(*EACH_POINT, **TOKENS, **LABELS), points(some_tokens), 4),
    "each point, none in some batches": (ours(*EACH_POINT, **TOKENS, **LABELS), points(no_tokens_in_some), 4),
    "patched ViT": (patched(*VIT, **PICTURE, **LABELS), pictures(classes), 4),
    "patched ViT, several labels": (patched(*VIT, **PICTURE, **SEVERAL), pictures(shares), 4),
    "patched ViT, regression": (patched(*VIT, **PICTURE, **ONE_NUMBER), pictures(numbers), 4),
    "patched Llama, classes": (patched(*LLAMA, **TEXT, **LABELS), sentences(classes), 4),
    "patched Llama, several labels": (patched(*LLAMA, **TEXT, **SEVERAL), sentences(shares), 4),
    "patched Llama, words": (
        patched("LlamaForCausalLM", "LlamaConfig", PLANES, **TEXT),
        sentences(lambda count: some_tokens(count) + 3 * (some_tokens(count) >= 0)),
        4,
    ),
}


class Ignoring(hf_liere.LieREViTForImageClassification):
    """A user's, whose own loss knows no number of items."""

    def forward(self, pixel_values, labels=None, **kwargs):
        outputs = super().forward(pixel_values, **kwargs)
        outputs.loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
        return outputs


def with_own_loss():
    model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**PICTURE, **LABELS))
    model.loss_function = lambda labels, logits, config, **kwargs: nn.functional.cross_entropy(logits, labels)
    return model


STEPS["a class of a user"] = (lambda: Ignoring(hf_liere.LieREViTConfig(**PICTURE, **LABELS)), pictures(classes), 4)
STEPS["a loss of a user"] = (with_own_loss, pictures(classes), 4)


@pytest.mark.parametrize("name", STEPS)
def test_accumulated_batches_take_the_step_of_one(name, tmp_path):
    """Against the gradient of the mean over all data, by autograd alone."""
    build, data, size = STEPS[name]
    count = len(next(iter(data.values())))
    torch.manual_seed(1)
    model = build()
    trained = copy.deepcopy(model)
    model(**data).loss.backward()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=-(-count // size),
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    samples = [{key: values[index] for key, values in data.items()} for index in range(count)]
    transformers.Trainer(trained, arguments, train_dataset=samples).train()
    taken = dict(trained.named_parameters())
    largest = max(parameter.grad.abs().max() for parameter in model.parameters() if parameter.grad is not None)
    assert largest > 1e-3
    for key, parameter in model.named_parameters():
        step = 0 if parameter.grad is None else parameter.grad
        torch.testing.assert_close(taken[key], parameter - step, rtol=0, atol=1e-4 * largest.item())


def test_users_decide_who_divides_the_loss():
    model = ours(*IMAGES, **PICTURE)()
    assert model.accepts_loss_kwargs
    model.accepts_loss_kwargs = False
    assert not model.accepts_loss_kwargs and not hf_liere.LieREViTModel.accepts_loss_kwargs


# Options of `from_pretrained` of transformers; they are no fields.
OPTIONS = (
    *({"attn_implementation": "eager"}, {"attn_implementation": "sdpa", "output_attentions": False}),
    *({"dtype": torch.bfloat16}, {"dtype": "auto"}, {"device_map": "cpu"}, {"device_map": "auto"}),
    *({"trust_remote_code": True}, {"revision": "main"}, {"token": None}, {"quantization_config": None}),
    *({"low_cpu_mem_usage": True}, {"use_safetensors": True}, {"variant": None}, {"local_files_only": True}),
    *({"max_memory": {"cpu": "1GB"}}, {"offload_buffers": True}, {"key_mapping": None}, {"use_kernels": False}),
    *({"output_loading_info": True}, {"experts_implementation": "eager"}, {"cache_dir": None}),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ours(*IMAGES, **PICTURE)().save_pretrained(folder)
    return folder


@pytest.fixture
def messages():
    class Keep(logging.Handler):
        def emit(self, record):
            self.found.append(record.getMessage())

    handler = Keep()
    handler.found = []
    logging.getLogger("hf_liere").addHandler(handler)
    yield handler.found
    logging.getLogger("hf_liere").removeHandler(handler)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_loaders_raise_no_alarm(options, saved, messages):
    transformers.AutoModelForImageClassification.from_pretrained(saved, **options)
    assert messages == []


def test_names_without_a_field_are_still_reported(messages):
    hf_liere.LieREViTConfig(**PICTURE, blok_size=3, attn_implementation="eager")
    (message,) = messages
    assert "has no field 'blok_size'" in message


# What frameworks ask of a model of transformers, and the answer, for each of our classes.
CLASSES = {
    "LieREViTModel": ours("LieREViTModel", "LieREViTConfig", **PICTURE),
    "LieREViTForImageClassification": ours(*IMAGES, **PICTURE),
    "LieREViTForMaskedImageModeling": ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE),
    "LieREViTBackbone": ours("LieREViTBackbone", "LieREViTConfig", **PICTURE),
    "LieREVideoModel": ours("LieREVideoModel", "LieREVideoConfig", **CLIP),
    "LieREVideoForVideoClassification": ours(*VIDEO, **CLIP),
    "LieRETokensModel": ours("LieRETokensModel", "LieRETokensConfig", **TOKENS),
    "LieRETokensForSequenceClassification": ours(*POINTS, **TOKENS),
    "LieRETokensForTokenClassification": ours(*EACH_POINT, **TOKENS),
    "patched Llama": patched("LlamaForCausalLM", "LlamaConfig", PLANES, **TEXT),
    "patched ViT": patched(*VIT, **PICTURE),
}


def modules_not_split(model):
    """accelerate keeps a module of these classes on one device."""
    kinds = {type(module).__name__ for module in model.modules()}
    return set(model._no_split_modules) & kinds


def main_input(model):
    """Trainer counts the tokens of this argument."""
    return model.main_input_name in inspect.signature(model.forward).parameters


def kept_in_float32(model):
    """`from_pretrained` rounds the others."""
    names = type(model)._keep_in_fp32_modules_strict
    has_parameters = any("rotary_encoding" in name for name, _ in model.named_parameters())
    return ("rotary_encoding" in names) or not has_parameters


def checkpointing(model):
    model.gradient_checkpointing_enable()
    on = model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()
    return on and not model.is_gradient_checkpointing


def embeddings(model):
    """peft asks for them when it prepares a model whose base is frozen."""
    model.enable_input_require_grads()
    model.disable_input_require_grads()
    return isinstance(model.get_input_embeddings(), nn.Module)


def labels_are_found(model):
    """Trainer evaluates a loss where `forward` names labels, and only there."""
    has_loss = "labels" in inspect.signature(model.forward).parameters
    return has_loss == ("labels" in transformers.utils.generic.find_labels(type(model)))


def generation(model):
    return model.can_generate() == ("CausalLM" in type(model).__name__)


def ties(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.tie_weights()
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


CONTRACTS = (
    *(modules_not_split, main_input, kept_in_float32, checkpointing, embeddings),
    *(labels_are_found, generation, ties),
)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("name", CLASSES)
def test_contracts(name, contract):
    assert contract(CLASSES[name]())
