"""Where the checkout and the code of the tests lie, and the path on which processes find both."""

import os
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
TESTS, SUPPORT = ROOT / "tests", ROOT / "tests" / "support"
# The package need not be installed.
PYTHONPATH = os.pathsep.join([str(ROOT), str(SUPPORT)])
