"""Where the checkout and the code of the tests lie, and the path on which processes find both."""

import os
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
TESTS, SUPPORT = ROOT / "tests", ROOT / "tests" / "support"
# The package need not be installed.
PYTHONPATH = os.pathsep.join([str(ROOT), str(SUPPORT)])
# A script after it runs in two processes.
TWO_PROCESSES = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
