"""Counts how often this process reads files of weights, below every library that opens them."""

import builtins
import io
import os
import pathlib
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors


OPEN, SAFE_OPEN, COPYFILE = io.open, safetensors.safe_open, shutil.copyfile
# Bytes read of each file, over its size.
READS: Counter[Path] = Counter()


@contextmanager
def count_reads() -> Iterator[Counter[Path]]:
    """How often each safetensors file was read: by Python, by safetensors and in copies."""
    READS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", _open)
        patch.setattr(builtins, "open", _open)
        # Python 3.10 opens paths by this class.
        if hasattr(pathlib, "_NormalAccessor"):
            patch.setattr(pathlib._NormalAccessor, "open", staticmethod(_open))
        patch.setattr(shutil, "copyfile", _copyfile)
        for module in list(sys.modules.values()):
            if vars(module).get("safe_open") is SAFE_OPEN:
                patch.setattr(module, "safe_open", CountedTensors)
        yield READS


def _count(path: str | os.PathLike, size: int) -> None:
    READS[Path(path)] += size / os.path.getsize(path)


def _open(file, mode="r", *arguments, **options):
    if mode == "rb" and str(file).endswith(".safetensors"):
        return io.BufferedReader(CountedFile(os.fspath(file)))
    return OPEN(file, mode, *arguments, **options)


def _copyfile(source, target, **options):
    # The system copies the content, which this process does not read.
    if str(source).endswith(".safetensors"):
        _count(source, os.path.getsize(source))
    return COPYFILE(source, target, **options)


class CountedFile(io.FileIO):
    def readinto(self, buffer):
        size = super().readinto(buffer)
        _count(self.name, size)
        return size

    def readall(self):
        content = super().readall()
        _count(self.name, len(content))
        return content


class CountedTensors:
    """What `safe_open` gives, and the slices that this gives."""

    def __init__(self, path, *arguments, opened=None, **options):
        self.path, self.opened = path, opened or SAFE_OPEN(path, *arguments, **options)

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def __enter__(self):
        self.opened.__enter__()
        return self

    def __exit__(self, *error):
        return self.opened.__exit__(*error)

    def get_slice(self, name):
        return CountedTensors(self.path, opened=self.opened.get_slice(name))

    def get_tensors(self):
        return {name: self.get_tensor(name) for name in self.opened.offset_keys()}

    def get_tensor(self, name):
        return self._counted(self.opened.get_tensor(name))

    def __getitem__(self, index):
        return self._counted(self.opened[index])

    def _counted(self, tensor):
        _count(self.path, tensor.nbytes)
        return tensor
