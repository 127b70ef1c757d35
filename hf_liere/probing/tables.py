"""Numbers that follow from how a module was made."""

import torch
from torch import nn


class Tables(nn.Module):
    """
    Buffers that no file contains, and that always have their values. On the meta device they stay on the CPU. What
    frameworks write over them, as `to_empty` and `from_pretrained` do, shows only the device where they belong.
    """

    def set_tables(self, **tables: torch.Tensor | None) -> None:
        """Register buffers, or give them other values; `None` for no buffer."""
        self.__dict__["_tables"] = {name: None if values is None else values.cpu() for name, values in tables.items()}
        for name, values in tables.items():
            self.register_buffer(name, values, persistent=False)

    def __setattr__(self, name: str, value: object) -> None:
        own = vars(self).get("_tables", {}).get(name)
        if own is not None and isinstance(value, torch.Tensor):
            value = own.to("cpu" if value.is_meta else value.device)
        super().__setattr__(name, value)

    def _apply(self, fn, recurse: bool = True):
        result = super()._apply(fn, recurse)
        for name in self._tables:
            setattr(self, name, self._buffers[name])
        return result
