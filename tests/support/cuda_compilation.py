"""The kernels for CUDA, compiled without a GPU."""

import inspect

import torch

from hf_liere.kernels import cuda as triton_kernels


def compile_for_cuda(capability, pointer, head_dim, count):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    states = torch.empty(256, 6, 197, head_dim, dtype={"*bf16": torch.bfloat16, "*fp32": torch.float32}[pointer])
    strides = ("i32",) * 3
    types = dict.fromkeys(("states", "gradients", "out"), ((pointer, *strides),) * count)
    types |= dict.fromkeys(("rotation", "sums"), ("*fp32", *strides)) | {"sizes": ("i32",) * 5}
    for name in ("_rotate_planes_kernel", "_angle_gradients_kernel", "_rotate_blocks_kernel", "_outer_products_kernel"):
        block_size = 8 if "block" in name or "outer" in name else None
        *_, tiles = triton_kernels._launch((states,) * count, (1, 6, 197, head_dim // 8), block_size, None)
        tiles |= {"INVERSE": True}
        options = {option: tiles.pop(option) for option in ("num_warps", "num_stages") if option in tiles}
        kernel = getattr(triton_kernels, name)
        arguments = inspect.signature(kernel.fn).parameters
        constants = {argument: tiles[argument] for argument in arguments if argument.isupper()}
        signature = {argument: types.get(argument, "constexpr") for argument in arguments}
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024
