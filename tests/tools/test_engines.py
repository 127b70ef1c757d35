"""Learned frequencies in GGUF files: read by the library gguf and, where it is installed, run by llama.cpp."""

import numpy as np
import pytest
import torch
from rope_cases import TEXT
from rope_cases import build as build_family
from transformers import LlamaConfig, LlamaForCausalLM

from hf_liere import RotaryPatchConfig, patch, rotary_parameters, unpatch
from hf_liere.errors import InputError
from hf_liere.tools.cli import main
from hf_liere.tools.engines import export_gguf


gguf = pytest.importorskip("gguf")
SIZES = {**TEXT, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.3}
SHARED = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", share_layers=True)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(model, path, quantized=None, **metadata):
    """As llama.cpp's `convert_hf_to_gguf.py`, without a tokenizer; matrices of one name are `quantized`."""
    config = model.config
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "none",
        **metadata,
    }
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        adders[type(value)](name if name.startswith(("tokenizer", "split")) else f"llama.{name}", value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        *layer, part = name.removesuffix(".weight").removeprefix("model.layers.").split(".", name.count("layers."))
        part = NAMES[part]
        if part in heads:
            # Channels i and i + D/2 of a head become neighbours.
            value = value.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        name, values = ".".join(["blk", *layer, part, "weight"] if layer else [part, "weight"]), value.numpy()
        if part == quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build(**fields):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields})).eval()


def learn(model, config=SHARED):
    with torch.no_grad():
        for _, parameter in rotary_parameters(patch(model, config)):
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def write(model, plain, output):
    model.save_pretrained(output.with_suffix(""))
    assert export_gguf(output.with_suffix(""), output, plain).startswith(f"{output}: {plain} with")
    return output


