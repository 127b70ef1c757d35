"""Exported models give the outputs of the model they were made from, in ONNX Runtime and as loaded torch programs."""

from functools import partial

import onnx
import onnxruntime
import pytest
import torch
from encoding_cases import IMAGE_CASES, perturb
from exported import TOLERANCE, check_exported, named_outputs, patched
from published_models import SMALL, vit
from slow_cases import slow_except

import hf_liere
from hf_liere.tools.export import export_model, run_exported


def ours(encoding, block_size=None, **fields):
    return perturb(vit(position_encoding=encoding, block_size=block_size, num_hidden_layers=1, **fields))


def video(encoding):
    sizes = {**SMALL, "num_hidden_layers": 1, "image_size": 8, "num_frames": 4}
    return hf_liere.LieREVideoForVideoClassification(
        hf_liere.LieREVideoConfig(**sizes, position_encoding=encoding, block_size=4)
    )


def base(kind, **fields):
    return kind(vit(position_encoding="rope_mixed", **fields).config)


ANY_SIZE = [(1, 3, 16, 16), (3, 3, 8, 40), (2, 3, 32, 12)]
ONE_SIZE = [(1, 3, 24, 8), (3, 3, 24, 8)]
CLIPS = [(1, 4, 3, 8, 8), (2, 4, 3, 8, 8)]
DYNAMIC = {"dynamic_size": True}
# What is exported, with which options, inputs that the file takes, and one that it does not.
ROWS = {
    **{
        # Half of the shares' channels need exponentials, which a file of any size has if it is asked to.
        f"{encoding} {size}": (
            partial(ours, encoding, size),
            DYNAMIC if encoding == "shares" else {},
            ANY_SIZE,
            (1, 3, 16, 18),
        )
        for encoding, size in (("none", None), *IMAGE_CASES)
        if encoding != "liere"
    },
    "rotated values": (partial(ours, "liere_product", 24, rotate_values=True), {}, ANY_SIZE, (1, 3, 19, 19)),
    # The exponential itself is in the graph, in float64.
    "liere of any size": (partial(ours, "liere", coordinates="centred_grid"), DYNAMIC, ANY_SIZE, (1, 3, 16, 18)),
    "liere of one size": (partial(ours, "liere", 5), {"image_size": (24, 8)}, ONE_SIZE, (1, 3, 24, 24)),
    "absolute of one size": (partial(ours, "absolute"), {"image_size": (24, 8)}, ONE_SIZE, (1, 3, 24, 24)),
    "video of any size": (partial(video, "comrope_ld"), {}, [*CLIPS, (2, 6, 3, 16, 12)], (1, 5, 3, 8, 8)),
    "video of one size": (partial(video, "liere"), {}, CLIPS, (1, 6, 3, 8, 8)),
    "longer video": (partial(video, "liere"), {"num_frames": 6}, [(1, 6, 3, 8, 8)], (1, 4, 3, 8, 8)),
    "base": (partial(base, hf_liere.LieREViTModel), {}, ANY_SIZE, (1, 3, 16, 18)),
    "backbone": (partial(base, hf_liere.LieREViTBackbone, out_indices=[1, 2]), {}, ANY_SIZE, (1, 3, 16, 18)),
}
# The rows of the table in docs/deploy.md.
IMAGES = [
    *(
        (name, *kind)
        for name in ("vit", "dinov2", "clip_vision", "siglip")
        for kind in (("comrope_ld", 8), ("liere", 4))
    ),
    *(("vit", encoding, None) for encoding in ("rope_mixed", "cayley_string", "liere_product")),
    *(("dinov3", *kind) for kind in (("rope_mixed", None), ("comrope_ld", 4), ("liere", 4), ("plain", None))),
]
for name, encoding, size in IMAGES:
    one, several = [(2, 3, 16, 16)], [(2, 3, 24, 12), (3, 3, 16, 32), (4, 3, 16, 16)]
    ROWS[f"{name} with {encoding}"] = (partial(patched, name, encoding, size), {}, one, None)
    if encoding != "liere":
        # Models of transformers resize their tables for other sizes than the trained one.
        ROWS[f"{name} with {encoding} of any size"] = (partial(patched, name, encoding, size), DYNAMIC, several, None)
