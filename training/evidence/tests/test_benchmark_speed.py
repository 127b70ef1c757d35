"""The benchmark: its references, what it counts, and that an interrupted run loses nothing."""

import json
import signal
import subprocess
import sys
import time

import pytest
import reference
import torch
from benchmark_cases import TINY, add_shares, read, settings
from checkout import ROOT
from encoding_cases import block_size
from fresh_process import run_warm

from hf_liere.encoding.positions import TokenPositions
from training.evidence import benchmark_speed
from training.evidence.speed import measurements, runner, tables
from training.evidence.speed import models as benchmark_models
from training.evidence.speed.models import Row
from training.evidence.speed.pseudo_code import NaiveRotation


SCRIPT = str(ROOT / "training" / "evidence" / "benchmark_speed.py")


@pytest.mark.parametrize("encoding", ["axial_rope", "rope_mixed", "liere", "comrope_ap", "comrope_ld"])
@pytest.mark.parametrize("video", [False, True])
def test_pseudo_code_is_the_reference(tiny, tiny_video, encoding, video):
    """The naive rotations are what the tests' own loops make of the same parameters."""
    size = block_size(encoding)
    config = (tiny_video if video else tiny)(position_encoding=encoding, block_size=size)
    rotary = benchmark_models.build_rotary_encoding(config, config.num_axes)
    rotary.reset_parameters()
    parameters = {name: parameter.detach() for name, parameter in rotary.named_parameters()}
    positions = TokenPositions.from_grid(config.train_grid, config.train_grid, config.coordinates).coordinates
    # Class tokens of ComRoPE are at the centre; those of others are not rotated.
    centre = positions.new_full((config.num_axes,), 0.5 if encoding.startswith("comrope") else 0.0)
    for layer in range(2):
        matrices = NaiveRotation(config, parameters, layer).double().dense()
        for token, place in ((0, centre), *((1 + patch, positions[patch]) for patch in (0, 3, len(positions) - 1))):
            for head in range(2):
                expected = reference.head_rotation(place, parameters, config, config.num_axes, layer, head)
                found = matrices[token, min(head, matrices.shape[1] - 1)]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    "axial_rope comrope_ap8 comrope_ld16 liere8 liere64 naive_liere8 folded_rope_mixed folded_comrope_ld8".split()
    + "golden_gate_rope cayley_string cayley_string8 circulant_string spherical_rope folded_cayley_string".split()
    + "liere_product liere_product8 folded_liere_product folded_liere8 centred_liere8 centred_comrope_ld8".split(),
)
def test_error_of_rotations(name):
    """Float32 rotations are within the 1e-5 the library promises (pseudo-code: twice that), bfloat16 ones are not."""
    error = benchmark_models.rotation_error(settings(image_size=64), Row.parse(name))
    assert 1e-9 < error < (1e-5 if "naive" not in name else 2e-5)
    coarse = benchmark_models.rotation_error(settings(image_size=64, dtype="bfloat16"), Row.parse(name))
    assert 1e-3 < coarse < 3e-2


def test_error_is_that_of_rotations():
    """Nothing else is in it: with float64 weights nothing is left, and encodings without rotations have none."""
    assert benchmark_models.rotation_error(settings(dtype="float64"), Row.parse("liere8")) < 1e-11
    assert benchmark_models.rotation_error(settings(), Row.parse("absolute")) is None


def test_naive_model_is_our_model():
    """Same seed, same generators: the pseudo-code's model and ours give the same rotated attention."""
    for name in ("liere8", "comrope_ld8"):
        pair = [Row.parse(name), Row.parse(f"naive_{name}")]
        ours, naive = (benchmark_models.build_model(settings(image_size=64), row, training=True) for row in pair)
        source = dict(ours.named_parameters())
        parameters = {key.split(".")[-1]: value.detach() for key, value in ours.rotary_parameters()}
        for index, layer in enumerate(naive.liere.layers):
            layer.attention.naive_rotation = NaiveRotation(ours.config, parameters, index)
        with torch.no_grad():
            for key, value in naive.named_parameters():
                if "naive_rotation" not in key:
                    value.copy_(source[key])
        pixels = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(naive(pixels).logits, ours(pixels).logits, rtol=0, atol=1e-5)
        naive(pixels).logits.sum().backward()
        assert all(layer.attention.naive_rotation.raw.grad.abs().sum() > 0 for layer in naive.liere.layers)


def test_peak_allocation_counts_bytes():
    def run():
        first = torch.empty(1000, dtype=torch.float32)
        second = torch.empty(500, dtype=torch.float64)
        del first
        third = torch.empty(300, dtype=torch.float32)
        return second, third

    # The first two together, not what follows when the first is gone.
    assert runner.peak_cpu_allocation(run) == 8000


