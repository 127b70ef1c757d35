import sys

import pytest
from report_lines import results  # noqa: F401 (a fixture)

from hf_liere.encoding.kinds import ENCODINGS


pytest_plugins = ["suite"]


@pytest.fixture
def registers_nothing():
    """Forgets the encodings that a test registers, and their files."""
    known = set(ENCODINGS)
    yield
    for name in set(ENCODINGS) - known:
        sys.modules.pop(ENCODINGS.pop(name).__module__, None)
