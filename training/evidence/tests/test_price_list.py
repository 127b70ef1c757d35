"""training/evidence/price_list.py: what is switched off changes the time of a step and nothing else."""

import dataclasses
import re

import pytest
import torch

from hf_liere.kernels import cpu
from training.evidence import price_list
from training.evidence.speed.models import BenchmarkError, Row
from training.evidence.speed.runner import Runner


@pytest.mark.parametrize("trick", price_list.TRICKS)
def test_a_step_without_a_trick_has_the_same_gradients(trick):
    before = dict(vars(cpu))
    recipes = [name for name in price_list.RECIPES if name.startswith(price_list.TRICKS[trick].recipes)]
    rows = {price_list.RECIPES[name].row for name in recipes}
    settings = dataclasses.replace(price_list.MODEL, num_hidden_layers=1, batch_size=1, image_size=64)
    for row in sorted(rows):
        runner, found = Runner(settings, Row.parse(row), "training"), []
        for context in (torch.no_grad, price_list.TRICKS[trick].off):
            with context(), torch.enable_grad():
                runner.step()
            found.append({name: parameter.grad for name, parameter in runner.model.named_parameters()})
        # float32 sums in another order.
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    assert rows and vars(cpu) == before


def test_a_list_goes_on(tmp_path, capsys, monkeypatch):
    small = dataclasses.replace(price_list.MODEL, num_hidden_layers=1, batch_size=1, image_size=64)
    recipes = {name: recipe._replace(settings=small) for name, recipe in price_list.RECIPES.items()}
    monkeypatch.setattr(price_list, "RECIPES", recipes)
    command = ["--output", str(tmp_path / "price.jsonl"), "--blocks", "2", "--recipes", "liere8_inference"]
    assert price_list.main([*command, "--tricks", "huge pages"]) == 0
    with pytest.raises(BenchmarkError, match="continue it with --resume"):
        price_list.main(command)
    assert price_list.main([*command, "--resume", "--tricks", "huge pages", "cache of rotations"]) == 0
    table = capsys.readouterr().out
    row = r"\| cache of rotations \| \d+ \| last \| 1 \| liere8 inference -?\d+\.\d% \(.* – .*%\) \| – \|"
    assert len(re.findall(row, table)) == 1
    assert price_list.main([*command, "--show"]) == 0 and table.endswith(capsys.readouterr().out)
    assert len((tmp_path / "price.jsonl").read_text().splitlines()) == 3
