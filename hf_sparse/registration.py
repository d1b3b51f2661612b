"""Makes transformers know the quantization method "hf_sparse" as soon as hf_sparse is imported, without importing
transformers, which takes seconds, and without loading any code of ours before such a model is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

METHOD = "hf_sparse"
_WHERE = "transformers.quantizers.auto"


class _Later:
    """Stands for a class of hf_sparse until it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def _found(self) -> Any:
        return getattr(import_module(self._module), self._name)


class _Watch(MetaPathFinder, Loader):
    """Registers when transformers imports its table of methods; else leaves that import as it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _WHERE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)


def _register(table: Any) -> None:
    table.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, _Later("hf_sparse.config", "WeightOnlyQuantConfig"))
    table.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, _Later("hf_sparse.quantizer", "SparseQuantizer"))


def register_when_transformers_is_there() -> None:
    """Registers now, or when transformers comes."""
    if _WHERE in sys.modules:
        _register(sys.modules[_WHERE])
    else:
        sys.meta_path.insert(0, _Watch())
