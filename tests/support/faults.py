"""
Faults that the comparison with the plain models or a fast test must notice, each a text in the file that defines a
name, and another text. Files are found by the name, so that they may move.
"""

import ast
import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT


PACKAGES = "hf_liere", "training"
LIBRARIES = (
    *("torch", "torch._dynamo", "transformers.modeling_utils", "transformers.backbone_utils"),
    *("transformers.masking_utils", "transformers.modeling_layers", "transformers.utils.output_capturing"),
)


class Fault(NamedTuple):
    """
    Attributes:
        anchor: A class, function or constant at the top of a file of one of the `PACKAGES`.
        text: What occurs once in that file.
        faulty: What the fault writes instead.
        test: What notices it, a file in `tests`, or `file::test`; empty for the comparison with the plain models.
    """

    anchor: str
    text: str
    faulty: str
    test: str = ""


RESUMED = "properties/test_trains_and_resumes.py::test_a_killed_run_resumes_to_the_weights_of_one_that_is_not"
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
        ("LieREEncoderModel", "if kept is None else (rotation.select(kept) for rotation in rotations)", ""),
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
        # Patches.
        (
            "record_grid",
            "tuple(output.shape[2:])",
            "tuple(output.shape[:1:-1])",
            "patching/test_position_tables.py::test_table_at_train_size_is_read_at_the_index_of_each_patch[clip_vision]",
        ),
        (
            "prefix_coordinate",
            "if rotary_patch.config.rotate_prefix else 0.0",
            "",
            "patching/test_patching.py::test_prefix_that_is_not_rotated",
        ),
        (
            "rotary_attention_forward",
            "_match_strides(rotated[1], key)",
            "key",
            "patching/test_patching.py::test_attention_weights_are_those_of_explicit_rotations[clip_vision]",
        ),
        (
            "TowerPatch",
            "self.outputs.remove()",
            "self.outputs.current.clear()",
            "properties/test_patches.py::test_gradients_arrive_and_unpatching_leaves_nothing[rotating llama, blocks]",
        ),
        (
            "RopePlanes",
            "angles.sin()], dim=-1) * factor)",
            "angles.sin()], dim=-1))",
            "properties/test_starts.py::test_patches_start_at_their_model[rotating llama_yarn, planes]",
        ),
        (
            "turn_further",
            'if style == "adjacent"',
            'if style != "adjacent"',
            "patching/test_diffusion.py::test_learned_frequencies_are_those_of_another_base[FluxTransformer2DModel]",
        ),
        (
            "fold_rotations",
            "if done is not None or compose or content or not isinstance",
            "if compose or content or not isinstance",
            "patching/test_folding.py::test_what_cannot_be_folded",
        ),
        (
            "_place",
            "rows * grid[0], columns * grid[1]",
            "columns * grid[1], rows * grid[0]",
            "patching/test_folding.py::test_grids_have_constants_and_other_sizes_are_computed[dinov3]",
        ),
        # Adapters.
        (
            "merge_and_fold",
            "model.merge_and_unload()",
            "model.unload()",
            "patching/test_folding.py::test_lora_and_rotations_in_one_model[llama-rope_mixed]",
        ),
        (
            "stored_parameters",
            "copies[name] if name in copies else encoding.original_module",
            "encoding.original_module",
            "patching/test_adapters.py::test_lora_and_rotations_are_trained_and_restored_together[llama-copies]",
        ),
        (
            "require_saved_together",
            "content.get(BESIDE, {})",
            "{}",
            "patching/test_peft_adapters.py::test_an_adapter_of_another_folder_is_refused",
        ),
        (
            "write_rotations",
            "value.cpu().contiguous()",
            "value.cpu().bfloat16()",
            "properties/test_saves_and_loads.py::test_adapters_restore_rotations[patched clip_vision]",
        ),
        (
            "TowerPatch",
            "return projections(attention) or",
            "return projections(attention)[:1] or",
            "patching/test_adapters.py::test_adapter_knows_its_base_in_another_precision_and_not_one_that_was_trained",
        ),
        # Graphs.
        (
            "Pass",
            "_running.passes, shared_eigenbases.known = (), None",
            "_running.passes = ()",
            "properties/test_compiles.py::test_every_batch_has_one_graph[patched siglip2]",
        ),
        # Files.
        (
            "LieRETokensConfig",
            "if getattr(self, name, None) is not None",
            "if hasattr(self, name)",
            "storage/test_saved_code.py::test_saved_models_load_and_are_saved_again_without_the_package",
        ),
        (
            "shards",
            "if Path(name).name != name",
            "if not name",
            "storage/test_saved_model.py::test_shards_of_other_folders_are_not_loaded",
        ),
        (
            "replace_file",
            "partial.write_bytes(content)\n        os.replace(partial, path)",
            "path.write_bytes(content)",
            "storage/test_full_disk.py",
        ),
        (
            "read_volume",
            ".dataobj).T",
            ".dataobj)",
            "reading/test_clips.py::test_scanners_store_the_same_scan_in_any_axes[nii-RAS]",
        ),
        (
            "_series",
            "across * between_columns, down * between_rows",
            "across * between_rows, down * between_columns",
            "reading/test_clips.py::test_a_series_of_slices_is_a_volume",
        ),
        (
            "develop",
            "ImageOps.exif_transpose(image) if turn else image",
            "image",
            "reading/test_pictures.py::test_cameras_say_how_they_were_held[6]",
        ),
        # Training.
        (
            "EpochSampler",
            "int(self.trainer_state().epoch or 0)",
            "round(self.trainer_state().epoch or 0)",
            f"{RESUMED}[tokens]",
        ),
        (
            "last_complete_checkpoint",
            "if match and (path / STATE_FILE).is_file():",
            "if match:",
            "training/test_survival.py::test_a_half_written_checkpoint_is_never_picked_up",
        ),
        (
            "LieREEncoderModel",
            "config.patch_dropout_prob if self.training else 0.0",
            "config.patch_dropout_prob",
            "training/test_native.py::test_patches_are_dropped_in_training_only",
        ),
        (
            "ranks_and_losses",
            'labels, reduction="none", ignore_index=IGNORED_LABEL)\n    labels =',
            'labels, reduction="none", ignore_index=IGNORED_LABEL, label_smoothing=0.1)\n    labels =',
            "training/test_runs.py::test_the_evaluation_of_uneven_batches_is_exact",
        ),
        (
            "ClassificationTrainer",
            "if num_items_in_batch is None:",
            "if True:",
            "training/test_trainer.py::test_accumulated_batches_equal_one_batch",
        ),
        (
            "_regroup",
            '"weight_decay": group["weight_decay"], "lr"',
            '"lr"',
            "training/test_trainer.py::test_only_weights_of_layers_decay[0.5-liere]",
        ),
        (
            "ConditionCollator",
            'if self.encoder is None or "key" in examples[0]:',
            "if self.encoder is None:",
            "training/test_conditions.py::test_conditions_change_evaluations_but_no_training",
        ),
        (
            "collate_tokens",
            "mask[row, :count] = 1",
            "mask[row] = 1",
            "training/test_tokens.py::test_batches_are_padded",
        ),
        (
            "_import_files",
            'Path(recipe or "").parent / file',
            "Path(file)",
            "training/test_tasks.py::test_a_task_of_a_user_trains_with_its_flags[tokens]",
        ),
    )
)


