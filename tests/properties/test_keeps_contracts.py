"""What Trainer, accelerate and the loaders of transformers ask of a model: a row each, for each kind of ours."""

import copy
import inspect
import logging

import pytest
import rope_cases
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from encoding_cases import ENCODINGS
from patching_cases import IMAGE
from safetensors.torch import save_file
from torch import nn

import hf_liere
from hf_liere import LieRotaryEmbedding, PoseEmbedding, RotaryPatchConfig, patch


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {**SIZES, "image_size": 8, "patch_size": 4}
TOKENS = {**SIZES, "feature_size": 3, "num_axes": 2}
CLIP = {**PICTURE, "num_frames": 2}
LABELS = {"num_labels": 3}
SEVERAL = {**LABELS, "problem_type": "multi_label_classification"}
ONE_NUMBER = {"num_labels": 1, "problem_type": "regression"}
TEXT = {**rope_cases.TEXT, "num_hidden_layers": 1}
PLANES, BLOCKS = rope_cases.PLANES, RotaryPatchConfig("liere", block_size=4, rotary_init="pretrained")


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


def layer(**options):
    return lambda: LieRotaryEmbedding(2, 16, 2, **{"position_encoding": "liere", "block_size": 4, **options})


def states(axes=2):
    return torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), torch.rand(5, axes)


def unlabelled():
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


def poses():
    turned = torch.linalg.qr(torch.randn(5, 3, 3))[0]
    turned = turned * turned.det().sign().view(-1, 1, 1)
    found = torch.eye(4).repeat(5, 1, 1)
    found[:, :3, :3], found[:, :3, 3] = turned, torch.randn(5, 3)
    return *(torch.randn(1, 2, 5, 16) for _ in range(3)), found


# Modules and their inputs; those of other libraries have tables of their own.
TABLES = {
    "layer": (layer(), states),
    "halves": (layer(pairing="halves"), states),
    "frequencies": (layer(frequencies=torch.rand(2, 6), pairing="adjacent"), states),
    "few channels": (layer(pairing=[(3, 1), (0, 5)]), states),
    **{encoding: (ours(*IMAGES, **PICTURE, position_encoding=encoding), unlabelled) for encoding in ENCODINGS},
}
PATCHED = {
    "llama, planes": ("llama", PLANES),
    "llama, blocks": ("llama", BLOCKS),
    "qwen3, planes": ("qwen3", PLANES),
    "gpt_neox, blocks": ("gpt_neox", BLOCKS),
    "dinov3, planes": ("dinov3", PLANES),
    "dinov3, blocks": ("dinov3", BLOCKS),
    "qwen2_vl_tower, planes": ("qwen2_vl_tower", PLANES),
    "qwen3_vl, planes": ("qwen3_vl", PLANES),
}
VISION = {"CLIP": "CLIPVisionModel CLIPVisionConfig", "DINOv2": "Dinov2Model Dinov2Config", "ViT": "ViTModel ViTConfig"}


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def run(model, inputs):
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return found[0] if not hasattr(found, "logits") else found.logits


def spoil_memory():
    """Memory that is found again contains no numbers."""
    for size in (4, 8, 16, 24, 32, 48, 64, 128):
        [torch.full((size,), float("nan")) for _ in range(200)]


def refill(empty, model):
    """`to_empty` and `load_state_dict`."""
    spoil_memory()
    empty = empty.to_empty(device="cpu")
    for name, buffer in empty.named_buffers():
        # Integers that are no index of anything.
        if name in model.state_dict() and not buffer.is_floating_point():
            buffer.fill_(10**6)
    empty.load_state_dict(model.state_dict())
    return empty.eval()


@pytest.mark.parametrize("name", TABLES)
def test_modules_without_memory_are_filled_by_their_state_dict(name):
    build, inputs = TABLES[name]
    model, inputs = randomize(build()), inputs()
    expected = run(model, inputs)
    with torch.device("meta"):
        built = build()
    for empty in (built, copy.deepcopy(model).to("meta")):
        assert torch.equal(run(refill(empty, model), inputs), expected)


def test_poses_without_memory():
    module, inputs = PoseEmbedding(16, patch_share=0.0), poses()
    empty = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    for found, expected in zip(empty(*inputs), module(*inputs)):
        assert torch.equal(found, expected)


def from_patched(name):
    if name in VISION:
        kinds, config = VISION[name].split(), RotaryPatchConfig("liere", block_size=4)
        model = patched(*kinds, config, **IMAGE)()
        return randomize(model), rope_cases.images() if name != "CLIP" else {"pixel_values": torch.randn(2, 3, 16, 16)}
    family, config = PATCHED[name]
    model, inputs = rope_cases.build(family)
    patch(model, config)
    return randomize(model), inputs


@pytest.mark.parametrize("name", [*PATCHED, *VISION])
def test_patched_models_without_memory(name, tmp_path):
    model, inputs = from_patched(name)
    expected = rope_cases.outputs(model, inputs)
    with torch.device("meta"):
        built = type(model)(model.config)
    for empty in (built, copy.deepcopy(model).to("meta")):
        tables = [name for name, buffer in empty.named_buffers() if "rotary_encoding" in name and buffer.is_meta]
        assert not tables
        torch.testing.assert_close(rope_cases.outputs(refill(empty, model), inputs), expected, rtol=0, atol=0)
    # transformers may give other names to what it saves.
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        built = type(model)(model.config)
    built = load_checkpoint_and_dispatch(built, str(tmp_path), device_map={"": "cpu"})
    torch.testing.assert_close(rope_cases.outputs(built.eval(), inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("library", ["timm", "diffusion"])
def test_patched_models_of_other_libraries_without_memory(library):
    pytest.importorskip("diffusers" if library == "diffusion" else "timm")
    cases = __import__(f"{library}_cases")
    name = {"timm": "eva02_tiny_patch14_224", "diffusion": "FluxTransformer2DModel"}[library]
    for config in (PLANES, BLOCKS):
        model, inputs = cases.build(name)
        patch(model, config)
        randomize(model)
        expected = cases.outputs(model, inputs)
        empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        for module_name, module in model.named_modules():
            # Their own buffers are theirs.
            if "rotary_encoding" not in module_name:
                for key in module._non_persistent_buffers_set:
                    empty.get_submodule(module_name)._buffers[key] = module._buffers[key]
        torch.testing.assert_close(cases.outputs(empty, inputs), expected, rtol=0, atol=0)


class UserConfig(transformers.PreTrainedConfig):
    model_type = "model_with_the_layer"


class UserModel(transformers.PreTrainedModel):
    """The layer in a model of transformers, which empties buffers that no file contains."""

    config_class = UserConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary = LieRotaryEmbedding(2, 16, 2, "liere", 4, pairing="halves")
        self.post_init()

    def forward(self, query, key, positions):
        return self.rotary(query, key, positions)


def test_the_layer_in_a_model_of_transformers(tmp_path):
    model, inputs = randomize(UserModel(UserConfig())), states()
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    spoil_memory()
    assert torch.equal(run(UserModel.from_pretrained(tmp_path).eval(), inputs), expected)


def test_tables_follow_their_module():
    rotary = layer(pairing="halves")()
    order = rotary.order.clone()
    rotary.to("meta").half()
    assert rotary.order.device.type == "cpu" and torch.equal(rotary.order, order) and order.dtype == torch.int64


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
