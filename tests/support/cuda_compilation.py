"""The kernels for CUDA, compiled without a GPU."""

import inspect

import torch

from hf_liere.kernels import cuda as triton_kernels
from hf_liere.kernels import cuda_exponentials


def compile_kernel(capability, kernel, types, tiles, constants=()):
    """Down to machine code, within the shared memory of a block."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {option: tiles[option] for option in ("num_warps", "num_stages") if option in tiles}
    arguments = inspect.signature(kernel.fn).parameters
    constants = {argument: tiles[argument] for argument in arguments if argument.isupper()} | dict(constants)
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024


def compile_for_cuda(capability, pointer, head_dim, count):
    """The kernels that rotate queries and keys."""
    states = torch.empty(256, 6, 197, head_dim, dtype={"*bf16": torch.bfloat16, "*fp32": torch.float32}[pointer])
    strides = ("i32",) * 3
    types = dict.fromkeys(("states", "gradients", "out"), ((pointer, *strides),) * count)
    types |= dict.fromkeys(("rotation", "sums"), ("*fp32", *strides)) | {"sizes": ("i32",) * 5}
    for name in ("_rotate_planes_kernel", "_angle_gradients_kernel", "_rotate_blocks_kernel", "_outer_products_kernel"):
        block_size = 8 if "block" in name or "outer" in name else None
        *_, tiles = triton_kernels._launch((states,) * count, (1, 6, 197, head_dim // 8), block_size, None)
        compile_kernel(capability, getattr(triton_kernels, name), types, tiles | {"INVERSE": True})


def compile_exponentials(capability, block_size, smallest_tile):
    """The kernels of eigenbases and of exponentials in float64, for two axes, and for one, a constant for Triton."""
    # Not before Triton 3.8, where this is 16.
    cuda_exponentials.SMALLEST_TILE = max(smallest_tile, cuda_exponentials.SMALLEST_TILE)
    positions = torch.empty(196, 2, dtype=torch.float64)
    tiles = cuda_exponentials._arguments(positions, torch.empty(2, 12, 48, block_size, block_size), 3.2)[-1]
    given, sizes = ("*fp64", "*fp32"), ("i32", "i32", "i32", "i32", "fp32")
    more = {"given": ("*fp64", "*fp32", "*fp32"), "sizes": ("i32",) * 3}
    types = {"matrices": "*fp64", "bases": "*fp64", "count": "i32"}
    compile_kernel(capability, cuda_exponentials._eigenbases_kernel, types, tiles)
    for name in ("_exponentials_kernel", "_gradients_kernel"):
        kernel = getattr(cuda_exponentials, name)
        place = list(inspect.signature(kernel.fn).parameters).index("sizes")
        for axes, constants in (("i32", {}), ("constexpr", {(place, 1): 1})):
            types = {
                "given": given,
                "sizes": ("i32", axes, *sizes[2:]),
                "rotations": "*fp32",
                "results": ("*fp64",) * 2,
            }
            if name == "_gradients_kernel":
                types |= {argument: types[argument] + added for argument, added in more.items()}
            compile_kernel(capability, kernel, types, tiles, constants)
