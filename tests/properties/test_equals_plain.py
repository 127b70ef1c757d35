"""Drawn models of the package equal those of `hf_liere.plain`, whose code is the definition."""

import itertools

import plain_models
import pytest
import torch
from encoding_cases import GRID_CONVENTIONS, OWN_PLAIN

from hf_liere.plain import PLAIN_ENCODINGS


FAST, ALL = 70, 600


@pytest.mark.parametrize("number", range(FAST))
def test_outputs_gradients_and_starts(number):
    """
    Starts, outputs in inference, of folded models, in training and after it, and all gradients; see
    `plain_models.differences`.
    """
    assert not plain_models.compare(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, ALL, 53))
def test_many_draws(first):
    different = {number: plain_models.compare(number) for number in range(first, min(first + 53, ALL))}
    assert not [found for found in different.values() if found]


def test_draws_reach_everything():
    cases = [plain_models.draw(number) for number in range(ALL)]
    assert {case.kind for case in cases} == plain_models.KINDS.keys()
    assert {case.precision for case in cases} == plain_models.TOLERANCES.keys()
    ways = {(kind, way) for kind, (*_, ways) in plain_models.KINDS.items() for way in ways}
    assert {(case.kind, case.given) for case in cases} == ways
    encodings = {(case.config.position_encoding, case.path) for case in cases}
    paths = "compiled", "plain", "accelerator"
    assert encodings == set(itertools.product(("none", "absolute", *OWN_PLAIN), paths))
    starts = {(case.config.position_encoding, case.config.rotary_init) for case in cases}
    assert starts >= {(name, start) for name in OWN_PLAIN for start in PLAIN_ENCODINGS[name].starts}
    places = {getattr(case.config, "coordinates", None) for case in cases}
    assert places == {*GRID_CONVENTIONS, "physical", None} - {"squares"}


def test_a_difference_is_told():
    """The comparison itself: a weight of one model is another."""
    case = plain_models.draw(0)
    ours, plain = plain_models.build(case)
    with torch.no_grad():
        next(ours.parameters()).add_(1e-3)
    assert any(not difference <= bound for _, difference, bound in plain_models.compare_starts(ours, plain))
