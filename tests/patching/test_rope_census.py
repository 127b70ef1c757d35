"""The census of models with RoPE, and the page that is made from it."""

import importlib.util

import census_page
import pytest
import rope_census
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.vjepa2.modeling_vjepa2 import rotate_queries_or_keys

from hf_liere.auto import model_types


RECORD = rope_census.read_record()


def test_the_page_is_made_from_the_record():
    assert census_page.PAGE.read_text(encoding="utf-8") == census_page.make_page(RECORD)


def test_what_was_run_starts_learns_and_generates_as_it_should():
    runs = {(row["type"], name): row.get(f"{name}_run", {}) for row in RECORD["rows"] for name in rope_census.CONFIGS}
    assert not {key: faults for key, found in runs.items() if (faults := census_page.find_faults(found))}


# Linear attention beside gated attention; convolutions beside attention; layers that get no cos and sin from the model;
# attention to an encoder; heads of two widths; frequencies that the model has learned, and an indexer; attention that
# also reads states of another model.
SAMPLE = ["qwen3_next", "lfm3", "muse_glimmer_text", "moonshine", "gemma4_text", "mistral_large4_text"]
SAMPLE += ["muse_glimmer_assistant"]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_small_models_of_a_sample(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    row = rope_census.examine(model_type)
    assert row["planes"] == "yes" and set(row["planes_run"]) >= {"start", "gradients"}
    assert not census_page.find_faults(row["planes_run"]) + census_page.find_faults(row.get("blocks_run", {}))


class TestNoRotation:
    """What the page calls no rotation."""

    def test_lengths_change_in_vjepa2(self):
        x = torch.randn(1, 1, 500, 8, generator=torch.Generator().manual_seed(0))
        ratios = rotate_queries_or_keys(x, torch.arange(500.0)).norm(dim=-1) / x.norm(dim=-1)
        assert ratios.min() < 0.6 and 1.3 < ratios.max() < 2**0.5

    @pytest.mark.parametrize("name", ["NeuCodec", "Xcodec2"])
    def test_angles_of_heads_cancel(self, name):
        family = f"transformers.models.{name.lower()}"
        if not importlib.util.find_spec(family):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        kind = getattr(importlib.import_module(f"{family}.modeling_{name.lower()}"), f"{name}Attention")
        config = CONFIG_MAPPING[name.lower()](hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
        torch.manual_seed(0)
        attention, states = kind(config, 0).eval().double(), torch.randn(2, 7, 64, dtype=torch.float64)
        # As the model makes them: of heads, not of tokens.
        angles = torch.randn(1, 4, attention.head_dim // 2, dtype=torch.float64).repeat(1, 1, 2)
        rotated, plain = (attention(states, (x.cos(), x.sin()))[0] for x in (angles, 0 * angles))
        torch.testing.assert_close(rotated, plain, rtol=0, atol=1e-12)

    def test_zamba2_rotates_only_if_asked_to(self):
        for rotates in (False, True):
            model = rope_census.build_meta(CONFIG_MAPPING["zamba2"](use_mem_rope=rotates))
            assert rotates == any(rope_census.frequency_buffers(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [row["type"] for row in RECORD["rows"]])
def test_all_rows_of_the_record(model_type):
    compare(model_type)


def compare(model_type):
    if RECORD["transformers"] != transformers.__version__:
        pytest.skip(f"the record is of transformers {RECORD['transformers']}")
    (expected,) = (row for row in RECORD["rows"] if row["type"] == model_type)
    if "not finished" in expected.get("error", ""):
        pytest.skip(expected["error"])
    assert rope_census.examine(model_type) == expected


@pytest.mark.slow
def test_the_record_names_every_model_type():
    if RECORD["transformers"] != transformers.__version__:
        pytest.skip(f"the record is of transformers {RECORD['transformers']}")
    assert RECORD["types"] == model_types()