# Most take seconds.
FAST = [
    ("comrope_ld 8", ".onnx"),
    *(("vit with comrope_ld", ".pt2"), ("vit with liere", ".onnx")),
]


def check_graph(path, shapes):
    """It has names for the axes whose sizes may vary, and no operators that engines compute slowly."""
    onnx.checker.check_model(path)
    (pixels,) = onnxruntime.InferenceSession(path).get_inputs()
    names = ["batch", *(["frames"] if len(shapes[0]) == 5 else []), 3, "height", "width"]
    varies = [axis == 0 or len(set(sizes)) > 1 for axis, sizes in enumerate(zip(*shapes))]
    assert pixels.name == "pixel_values"
    assert pixels.shape == [name if free else size for name, free, size in zip(names, varies, shapes[0])]
    assert not {"If", "Loop", "Einsum"} & {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize(
    "row, suffix", slow_except(FAST, [(row, suffix) for row in ROWS for suffix in (".onnx", ".pt2")])
)
def test_exports(row, suffix, tmp_path):
    build, options, shapes, refused = ROWS[row]
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = export_model(model, tmp_path / "folder" / f"model{suffix}", **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    check_exported(path, model, *shapes)
    if refused:
        # Errors of the engines.
        with pytest.raises(Exception, match=r"(?i)% \d == 0|input shape:.*requested shape|dimension|guard|size"):
            run_exported(path, torch.randn(refused))
    if suffix == ".onnx":
        check_graph(path, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("encoding, size", [("liere", 4), ("rope_mixed", None), ("comrope_ld", 4), ("plain", None)])
def test_exports_language_models_with_their_cache(encoding, size, suffix, tmp_path):
    """Tokens are generated by the exported file alone, prompt and cache of any length."""
    model = patched("llama", encoding, size)
    path = export_model(model, tmp_path / f"model{suffix}")
    prompt = torch.randint(3, 60, (2, 7))
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    states = {f"past.{layer}.{kind}": torch.zeros(2, 2, 0, 16) for layer in range(2) for kind in ("key", "value")}
    tokens, given = prompt, prompt
    for _ in range(5):
        found = run_exported(path, given, states)
        with torch.no_grad():
            torch.testing.assert_close(found["logits"][:, -1], model(tokens).logits[:, -1], rtol=0, atol=TOLERANCE)
        given = found["logits"][:, -1:].argmax(-1)
        tokens = torch.cat([tokens, given], dim=1)
        states = {name: found[name.replace("past", "present")] for name in states}
    assert torch.equal(tokens, expected)
    if suffix == ".onnx":
        assert not {"If", "Loop", "Einsum"} & {node.op_type for node in onnx.load(path).graph.node}


HALF = [("rope_mixed", torch.float16, ".pt2"), ("liere", torch.float16, ".onnx")]
HALF += [("comrope_ld", torch.bfloat16, ".pt2"), ("rope_mixed", torch.bfloat16, ".onnx")]


@pytest.mark.parametrize("encoding, dtype, suffix", slow_except(HALF[:1], HALF))
def test_exports_half_types(encoding, dtype, suffix, tmp_path):
    """The file is as far from the model in float64 as a few roundings of its type; of bfloat16, ONNX has float32."""
    ours(encoding).save_pretrained(tmp_path / "model")
    half = hf_liere.LieREViTForImageClassification.from_pretrained(tmp_path / "model", dtype=dtype)
    path = export_model(half, tmp_path / f"model{suffix}")
    pixels = torch.randn(3, 3, 16, 16).to(dtype)
    found = run_exported(path, pixels)["logits"]
    expected = named_outputs(half.double(), pixel_values=pixels.double())["logits"]
    assert found.dtype == (torch.float32 if (dtype, suffix) == (torch.bfloat16, ".onnx") else dtype)
    tolerance = 1e-5 if found.dtype == torch.float32 else 8 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
