"""Whether a model still is what native code was built from: native code has addresses and copies of what it computes
with, and no change of the model reaches it by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COPIED = 1 << 16  # elements of a tensor at most, whose values are compared too


class Watch:
    """Remembers a model: its modules, their parameters and buffers, whether `forward` was replaced, every attribute of
    `attributes_of` (modules and config), and `objects`, attributes that are likely to change.
    """

    def __init__(self, model: nn.Module, attributes_of: Iterable[Any], objects: Iterable[tuple[Any, str]]) -> None:
        slots = [(vars(owner), name) for owner, name in objects]
        self._likely = len(slots)
        tensors: dict[int, Tensor] = {}
        for module in model.modules():
            slots.append((vars(module), "forward"))
            for held in (module._modules, module._parameters, module._buffers):
                slots += [(held, name) for name in held]
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        for owner in attributes_of:
            slots += [(vars(owner), name) for name in vars(owner) if not name.startswith("_")]
        self._dicts = [held for held, _ in slots]
        self._names = [name for _, name in slots]
        self._values = self._current(len(slots))
        # Tensors made in inference mode count no changes.
        self._counting = [tensor for tensor in tensors.values() if not tensor.is_inference()]
        self._versions = self._current_versions()
        self._tensors = list(tensors.values())
        self._addresses = self._current_addresses()
        self._small = [tensor for tensor in tensors.values() if tensor.numel() <= _COPIED and not tensor.is_meta]
        self._copies = [_bytes(tensor).clone() for tensor in self._small]

    def _current(self, count: int) -> list[Any]:
        return list(map(dict.get, self._dicts[:count], self._names))

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in self._counting]

    def _current_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]

    def likely_same(self) -> bool:
        """Whether none of `objects` was replaced, and no tensor changed in a way that PyTorch counts."""
        return self._versions == self._current_versions() and self._same_objects(self._likely)

    def same(self) -> bool:
        """Whether all is as it was, values of small tensors and the places of large ones included."""
        return (
            self._versions == self._current_versions()
            and self._same_objects(len(self._dicts))
            and self._addresses == self._current_addresses()
            and all(torch.equal(_bytes(tensor), copy) for tensor, copy in zip(self._small, self._copies, strict=True))
        )

    def _same_objects(self, count: int) -> bool:
        return all(map(operator.is_, self._current(count), self._values))


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, so that NaN is like itself."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