def read(path):
    """Metadata, and types and bytes of tensors, by name."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: (tensor.tensor_type, tensor.shape.tolist(), tensor.data) for tensor in reader.tensors}
    counts = ("GGUF.tensor_count",)
    return {name: field.contents() for name, field in reader.fields.items() if name not in counts}, tensors


def test_the_file_is_that_of_the_plain_model_with_factors(tmp_path):
    model = build(rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    plain = convert(model, tmp_path / "plain.gguf", quantized="ffn_gate")
    learn(model)
    ((_, factors),) = rotary_parameters(model)  # (1, D/2)
    path = write(model, plain, tmp_path / "learned.gguf")
    # Factors of an earlier file are replaced.
    again = write(model, path, tmp_path / "again.gguf")
    for written in (path, again):
        metadata, tensors = read(written)
        kind, shape, values = tensors.pop("rope_freqs.weight")
        expected_metadata, expected = read(plain)
        assert metadata == expected_metadata and metadata["general.architecture"] == "llama"
        assert tensors.keys() == expected.keys() and expected["blk.0.ffn_gate.weight"][0].name == "Q8_0"
        for name, (*facts, data) in expected.items():
            assert tensors[name][:2] == tuple(facts) and np.array_equal(tensors[name][2], data)
        # llama.cpp: θ^(−2i/D) / factor; float32 rounds twice.
        assert kind.name == "F32" and shape == [8]
        learned = 5e4 ** -(torch.arange(8, dtype=torch.float64) / 8) * factors[0].double().exp()
        np.testing.assert_allclose(5e4 ** -(np.arange(8) / 8) / values, learned.detach().numpy(), rtol=1e-6)


def test_llama_cpp_generates_the_same_tokens(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tokens = build(), torch.arange(3, 51).view(1, 48)
    plain = convert(model, tmp_path / "plain.gguf")
    with torch.no_grad():
        before = model(tokens).logits[0]
        after = learn(model)(tokens).logits[0]
        expected = model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 48:]
    path = write(model, plain, tmp_path / "learned.gguf")
    engine = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    engine.eval(tokens[0].tolist())
    found, generated = torch.tensor(np.array(engine.scores[:48])), []
    # llama.cpp keeps keys and values in float16, which moves these logits by 0.3%.
    assert (found - after).abs().max() < 0.01 * after.abs().max() < 0.1 * (found - before).abs().max()
    for _ in range(12):
        generated.append(int(engine.scores[engine.n_tokens - 1].argmax()))
        engine.eval(generated[-1:])
    engine.close()
    assert generated == expected.tolist()


@pytest.mark.parametrize(
    "fields, config, metadata, message",
    [
        ({}, {"share_layers": False}, {}, "layers 0 and 1 differ by up to"),
        (
            {},
            {"position_encoding": "liere", "block_size": 4},
            {},
            "'liere'.*is more than one frequency for every plane",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            {},
            {},
            "learned has.*or multiplies cos and sin",
        ),
        ({}, {}, {"architecture": "qwen3"}, "general.architecture='qwen3'; accepted: 'llama'"),
        ({}, {}, {"rope.freq_base": 5e5}, r"llama\.rope\.freq_base=500000\.0; accepted: 10000\.0"),
        ({}, {}, {"rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'; accepted: 'none'"),
        ({}, {}, {"block_count": 3}, "llama.block_count=3; accepted: 2"),
        ({}, {}, {"rope.dimension_count": 8}, "llama.rope.dimension_count=8; accepted: 16"),
        ({}, {}, {"split.count": 2}, "split.count=2; accepted: 1"),
        ({}, {}, {"rope.scaling.factor": 4.0}, r"rope\.scaling\.factor=4\.0; accepted: 1\.0"),
        ({}, {}, {"rope.scale_linear": 2.0}, r"scale_linear=2\.0; accepted: 1\.0"),
        ({}, {}, {"rope.scaling.attn_factor": 1.2}, r"attn_factor=1\.2\d*; accepted: 1\.0"),
        ({}, {}, {"rope.scaling.original_context_length": 64}, "original_context_length=64; .*which lack it"),
        ({}, {}, {"rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor=1.0; .*which lack it"),
        ({}, {}, {"attention.head_count_kv": 4}, "head_count_kv=4; accepted: 2"),
        ({}, {}, {"attention.key_length": 8}, "key_length=8; accepted: 16"),
        ({}, {}, {"attention.layer_norm_rms_epsilon": 1e-3}, r"rms_epsilon=0\.001\d*; accepted"),
        ({"hidden_act": "gelu"}, {}, {}, "accepted is hidden_act='silu'"),
    ],
)
def test_what_a_file_cannot_express(tmp_path, fields, config, metadata, message):
    model = build(**fields)
    plain = convert(model, tmp_path / "plain.gguf", **metadata)
    learn(model, RotaryPatchConfig(**{**SHARED.to_dict(), **config}))
    with pytest.raises(ValueError, match=message):
        write(model, plain, tmp_path / "learned.gguf")
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["plain.gguf"]


def test_other_files_are_refused(tmp_path):
    model = build()
    plain = convert(model, tmp_path / "plain.gguf")
    with torch.no_grad():
        model.model.norm.weight += 0.1
    learn(model)
    (tmp_path / "text.gguf").write_text("no weights")
    reasons = {
        "plain": "contains other weights",
        "missing": r"is not a GGUF file \(\[Errno 2\]",
        "text": "is not a GGUF file",
    }
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=rf"{name}\.gguf {reason}"):
            write(model, tmp_path / f"{name}.gguf", tmp_path / "learned.gguf")
    with pytest.raises(InputError, match="more than one set of frequencies"):
        write(learn(build_family("gemma3")[0]), plain, tmp_path / "learned.gguf")
    with pytest.raises(ValueError, match="is not patched"):
        write(unpatch(model), plain, tmp_path / "learned.gguf")


@pytest.mark.parametrize("quantized", [None, "attn_q", "attn_k", "ffn_gate", "token_embd"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "gate_proj", "embed_tokens", "lm_head"])
def test_every_matrix_is_compared(tmp_path, name, quantized):
    """One row of one matrix differs, by a tenth of its spread."""
    model = build()
    plain = convert(model, tmp_path / "plain.gguf", quantized=quantized)
    learn(model)
    write(model, plain, tmp_path / "learned.gguf")
    with torch.no_grad():
        (weight, *_) = (weight for other, weight in model.named_parameters() if f"{name}.weight" in other)
        weight[3] += 0.1 * weight.std()
    with pytest.raises(InputError, match=r"other weights than the model \(\S+\.weight, (rows )?off by up to"):
        write(model, plain, tmp_path / "other.gguf")


def test_command(tmp_path, capsys):
    model = build()
    plain = convert(model, tmp_path / "plain.gguf")
    learn(model).save_pretrained(tmp_path / "patched")
    command = ["export", str(tmp_path / "patched"), str(tmp_path / "learned.gguf")]
    assert main(command) == 1
    assert "learned.gguf: files that end in .gguf need --gguf" in capsys.readouterr().err
    command += ["--gguf", str(plain)]
    assert main([*command, "--opset", "18"]) == 1
    assert "opset: files that end in .gguf have no such option" in capsys.readouterr().err
    assert main(command) == 0
    assert "learned.gguf: " in capsys.readouterr().out
    expected = write(model, plain, tmp_path / "expected.gguf")
    assert expected.read_bytes() == (tmp_path / "learned.gguf").read_bytes()
