"""The pages of the reference that are made from the code."""

import reference_pages
from checkout import ROOT, SUPPORT
from fresh_process import run_warm


def test_fields_and_commands_are_those_of_the_code(tmp_path):
    """In a process of its own, where no test has registered an encoding."""
    run_warm(SUPPORT / "reference_pages.py", tmp_path)
    for name in reference_pages.PAGES:
        stored = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert (tmp_path / name).read_text(encoding="utf-8") == stored, f"{name}: run tests/support/reference_pages.py"


def test_every_field_has_a_meaning_that_is_used():
    fields = {field.name for _, owner, _ in reference_pages.SECTIONS for field in reference_pages.own_fields(owner)}
    assert reference_pages.MEANINGS.keys() <= fields