def find_file(fault: Fault, root: Path = ROOT) -> Path:
    """The file that defines the anchor. Raises `LookupError` unless it is one, and contains the text once."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py") if path.parent.name != "plain")
    files = [path for path in paths if defines(path, fault.anchor)]
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


def copy_checkout(folder: Path) -> Path:
    """What tests need, with compiled kernels, and the times of files, by which bytecode is found."""
    for name in (*PACKAGES, "docs", "model_cards", "tests"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    return folder


@contextlib.contextmanager
def injected(fault: Fault | None, root: Path) -> Iterator[None]:
    """The fault is in a copy of the checkout."""
    if fault is None:
        yield
        return
    path = find_file(fault, root)
    code = path.read_text("utf-8")
    path.write_text(code.replace(fault.text, fault.faulty), "utf-8")
    try:
        yield
    finally:
        path.write_text(code, "utf-8")


def run_tests(root: Path, *tests: str) -> tuple[int, str]:
    """How the fast tests of a copy of the checkout end, and what they print."""
    options = "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"
    command = sys.executable, "-m", "pytest", *options, *(str(root / "tests" / test) for test in tests)
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout


class Comparison:
    """
    Compares the first draws with the plain models, in processes that import the package from a folder. They start with
    the libraries that it needs, which takes most of the time of an import.
    """

    def __init__(self, root: Path, numbers: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(LIBRARIES))
        self.root, self.numbers = root, numbers
        self.pool = context.Pool(1, maxtasksperchild=1)

    def notices(self, fault: Fault | None) -> str:
        """What differs first while a fault is in the package; empty if nothing does."""
        with injected(fault, self.root):
            return self.pool.apply_async(first_difference, (str(self.root), self.numbers)).get(timeout=300)


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
