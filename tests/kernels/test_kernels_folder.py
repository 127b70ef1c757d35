"""The folder of `make kernels-folder`, in a process without this package, as `kernels` and as Python import it."""

import runpy

import pytest
from checkout import ROOT
from fresh_process import run_code

from hf_liere.kernels import cpu_library


write = runpy.run_path(str(ROOT / ".kernels" / "write.py"))["write"]
LOADERS = {
    "python": """
        import importlib.util, json
        (variant,) = Path("folder/build").iterdir()
        name = json.loads((variant / "metadata.json").read_text())["id"]
        specification = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        loaded = sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(loaded)
    """,
    "kernels": """
        from kernels import get_local_kernel
        from kernels._rust import Build
        Build.open("folder")
        loaded = get_local_kernel(Path("folder"), backend="cpu")
    """,
}
CHECKS = """
import sys
import torch
from pathlib import Path

library = sys.modules[loaded.__name__ + ".kernels.cpu_library"].library()
assert Path(library._name).is_relative_to(Path("folder/build").resolve()), library._name
for size in (2, 3, 4, 8, 48, 80):
    entries = torch.randn(2, 3, size * (size - 1) // 2, dtype=torch.float64) / size**0.5
    results = []
    for dtype, exponential in ((torch.float32, loaded.skew_exponential), (torch.float64, torch.matrix_exp)):
        leaf = entries.to(dtype).requires_grad_()
        rotations = exponential(loaded.skew(leaf, size))
        generator = torch.Generator().manual_seed(1)
        query, key, factor = (torch.randn(5, 1, 2, 3 * size + 1, generator=generator).to(dtype) for _ in range(3))
        blocks = rotations[None, None]  # (1, 1, 2, 3, b, b)
        if dtype == torch.float32:
            rotated, other = loaded.rotate(query, key, blocks)
        else:
            columns = query[..., :-1].unflatten(-1, (3, size, 1))
            rotated = torch.cat([(blocks @ columns).flatten(-3), query[..., -1:]], dim=-1)
        (rotated * factor).sum().backward()
        results.append([rotations.detach().double(), rotated.detach().double(), leaf.grad.double()])
    # float32 sums of up to 80 products of numbers around one.
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-5)
try:
    loaded.skew_exponential(torch.zeros(2, 3))
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory, compiled_kernels):
    folder = tmp_path_factory.mktemp("kernels")
    write(folder / "folder")
    return folder


@pytest.mark.parametrize("loader", LOADERS)
def test_the_folder_needs_no_package_and_is_exact(written, loader):
    if loader == "kernels":
        pytest.importorskip("kernels", reason="kernels is not installed")
    code = "import sys\nfrom pathlib import Path\n" + "\n".join(line.strip() for line in LOADERS[loader].splitlines())
    assert run_code(code + CHECKS, written, package=False) == ["generators has shape (2, 3); accepted: (…, b, b)."]


def test_the_folder_contains_the_sources_and_the_libraries(written):
    source, (variant,) = (
        written / "folder" / "torch-ext" / "hf_liere_rotations",
        (written / "folder" / "build").iterdir(),
    )
    for folder, pattern in ((source, "*.[ch]*"), (source, "*.so"), (variant, "*.so")):
        expected = {path.name for path in cpu_library.FOLDER.glob(pattern)}
        assert expected and {path.name for path in (folder / "kernels").glob(pattern)} == expected
    with pytest.raises(FileExistsError):
        write(written / "folder")