def test_peak_memory_of_a_step():
    """At least model, gradients and input; more with a longer sequence."""
    peaks = {}
    for size in (32, 128):
        timed = runner.Runner(settings(image_size=size), Row.parse("absolute"), "training")
        peaks[size] = timed.peak_memory()
        weights = sum(parameter.nbytes for parameter in timed.model.parameters())
        assert peaks[size] > 2 * weights + timed.pixels.nbytes
    assert peaks[128] > peaks[32] + 100_000


def test_ratios_are_paired(tmp_path):
    """A machine that is three times slower for a while leaves the ratios alone."""
    case = measurements.Case(settings(), (Row.parse("absolute"), Row.parse("liere8")))
    records = measurements.Records(tmp_path / "speed.jsonl", {"cpu": "x"}, resume=False)
    for number, slowness in enumerate((1.0, 3.0, 1.0, 1.1)):
        value, baseline = ({"wall": factor * slowness, "cpu": factor} for factor in (2.5, 2.0))
        records.add(case=case.key, quantity="training", row="liere8", round=number, value=value, baseline=baseline)
    ratios = records.ratios(case, Row.parse("liere8"), "training", "wall")
    assert ratios == pytest.approx([1.25] * 4)
    assert tables.format_ratio(ratios) == "1.250 (1.250 – 1.250)"
    assert tables.format_ratio([1.0, 2.0, 4.0]) == "2.000 (1.000 – 4.000)"


def test_table_of_encodings(tmp_path, capsys):
    pytest.importorskip("timm")
    names = "none liere8 naive_comrope_ld8 timm_rope_mixed folded_liere8".split()
    output = tmp_path / "new" / "speed.jsonl"
    arguments = [*TINY, "--rounds", "2", "--rows", *names[:-1], "--folded", "--output", str(output)]
    assert benchmark_speed.main(arguments) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == ["model", "---", "absolute", *names]
    table = {row[0]: row[1:] for row in rows[2:]}
    assert all(len(row) == 8 for row in rows) and table["absolute"][5] == "+0.0%"
    assert table["folded_liere8"][2:6] == ["–"] * 4
    assert all(float(row[0]) > 0 and row[2] != "not measured" for row in table.values())
    assert table["none"][6] == table["timm_rope_mixed"][6] == "–" and float(table["liere8"][6]) < 1e-5
    assert f"torch {torch.__version__}" in printed and "threads" in printed
    records = read(output)
    assert records[0]["machine"]["torch"] == torch.__version__
    times = [record for record in records if record.get("quantity") in ("inference", "training")]
    walls = [r["value"]["wall"] for r in times if (r["row"], r["quantity"]) == ("liere8", "training")]
    images = benchmark_speed.parse_arguments(TINY).batch_size
    assert float(table["liere8"][2]) == pytest.approx(images * len(walls) / sum(walls), rel=1e-3)
    assert len(times) == 2 * (2 * 5 + 1) and all(
        record[part][clock] > 0 for record in times for part in ("value", "baseline") for clock in ("wall", "cpu")
    )


@pytest.mark.slow
def test_an_encoding_of_a_file_is_a_row(tmp_path):
    """In a process that registers nothing else."""
    (tmp_path / "turns.py").write_text(
        "from hf_liere import RotaryEncoding, register_encoding\n\n\n"
        "@register_encoding\nclass Turns(RotaryEncoding):\n"
        "    name = 'turns'\n    rotary_inits = ('normal', 'zeros')\n\n"
        "    def __init__(self, config, num_axes):\n        super().__init__(config, num_axes)\n"
        "        self.generators = self.new_parameter(num_axes, self.layers, self.heads, self.num_planes)\n\n"
        "    def entries(self, device):\n        return self.to_blocks(self.generators)\n"
    )
    script, rows = ROOT / "training" / "evidence" / "benchmark_speed.py", ("--rounds", "1", "--rows", "turns4")
    done = run_warm(script, *TINY, *rows, "--register", "turns.py", "--output", "speed.jsonl", cwd=tmp_path)
    assert "| turns4 |" in done.stdout
    done = run_warm(script, *TINY, *rows, "--register", "absent.py", cwd=tmp_path, status=2)
    assert "--register: absent.py is not a Python file" in done.stderr


