"""
A training script that counts the threads of Gloo, as Linux names them, when its work is done and when it ends.

    python -m torch.distributed.run --nproc_per_node 2 tests/support/watched_script.py NAME FLAGS…
"""

import importlib
import sys
from pathlib import Path

from torch import distributed

from training.engine.runs import start


def count_threads() -> int:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def run(name: str) -> None:
    script, counts, functions = importlib.import_module(f"training.{name}"), [], []

    def main() -> None:
        try:
            script.main()
        finally:
            counts.append(count_threads())
            # As those of a module that is imported while there is a group.
            functions.append(lambda group=distributed.group.WORLD: group)

    try:
        start(main)
    finally:
        # One call, so that the lines of two processes do not mix.
        sys.stdout.write(f"threads of Gloo: {counts[0]}, then {count_threads()}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run(sys.argv.pop(1))
