"""SkipRule: when a neuron may be left out for a token. A rule returns what is active and stores nothing.

`exact`: the activation is zero, so leaving it out changes nothing (PowerInfer, SOSP'24). `magnitude`: the activated
gate lies below a calibrated threshold (CATS, 2024). `predicted`: a predictor foretells it (DejaVu, ICML'23). `none`:
every neuron is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

RuleKind = Literal["none", "exact", "magnitude", "predicted"]
RULE_KINDS: tuple[RuleKind, ...] = ("none", "exact", "magnitude", "predicted")


@dataclass(frozen=True)
class SkipRule:
    """`threshold` is read by `magnitude` only: neurons with |activated gate| below it are left out."""

    kind: RuleKind = "none"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in RULE_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(RULE_KINDS)}, got {self.kind!r}")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold: expected a finite number >= 0, got {self.threshold!r}")

    def active(self, gate: Tensor) -> Tensor:
        """bool [tokens, neurons]: which of the activated gates `gate` [tokens, neurons] the rule keeps. NaN counts as
        active.
        """
        return gate != 0 if self.kind != "magnitude" else ~(gate.abs() < self.threshold)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **({"threshold": self.threshold} if self.kind == "magnitude" else {})}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SkipRule:
        return cls(fields["kind"], float(fields.get("threshold", 0.0)))


def gives_exact_zeros(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether `activation` is exactly zero for every negative input, as ReLU and ReLU^2 are and SiLU and GELU are
    not.
    """
    return not bool(activation(-torch.logspace(-3, 1, 64)).any())


Skipping = Literal["decode", "always", "never"]
_skipping: ContextVar[Skipping] = ContextVar("hf_sparse_skipping", default="decode")
_decoding: ContextVar[bool] = ContextVar("hf_sparse_decoding", default=False)


@contextmanager
def skipping(mode: Skipping) -> Iterator[None]:
    """Within it rules apply to every token (`always`, how quality is measured), to none (`never`, the dense model), or,
    as elsewhere, to tokens that are decoded one by one (`decode`): prompts are computed densely.
    """
    token = _skipping.set(mode)
    try:
        yield
    finally:
        _skipping.reset(token)


def skipping_mode() -> Skipping:
    """What `skipping` says here and now."""
    return _skipping.get()


def note_forward(new_tokens: int, cached_tokens: int) -> None:
    """Called as a forward pass begins: one new token per row after others are cached is a decode step."""
    _decoding.set(new_tokens == 1 and cached_tokens > 0)


def rules_apply() -> bool:
    mode = _skipping.get()
    return mode == "always" or (mode == "decode" and _decoding.get())
