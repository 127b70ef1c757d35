"""
Faults that the comparison with the plain models must notice, each a text in the file that defines a name, and another
text. Files are found by the name, so that they may move.
"""

import ast
import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT


PACKAGE = ROOT / "hf_liere"
LIBRARIES = (
    *("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.backbone_utils"),
    *("transformers.masking_utils", "transformers.modeling_layers", "transformers.utils.output_capturing"),
)


class Fault(NamedTuple):
    """
    Attributes:
        anchor: A class, function or constant at the top of a file of the package.
        text: What occurs once in that file.
        faulty: What the fault writes instead.
    """

    anchor: str
    text: str
    faulty: str


FAULTS = tuple(
    Fault(*fault)
    for fault in (
        # Coordinates.
        ("in_unit", "return (i + 0.5) / n", "return (i + 0.4) / n"),
        ("_on_train_grid", "i * (n / n0 / _at_least_one(n - 1))", "i * (1 / _at_least_one(n - 1))"),
        ("TokenPositions", "(i + 0.5) / w", "(i + 0.5) / n"),
        ("TokenPositions", "lambda i, n, n0, w: i * (n0 / n)", "lambda i, n, n0, w: i * (n / n0)"),
        (
            "place_patches",
            "(indices + 0.5 - extents.new_tensor(grid) / 2)",
            "(indices + 1.0 - extents.new_tensor(grid) / 2)",
        ),
        ("physical_extents", "- (first + last) / 2", "- first"),
        ("distinct_grids", "None if own is None else tuple(own.tolist())", "None"),
        ("rotated_prefix", "0.0 if convention is not None and convention.centre == 0 else coordinate", "coordinate"),
        ("place_given", "coordinates = (coordinates - origin) * scale", "coordinates = coordinates * scale"),
        ("grid_steps", "place(0.0, size, size, train_grid[-1]) for", "place(0.5, size, size, train_grid[-1]) for"),
        # Displacements in training.
        ("draw_perturbation", "math.erf(0.5 / (strength * math.sqrt(2)))", "math.erf(0.5 / strength)"),
        ("draw_displacements", "centre = half - 0.5", "centre = half"),
        ("draw_kept_tokens", "num_patches - int(num_patches * prob)", "int(num_patches * (1 - prob))"),
        ("LieREEncoderModel", "if rotation is None or kept is None else rotation.select(kept)", ""),
        # Generators and their starts.
        ("ComRoPEAxialPartition", "device=device) % self.num_axes", "device=device) // self.num_axes % self.num_axes"),
        (
            "cayley_map",
            "solve_ex(identity + matrices, identity - matrices)",
            "solve_ex(identity - matrices, identity + matrices)",
        ),
        ("inner_bases", "bases[1:].transpose(-1, -2) @ bases[:-1]", "bases[:-1].transpose(-1, -2) @ bases[1:]"),
        ("RotaryEncoding", "self.layers = 1 if config.share_layers", "self.layers = 1 if config.share_heads"),
        (
            "golden_gate_frequencies",
            "torch.arange(1, heads * planes + 1, **real)",
            "torch.arange(heads * planes, **real)",
        ),
        # Rotations.
        ("GroupedPositions", ".argsort()]", ".argsort(descending=True)]"),
        ("GroupedRotation", "order = torch.cat(self.samples).argsort()", "order = torch.cat(self.samples)"),
        ("batch_rotations", "square.masked_fill_(excess, torch.nan)", "square.mul_(1 + 1e-6)"),
        (
            "_grid_rays",
            "rows = [ray + [-1] * (longest - len(ray))",
            "rows = [ray[:1] * len(ray) + [-1] * (longest - len(ray))",
        ),
        ("layer_plane_rotations", "cos_sin(angles, dtype).unbind()", "cos_sin(angles, dtype).flip(0).unbind()"),
        ("cos_sin", "(angles - revolutions).to(dtype)", "(angles - revolutions).bfloat16().to(dtype)"),
        # Gradients.
        ("eigen_gradients", "masked_fill_(half == 0, 1)", "masked_fill_(half != 0, 1)"),
        ("integrate_layers", "_plane_frequencies(gradient).add_(by_frequency)", "_plane_frequencies(gradient)"),
        ("quaternion_rotations", "* curvature - sinc * real", "* curvature + sinc * real"),
        ("_apply_polynomials", "* coefficients[degree - 1]).flatten(2)", "* coefficients[degree - 2]).flatten(2)"),
        ("derivative_coefficients", "1 / math.factorial(power + 1)", "1 / math.factorial(power)"),
        # The cache.
        ("RotationCache", "all(torch.equal(known, given) for known, given in zip(self.sources, sources))", "True"),
        ("RotationCache", "key = (facts, layers.start, dtype,", "key = (facts.grid[:1], layers.start, dtype,"),
        # Folding.
        (
            "LieREAttention",
            "(self.q_proj, self.k_proj, self.v_proj), basis, self.o_proj)",
            "(self.q_proj, self.k_proj), basis)",
        ),
        ("to_folded", "_reorder(to_basis(rows, basis), order)", "to_basis(rows, basis)"),
        # The transformer.
        ("LieRELayer", "self.layer_scale2(self.dropout(transformed))", "self.layer_scale1(self.dropout(transformed))"),
        ("LieRELayer", "config.drop_path_rate * index /", "config.drop_path_rate * (index + 1) /"),
        ("LieREAttention", "rotate_back(of_values, attended.transpose(1, 2)).transpose(1, 2)", "attended"),
        ("LieREAttention", "config.head_dim**-0.5", "config.hidden_size**-0.5"),
        ("_start_of_mean", "config.num_prefix_tokens if config.pooling", "0 if config.pooling"),
        (
            "LieRETokenEmbeddings",
            "(cls_token, self.register_tokens) if token",
            "(self.register_tokens, cls_token) if token",
        ),
        ("LieRETokenEmbeddings", "cls_token = cls_token + cls_entry", "cls_token = cls_token"),
        ("patch_table", '"bicubic" if len(grid) == 2', '"bilinear" if len(grid) == 2'),
        ("read_table", "last = positions.new_tensor(size) - 1", "last = positions.new_tensor(size)"),
        (
            "LieREEncoderModel",
            "pooled = self.layernorm(pool(self.config, hidden_states, visible))",
            "pooled = pool(self.config, self.layernorm(hidden_states), visible)",
        ),
    )
)


