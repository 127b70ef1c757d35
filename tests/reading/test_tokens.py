"""Positions keep what tells tokens apart, whatever type a file has for times."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import training_helpers  # noqa: F401 (makes training importable)
from patching_cases import widen

from hf_liere import LieRETokensForSequenceClassification
from hf_liere.errors import InputError
from training.common.arguments import TokensModelArguments
from training.data.tokens import TokenDataArguments, TokenExamples, collate_tokens, load_tokens, token_collator
from training.engine.token_setup import resolve_tokens_config


# A nanosecond of 2026, of which float64 can tell every 256th.
START = 1_780_000_000_000_000_000


def stamps(samples=4, tokens=20):
    rng = np.random.default_rng(0)
    return [np.sort(rng.integers(0, 60 * 10**9, tokens)) + START for _ in range(samples)]


def write(path, positions, kind=None):
    columns = {
        "features": [[[float(n)] for n in range(len(each))] for each in positions],
        "positions": pyarrow.ListArray.from_arrays(
            np.cumsum([0, *map(len, positions)]),
            pyarrow.array(np.concatenate(positions)).cast(kind or pyarrow.float64()),
        ),
        "labels": [index % 2 for index in range(len(positions))],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def load(path, **options):
    return load_tokens(TokenDataArguments(train_files=[str(path)], **options), ("training",), 0).train


@pytest.mark.parametrize(
    "kind, factor",
    [(pyarrow.int64(), 1), (pyarrow.timestamp("ns"), 1e-9), (pyarrow.timestamp("ns", "UTC"), 1e-9)]
    + [(pyarrow.timestamp("us"), 1e-9), (pyarrow.duration("ns"), 1e-9)],
)
def test_times_of_parquet(kind, factor, tmp_path):
    given = stamps()
    stored = [each // 1000 if str(kind) == "timestamp[us]" else each for each in given]
    table = load(write(tmp_path / "a.parquet", stored, kind))
    for found, each in zip(table.positions, given):
        assert found.dtype == np.float64 and len(np.unique(found)) == 20
        # Numbers of float64 near 1.78e18 are 256 apart, so rounded by up to 128; microseconds were cut.
        off = np.abs(found[:, 0] / factor - each).max()
        assert off <= 512 + 1000 * (str(kind) == "timestamp[us]")


@pytest.mark.parametrize("kind", ["int64", "M8[ns]", "m8[ms]"])
def test_times_of_npz(kind, tmp_path):
    given = np.stack(stamps())
    stored = (given // 10**6 if "ms" in kind else given).astype(kind)
    arrays = {"features": np.zeros((4, 20, 1)), "labels": np.array([0, 1, 0, 1])}
    np.savez(tmp_path / "a.npz", **arrays, positions=stored)
    table = load(tmp_path / "a.npz")
    assert [len(np.unique(each)) for each in table.positions] == [20] * 4
    unit = 1 if kind == "int64" else 1e-9
    assert np.abs(np.stack(table.positions)[..., 0] / unit - given).max() <= 512 + 10**6 * ("ms" in kind)
    missing = stored.copy()
    if kind != "int64":
        missing[0, 3] = "NaT"
        np.savez(tmp_path / "b.npz", **arrays, positions=missing)
        with pytest.raises(InputError, match="sample 0: 'positions' contains 1 values that are not finite"):
            load(tmp_path / "b.npz")


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_what_no_float_can_tell_apart_is_refused_with_its_number(suffix, tmp_path):
    """Nanoseconds that follow each other, and a minute in float32."""
    close = [START + np.arange(20) for _ in range(2)]
    rounded = [(each / 1e9).astype(np.float32) for each in stamps(2)]
    for name, positions, kind in (("close", close, pyarrow.int64()), ("rounded", rounded, pyarrow.float32())):
        path, kept = tmp_path / f"{name}.{suffix}", len(np.unique(positions[0].astype(np.float64)))
        if suffix == "npz":
            arrays = {"features": np.zeros((2, 20, 1)), "positions": np.stack(positions), "labels": np.array([0, 1])}
            np.savez(path, **arrays)
        else:
            write(path, positions, kind)
        with pytest.raises(InputError, match=f"sample 0: {20 - kept} of 20 tokens"):
            load(path)


def test_times_of_ts(tmp_path):
    lines = "@classLabel true a b\n@data\n" + ",".join(str(START + n) for n in range(5)) + ":a\n"
    (tmp_path / "a.ts").write_text(lines)
    with pytest.raises(InputError, match="a.ts: line 3: float64 cannot tell 4 values from others"):
        load(tmp_path / "a.ts", position_columns=["features"])


def test_tokens_in_one_place_on_purpose_are_accepted(tmp_path):
    """Grids repeat coordinates, pairs share a place, and series may have one time alone."""
    rows, columns = np.divmod(np.arange(100), 10)
    grid = np.stack([rows, columns, rows * 0 + 5], -1).astype(np.float32)
    pairs = np.repeat(np.arange(50), 2)[:, None].astype(np.float32).repeat(3, -1)
    arrays = {"features": np.zeros((3, 100, 1)), "labels": np.array([0, 1, 1])}
    np.savez(tmp_path / "a.npz", **arrays, positions=np.stack([grid, pairs, np.ones_like(grid)]))
    assert np.array_equal(load(tmp_path / "a.npz").positions, [grid, pairs, np.ones_like(grid)])


def test_a_model_sees_distances_of_seconds_in_2026(tmp_path):
    """Its outputs are those for the same times counted from the first one."""
    seconds = [each / 1e9 for each in stamps()]
    path = write(tmp_path / "a.parquet", seconds)
    data = load_tokens(TokenDataArguments(train_files=[path]), ("training",), 0)
    sizes = {"hidden_size": "16", "num_hidden_layers": "1", "num_attention_heads": "2", "intermediate_size": "32"}
    config = resolve_tokens_config(TokensModelArguments(**sizes, position_encoding="liere"), data)
    torch.manual_seed(0)
    model = widen(LieRETokensForSequenceClassification(config)).eval()
    batch = token_collator(torch.device("cpu"), data.train)(list(TokenExamples(data.train, [0, 1])))
    assert batch["positions"].dtype == torch.float64
    labels = batch.pop("labels")
    origin = min(each.min() for each in seconds)
    assert config.position_origin == pytest.approx([origin], rel=1e-15)
    with torch.no_grad():
        found = model(**batch, labels=labels).logits
        model.config.position_origin = [0.0]
        moved = model(**{**batch, "positions": batch["positions"] - origin}).logits
        blurred = model(**{**batch, "positions": (batch["positions"].float() - origin).double()}).logits
    # float64 has steps of 2.4e-7 s here, of a minute.
    torch.testing.assert_close(found, moved, atol=1e-5, rtol=0)
    assert (found - blurred).abs().max() > 1e-4


def test_a_device_without_float64_refuses_what_it_would_lose(tmp_path):
    path = write(tmp_path / "a.parquet", [each / 1e9 for each in stamps()])
    with pytest.raises(InputError, match="On mps, sample 0: 1[89] of 20 tokens lose a position of their own"):
        token_collator(torch.device("mps"), load(path))
    near = write(tmp_path / "near.parquet", [(each - START) / 1e9 for each in stamps()])
    batch = token_collator(torch.device("mps"), load(near))(list(TokenExamples(load(near), [0, 1])))
    assert batch["positions"].dtype == torch.float32
    assert collate_tokens(list(TokenExamples(load(near), [0, 1])))["positions"].dtype == torch.float64
