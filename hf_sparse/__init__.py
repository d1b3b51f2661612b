"""hf_sparse: transformers models that compute only the neurons that matter, each on the device where it lives.

Lazy (PEP 562): `import hf_sparse.quantization` loads no model code, and what is exported here is imported when it is
first asked for. transformers is told of the quantization method "hf_sparse", so that
`AutoModelForCausalLM.from_pretrained` reads what hf_sparse saved.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .registration import register_when_transformers_is_there

if TYPE_CHECKING:
    from .auto import SparseAutoModelForCausalLM
    from .config import SparseConfig, WeightOnlyQuantConfig
    from .modeling import StreamingCache
    from .plan import PlacementPlan
    from .predictor_loading import load_predictors

__version__ = "0.1.0"

__all__ = [
    "PlacementPlan",
    "SparseAutoModelForCausalLM",
    "SparseConfig",
    "StreamingCache",
    "WeightOnlyQuantConfig",
    "__version__",
    "load_predictors",
]

_MODULE_OF = {
    "PlacementPlan": "plan",
    "SparseAutoModelForCausalLM": "auto",
    "SparseConfig": "config",
    "StreamingCache": "modeling",
    "WeightOnlyQuantConfig": "config",
    "load_predictors": "predictor_loading",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # the next access is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_when_transformers_is_there()
