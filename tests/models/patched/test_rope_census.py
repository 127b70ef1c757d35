"""The census of models with RoPE, and the page that is made from it."""

import pytest
import rope_census
import transformers
from transformers import CONFIG_MAPPING

from hf_liere.auto import model_types


RECORD = rope_census.read_record()


def test_the_page_is_made_from_the_record():
    assert rope_census.PAGE.read_text(encoding="utf-8") == rope_census.make_page(RECORD)


def test_what_was_run_starts_learns_and_generates_as_it_should():
    runs = {(row["type"], name): row.get(f"{name}_run", {}) for row in RECORD["rows"] for name in rope_census.CONFIGS}
    assert not {key: faults for key, found in runs.items() if (faults := rope_census.find_faults(found))}


# Linear attention beside gated attention; convolutions beside attention; layers that get no cos and sin from the model;
# attention to an encoder; keys of other layers; heads of two widths; frequencies that the model has learned, and an
# indexer; attention that also reads states of another model.
SAMPLE = ["qwen3_next", "lfm3", "muse_glimmer_text", "moonshine", "gemma3n_text", "gemma4_text"]
SAMPLE += ["mistral_large4_text", "muse_glimmer_assistant"]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_small_models_of_a_sample(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    row = rope_census.examine(model_type)
    assert row["planes"] == "yes" and set(row["planes_run"]) >= {"start", "gradients"}
    assert not rope_census.find_faults(row["planes_run"]) + rope_census.find_faults(row.get("blocks_run", {}))


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