def find_file(fault: Fault, package: Path = PACKAGE) -> Path:
    """The file that defines the anchor. Raises `LookupError` unless it is one, and contains the text once."""
    files = [path for path in package.rglob("*.py") if path.parent.name != "plain" and defines(path, fault.anchor)]
    found = [path for path in files if path.read_text("utf-8").count(fault.text) == 1]
    if len(found) != 1:
        raise LookupError(f"{fault} is in {len(found)} files; {fault.anchor} is defined in {files}.")
    return found[0]


def defines(path: Path, name: str) -> bool:
    """Whether a class, function or constant of this name is at the top of a file."""
    code = path.read_text("utf-8")
    if name not in code:
        return False
    kinds = ast.ClassDef | ast.FunctionDef
    return any(isinstance(part, kinds) and part.name == name for part in ast.parse(code).body)


def copy_package(folder: Path) -> Path:
    """The package with its compiled kernels, and the times of its files, by which bytecode is found."""
    return shutil.copytree(PACKAGE, folder / "hf_liere")


class Comparison:
    """
    Compares the first draws with the plain models, in processes that import the package from a folder. They start with
    the libraries that it needs, which takes most of the time of an import.
    """

    def __init__(self, package: Path, numbers: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(LIBRARIES))
        self.package, self.numbers = package, numbers
        self.pool = context.Pool(1, maxtasksperchild=1)

    def notices(self, fault: Fault | None) -> str:
        """What differs first while a fault is in the package; empty if nothing does."""
        if fault is None:
            return self._run()
        path = find_file(fault, self.package)
        code = path.read_text("utf-8")
        path.write_text(code.replace(fault.text, fault.faulty), "utf-8")
        try:
            return self._run()
        finally:
            path.write_text(code, "utf-8")

    def _run(self) -> str:
        return self.pool.apply_async(first_difference, (str(self.package.parent), self.numbers)).get(timeout=300)


def first_difference(folder: str, numbers: int) -> str:
    """In another process: the first difference, or error, of the package in a folder; empty without one."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    import plain_models
    import torch

    torch.set_num_threads(1)
    assert plain_models.hf_liere.__file__.startswith(folder), plain_models.hf_liere.__file__
    for number in range(numbers):
        try:
            found = plain_models.compare(number)
        except Exception as error:
            found = [repr(error)]
        if found:
            return f"Draw {number}: {found[0]}"
    return ""
