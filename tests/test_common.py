"""transformers' own common tests, in the release that is installed, on every encoding."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import transformers
from checkout import SUPPORT
from common_cases import ENCODINGS, KINDS


pytestmark = [pytest.mark.common, pytest.mark.slow]


def download(folder: Path) -> None:
    """
    Put the files of `tests` in the sources of the installed transformers into `folder`, whole or not at all.

    Raises:
        subprocess.CalledProcessError: if pip cannot get the sources.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        command += ["--dest", temporary, f"transformers=={transformers.__version__}"]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (archive,) = Path(temporary).glob("*.tar.gz")
        unpacked = Path(temporary, "tests")
        unpacked.mkdir()
        # One of the files imports its package as transformers does.
        unpacked.joinpath("__init__.py").touch()
        with tarfile.open(archive) as sources:
            for member in sources:
                if re.fullmatch(r"[^/]+/tests/\w+\.py", member.name):
                    unpacked.joinpath(Path(member.name).name).write_bytes(sources.extractfile(member).read())
        try:
            unpacked.rename(folder)
        except OSError:
            # Another process was faster.
            if not folder.is_dir():
                raise


@pytest.fixture(scope="session")
def common_tests(lacking):
    """The `tests` folder of the installed transformers, downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_liere"
    folder = cache / f"transformers-{transformers.__version__}-tests"
    if not folder.is_dir():
        try:
            download(folder)
        except subprocess.CalledProcessError as error:
            lacking("common", f"pip cannot download transformers {transformers.__version__}:\n{error.stdout}")
    return folder


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_common(common_tests, encoding):
    # Their markers are not ours.
    options = [
        "--override-ini=addopts=--import-mode=importlib",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", "--quiet", "--tb=short", *options]
    command += [f"{SUPPORT / 'common_models.py'}::{encoding}_{kind}" for kind in KINDS]
    result = subprocess.run(
        command,
        env={**os.environ, "HF_LIERE_COMMON_TESTS": str(common_tests)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    passed, skipped = (int(re.search(rf"(\d+) {outcome}", result.stdout)[1]) for outcome in ("passed", "skipped"))
    # Skipped are tests of generation, token embeddings and devices.
    assert passed > skipped, result.stdout