def test_table_of_epochs_is_the_time_of_its_images(tmp_path, capsys):
    output = tmp_path / "epochs.jsonl"
    arguments = [*TINY, "--table", "epochs", "--rows", "comrope_ld4", "--rounds", "2", "--output", str(output)]
    assert benchmark_speed.main(arguments) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| comrope_ld4"))
    _, minutes, paper, seconds, paper_seconds = (cell.strip() for cell in line.strip("|").split("|"))
    assert (paper, paper_seconds) == ("19", "35")
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    batch = benchmark_speed.parse_arguments(TINY).batch_size
    for phase, images, unit, shown in (("training", 1_281_167, 60, minutes), ("inference", 50_000, 1, seconds)):
        walls = [
            line["value"]["wall"] for line in lines if (line.get("row"), line.get("quantity")) == ("comrope_ld4", phase)
        ]
        assert len(walls) == 2
        assert shown == f"{sum(walls) / 2 / batch * images / unit:,.1f}"


@pytest.mark.slow
def test_table_of_growth(tmp_path, capsys):
    """Cells whose interval is too wide say so, and few rounds make no table."""
    arguments = [*TINY, "--table", "growth", "--axes", "depth", "frames", "--rows", "liere4"]
    output = tmp_path / "speed.jsonl"
    assert benchmark_speed.main([*arguments, "--rounds", "1", "--output", str(output)]) == 1
    printed = capsys.readouterr().out
    assert "No table" in printed and "|" not in printed
    options = benchmark_speed.parse_arguments(arguments)
    cases = benchmark_speed.read_cases(options)
    values = ["1 layers", "2 layers", "4 layers", "4 frames", "8 frames", "16 frames"]
    assert [case.value for case in cases] == values
    records = measurements.Records(output, runner.machine("cpu"), resume=True)
    assert all(records.value(case, row, "memory") for case in cases for row in case.rows)
    for case in cases:
        add_shares(records, case, "liere4", added_inference=[0.05] * 6, added_training=[0.5, 0.6] * 3)
    lines = tables.growth_table(records, cases, "wall").splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == values
    shares = " | 5.0% (5.0 – 5.0%) / 50.0 – 60.0% / "
    assert all(shares in line and "measured" not in line for line in lines)


@pytest.mark.slow
def test_interrupted_run_goes_on(tmp_path):
    output = tmp_path / "speed.jsonl"
    command = [SCRIPT, *TINY, "--rows", "none", "--output", str(output)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *command, "--rounds", "100000"], **pipes)
    try:
        while process.poll() is None and not (output.exists() and output.read_text().count('"training"') > 4):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130 and "| none |" in printed and "--resume" in printed

    # A machine that stops leaves half a line.
    lines = output.read_text().splitlines(keepends=True)
    keep = next(index for index, line in enumerate(lines) if '"round": 1' in line) + 1
    output.write_text("".join(lines[:keep]) + lines[keep][:20])
    run_warm(*command, "--rounds", 3, "--resume")
    again = output.read_text().splitlines(keepends=True)
    assert again[:keep] == lines[:keep]
    # The round that was cut short is completed.
    measured = [
        (line["round"], line["quantity"], line["row"]) for line in map(json.loads, again[1:]) if "round" in line
    ]
    assert len(measured) == len(set(measured)) == 3 * 4 and {number for number, *_ in measured} == {0, 1, 2}


def test_output_is_never_overwritten(tmp_path, capsys):
    output = tmp_path / "speed.jsonl"
    output.write_text('{"machine": {"cpu": "another"}}\n')
    arguments = [*TINY, "--rounds", "1", "--rows", "none", "--output", str(output)]
    assert benchmark_speed.main(arguments) == 1 and "--resume" in capsys.readouterr().err
    assert benchmark_speed.main([*arguments, "--resume"]) == 1 and "cpu=another" in capsys.readouterr().err
    assert output.read_text() == '{"machine": {"cpu": "another"}}\n'


@pytest.mark.parametrize(
    "rows, message",
    [
        ("lier8", "accepted are absolute"),
        ("rope_mixed4", "no block size"),
        ("naive_absolute", "accepted are 'absolute' and, after naive_, axial_rope, "),
        ("timm_liere8", "after timm_, absolute, rope_mixed."),
        ("centred_absolute", "after centred_, liere, "),
        ("comrope_ld7", "comrope_ld7: "),
        ("spherical_rope4", "spherical_rope has no block size; accepted is 'spherical_rope'"),
        ("naive_cayley_string", "accepted are 'cayley_string' and, after naive_, axial_rope, "),
        ("none --table added", "models that rotate"),
        ("naive_liere8 --table growth", "models that rotate"),
    ],
)
def test_unknown_models_are_refused_before_work(tmp_path, capsys, rows, message):
    output = tmp_path / "speed.jsonl"
    assert benchmark_speed.main([*TINY, "--output", str(output), "--rows", *rows.split()]) == 1
    assert message in capsys.readouterr().err and not output.exists()
