"""Families of transformers in default configurations with few layers: no alarm, and vectors that hold for them."""

import pytest
import torch
from tiny_configs import make_config, shrink
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_liere.auto import build_without_weights
from hf_liere.probing.coordinate_probe import TOKENS, split_cos_sin
from hf_liere.tools.cli import main
from hf_liere.tools.rope_check.measurement import measure
from hf_liere.tools.rope_check.reading import find_rotations
from hf_liere.tools.rope_check.vectors import read_tensors, read_vectors


# Halves and adjacent pairs, partial factors, scalings, two types of layers, layers that do not rotate, 2 and 3 axes.
FAMILIES = """
    apertus arcee bitnet cohere cohere2 csm deepseek_v3 dia diffllama dinov3_vit doge ernie4_5 ernie4_5_vl_moe
    eurobert exaone4 falcon_h1 flex_olmo gemma gemma2 gemma3 gemma3n_text gemma4 glm glm4 glm_ocr gpt_neox gpt_oss
    granite helium internvl kimi_k25 lfm2 llama mistral mixtral modernbert moonshine olmo olmo2 olmo3 paligemma
    pe_audio persimmon phi phi3 pixtral qwen2 qwen2_vl qwen2_5_vl qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_vl
    qwen3_vl_moe sapiens2 seed_oss smollm3 stablelm starcoder2 t5gemma timesfm2_5 vaultgemma video_llama_3
""".split()
# Angles in float32 are exact to 1e-3 rad up to here, whatever the frequencies.
NEAR = 4096


def shorten(config):
    """With a few layers of every kind, of the default width."""
    return make_config(config, shrink(config), ("layers", "depth"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By family, a folder with its configuration; families that this release lacks or cannot build are left out."""
    folder = tmp_path_factory.mktemp("families")
    found = {}
    for name in FAMILIES:
        if name not in CONFIG_MAPPING:
            continue
        for change in (shorten, lambda config: config):
            try:
                change(CONFIG_MAPPING[name]()).save_pretrained(folder / name)
                model = build_without_weights(folder / name)
            except Exception:
                # Some default configurations contradict themselves once they are short, and a few at once.
                continue
            if find_rotations(model)[0]:
                found[name] = folder / name
                break
    return found


def places(found, arguments):
    """(N, A) positions of the arguments with which a rotary module was called."""
    if found.reads_pixels:
        return found.coordinates_of_image(tuple(arguments[0].shape[-2:]))
    given, axes = arguments[-1], found.rotation.planes.num_axes
    return given.reshape(axes, -1).T if given.shape[-1] == TOKENS else given.reshape(-1, axes)


def check_attention(found):
    """What attention of transformers makes of the module's own cos and sin, against the rotation in float64."""
    probe = found.probe
    with torch.no_grad():
        cos, sin = split_cos_sin(type(found.rope).forward(found.rope, *probe.arguments, **probe.options))
        one, zero = torch.ones_like(cos), torch.zeros_like(cos)
        # Norms after the rotation are left out.
        plain, rotated = (
            probe.capture(probe.join(*angle), None, probe.later_modules) for angle in ((one, zero), (cos, sin))
        )
    states = dict(zip(("query", "key"), (state[0, 0] for state in plain)))  # (N, head_dim) each
    wanted = found.rotation.compute(places(found, probe.arguments), states)
    for name, state in zip(("query", "key"), rotated):
        scale = float(states[name].abs().max()) * found.rotation.planes.factor
        # Two products and a sum in float32, with angles below 23 rad.
        torch.testing.assert_close(state[0, 0].double(), wanted[f"rotated_{name}"], rtol=0, atol=1e-5 * scale)


@pytest.mark.slow
def test_healthy_families_raise_no_alarm_and_agree_with_their_vectors(models, tmp_path):
    """Vectors of all of them, written by one command, against the modules of transformers themselves."""
    assert len(models) >= 45, sorted(set(FAMILIES) - set(models))
    assert main(["rope", *map(str, models.values()), "--vectors", str(tmp_path / "vectors")]) == 0
    checked = 0
    for name, folder in models.items():
        model = build_without_weights(folder)
        found, _ = find_rotations(model)
        vectors = {part.rotation.name: part for part in read_vectors(tmp_path / "vectors" / f"{name}.safetensors")}
        tensors, _ = read_tensors(tmp_path / "vectors" / f"{name}.safetensors")
        assert set(vectors) == {part.rotation.name for part in found}, name
        for part in found:
            measurement, label = measure(part), f"{name}: {part.rotation.name}"
            assert measurement.is_right and not part.differs, (label, measurement)
            near = [error for bound, error in measurement.loaded.by_position if bound <= NEAR]
            assert max(near, default=0.0) < 1e-3, (label, near)
            # Other processes compute the vectors again from what the file describes.
            stored = vectors[part.rotation.name]
            for tensor, value in stored.describe().items():
                assert torch.equal(tensors[f"{part.rotation.name}/{tensor}"], value), (label, tensor)
            assert stored.rotation.describe() == part.rotation.describe()
            if part.rotation.planes.pairs is not None:
                check_attention(part)
                checked += 1
    assert checked >= 45
