"""What a model costs, and what share of it its position encoding has: parameters and multiply-accumulates, counted."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .attention_analysis import eager_attention
from .encodings import RotaryEncoding
from .patching import is_patched, unpatch
from .rotation import EigenRotation
from .vision_towers import find_towers, position_table


# Operations of a layer norm per element, as in LieRE's Table 8.
NORM_OPERATIONS = 5


@dataclass
class Cost:
    """
    Of one model. Operations are multiply-accumulates, with 5 per element of a layer norm (LieRE Table 8).

    Attributes:
        parameters: Of the model.
        encoding_parameters: Of its rotations: generators, multipliers, or the constants of a folded model.
        table_parameters: Of its learned table of absolute positions.
        operations: Of a forward pass, rotations included.
        rotation_operations: Of making the rotations of all layers, whatever the batch.
        rotating_operations: Of turning queries and keys by them.
    """

    parameters: int
    encoding_parameters: int
    table_parameters: int
    operations: int
    rotation_operations: int
    rotating_operations: int

    @property
    def parameter_share(self) -> float:
        """Share of all parameters that the position encoding has, table and rotations."""
        return (self.encoding_parameters + self.table_parameters) / self.parameters

    @property
    def operation_share(self) -> float:
        """Share of the operations that make rotations and turn queries and keys by them."""
        return (self.rotation_operations + self.rotating_operations) / self.operations


def count_products(run: Callable[[], object]) -> int:
    """Multiply-accumulates of the matrix products, convolutions and attentions that `run()` executes."""
    # Releases of torch differ in the fused kernels that they count; products of matrices all of them do.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # Its hooks on all modules, which tell where products are made, would be a reason not to read weights, and fail
        # where a module returns a view of a trainable parameter that was made without gradients.
        counter.mod_tracker.__exit__()
        run()
    return counter.get_total_flops() // 2


def count_forward(model: nn.Module, pixels: torch.Tensor, **options) -> tuple[int, int]:
    """
    Products of the forward pass on `pixels`, the same for every attention implementation, and elements that its layer
    norms see; `options` are the model's.
    """
    elements = []

    def count(module, inputs, output):
        elements.append(output.numel())

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, nn.LayerNorm)]
    try:
        with ExitStack() as stack:
            for tower in find_towers(model):
                stack.enter_context(eager_attention(tower))
            products = count_products(lambda: model(pixels, **options))
    finally:
        for hook in hooks:
            hook.remove()
    return products, sum(elements)


def count_cost(model: nn.Module, pixels: torch.Tensor, **options) -> Cost:
    """
    Args:
        model: A vision transformer that is called with pixels, patched or not; it is left as it is.
        pixels: A batch of inputs.
        options: Further arguments of the model.
    """
    tower = find_towers(model)[0]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    table = position_table(tower.embeddings)
    # A table may be a view of a parameter, or sinusoids that nobody stores.
    stored = {parameter.data_ptr() for parameter in tower.embeddings.parameters()}
    table_parameters = table.numel() if table is not None and table.data_ptr() in stored else 0
    encoding = getattr(tower.module, "rotary_encoding", None)
    plain, calls = model, []
    if isinstance(encoding, RotaryEncoding):
        plain = _without_rotations(model)
        hook = encoding.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
    products, elements = count_forward(model, pixels, **options)
    plain_products = products
    rotations, making, turning = [], 0, 0
    if calls:
        hook.remove()
        args, kwargs = calls[0]
        making = count_products(lambda: rotations.extend(encoding(*args, **kwargs)))
        turning = sum(_plane_products(rotation, encoding.config.num_attention_heads) for rotation in rotations)
        plain_products, _ = count_forward(plain, pixels, **options)
    return Cost(
        parameters=parameters,
        encoding_parameters=sum(parameter.numel() for parameter in encoding.parameters()) if calls else 0,
        table_parameters=table_parameters,
        operations=products + turning + NORM_OPERATIONS * elements,
        rotation_operations=making,
        rotating_operations=products - plain_products - making + turning,
    )


def _without_rotations(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    if is_patched(plain):
        return unpatch(plain)
    find_towers(plain)[0].module.rotary_encoding = None
    return plain


def _plane_products(rotation: torch.Tensor | EigenRotation, heads: int) -> int:
    """Of turning planes of query and key, 2 per channel each: they are no matrix products, which are counted anyway."""
    planes = rotation.planes if isinstance(rotation, EigenRotation) else rotation
    if planes.ndim != 5:
        return 0
    return 2 * heads * planes.shape[2] * planes.shape[3] * 2 * 2
