"""What Trainer, accelerate and the loaders of transformers ask of a model: a row each, for each kind of ours."""

import copy
import inspect
import logging

import pytest
import torch
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from contract_cases import CLASSES, IMAGES, PICTURE, STEPS, ours
from model_cases import MODELS, build, run, states
from patching_cases import realign, same_bits
from safetensors.torch import save_file
from torch import nn

import hf_liere
from hf_liere import LieRotaryEmbedding


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


FAMILIES = ("llama, planes", "llama, blocks", "qwen3, planes", "gpt_neox, blocks", "dinov3, planes", "dinov3, blocks")
FAMILIES += ("qwen2_vl_tower, planes", "qwen3_vl, planes")
EMPTIED = [name for name in MODELS if name.startswith(("image", "layer"))]
EMPTIED += [f"rotating {name}" for name in FAMILIES] + ["poses", "patched clip_vision", "patched dinov2", "patched vit"]


@pytest.mark.parametrize("name", EMPTIED)
def test_models_without_memory_are_filled_by_their_state_dict(name, tmp_path):
    model, inputs, expected = build(name)
    is_saved, is_patched = MODELS[name].is_saved, MODELS[name].config is not None

    def empty():
        return type(model)(model.config) if is_saved else MODELS[name].make()

    with torch.device("meta"):
        built = empty()
    for emptied in (built, copy.deepcopy(model).to("meta")):
        tables = [key for key, buffer in emptied.named_buffers() if "rotary_encoding" in key and buffer.is_meta]
        assert not (is_patched and tables)
        assert same_bits(run(name, refill(emptied, model), inputs), expected)
    if is_patched:
        # transformers may give other names to what it saves.
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        with init_empty_weights():
            built = empty()
        built = load_checkpoint_and_dispatch(built, str(tmp_path), device_map={"": "cpu"})
        assert same_bits(run(name, realign(built.eval()), inputs), expected)


@pytest.mark.parametrize("model", ["eva02_tiny_patch14_224", "FluxTransformer2DModel"])
@pytest.mark.parametrize("encoding", ["rope_mixed", "liere"])
def test_patched_models_of_other_libraries_without_memory(model, encoding):
    if (name := f"{model}, {encoding}") not in MODELS:
        pytest.skip("needs timm and diffusers")
    model, inputs, expected = build(name)
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for module_name, module in model.named_modules():
        # Their own buffers are theirs.
        if "rotary_encoding" not in module_name:
            for key in module._non_persistent_buffers_set:
                empty.get_submodule(module_name)._buffers[key] = module._buffers[key]
    assert same_bits(run(name, empty, inputs), expected)


class UserConfig(transformers.PreTrainedConfig):
    model_type = "model_with_the_layer"


class UserModel(transformers.PreTrainedModel):
    """The layer in a model of transformers, which empties buffers that no file contains."""

    config_class = UserConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary = LieRotaryEmbedding(2, 24, 2, "liere", 4, pairing="halves")
        self.post_init()

    def forward(self, query, key, positions):
        return self.rotary(query, key, positions)


def test_the_layer_in_a_model_of_transformers(tmp_path):
    model, inputs = UserModel(UserConfig()).eval(), states()
    torch.nn.init.normal_(model.rotary.encoding.generators)
    model.save_pretrained(tmp_path)
    spoil_memory()
    loaded = UserModel.from_pretrained(tmp_path).eval()
    assert same_bits(loaded(**inputs), model(**inputs))


def test_tables_follow_their_module():
    rotary = MODELS["layer of halves"].make()
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
