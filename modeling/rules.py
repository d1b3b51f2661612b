"""SkipRule: when a neuron may be left out for a token. A rule returns what is active and stores nothing.

`exact`: the activation is zero, so leaving it out changes nothing (PowerInfer, SOSP'24). `magnitude`: the activated
gate lies below a calibrated threshold (CATS, 2024). `predicted`: a predictor foretells it, of an MLP's neurons or of
attention's query heads (DejaVu, ICML'23). `none`: every neuron is computed. Entries that a projection reads may be left
out too, below thresholds of their own (TEAL, 2024; here one per entry).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

RuleKind = Literal["none", "exact", "magnitude", "predicted"]
RULE_KINDS: tuple[RuleKind, ...] = ("none", "exact", "magnitude", "predicted")

# Where entries may be left out. MLP: "input" of the gate (without one: of up), the activated "gate", the "hidden" state
# that down sees. Attention: "input" of q (k and v are always whole: later tokens see them), "output", which o sees.
Place = Literal["input", "gate", "hidden", "output"]
PLACES: dict[str, tuple[Place, ...]] = {"mlp": ("input", "gate", "hidden"), "attention": ("input", "output")}


@dataclass(frozen=True, eq=False)
class SkipRule:
    """Which neurons of a block are left out, by `kind`, and which entries of its vectors, by `below`: entry i at a
    place is left out where its magnitude is below `below[place][i]`, float32 [width of the place] or, for all alike,
    [1].

    `magnitude` chooses neurons by `below["gate"]`, if it is there, and leaves out those whose gate is zero.
    """

    kind: RuleKind = "none"
    below: Mapping[Place, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in RULE_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(RULE_KINDS)}, got {self.kind!r}")
        for place, thresholds in self.below.items():
            if place not in get_args(Place):
                raise ValueError(f"below: expected places of {', '.join(get_args(Place))}, got {place!r}")
            if self.kind == "none" or (place == "gate" and self.kind != "magnitude"):
                raise ValueError(f"below[{place!r}]: a rule of kind {self.kind!r} takes no such thresholds")
            if thresholds.dim() != 1 or thresholds.dtype != torch.float32 or not bool((thresholds >= 0).all()):
                raise ValueError(f"below[{place!r}]: expected float32 [n] with numbers >= 0")

    def keeps(self, place: Place, values: Tensor, index: Tensor | None = None) -> Tensor | None:
        """bool, the shape of `values` [tokens, entries]: which entries at `place` stay; None where all do. `index`: the
        positions of `values`' columns, where they are not all. NaN stays.
        """
        thresholds = self.below.get(place)
        if place == "gate" and thresholds is None:
            return values != 0
        if thresholds is None:
            return None
        if index is not None and len(thresholds) > 1:
            thresholds = thresholds.to(index.device)[index]
        return ~(values.abs() < thresholds.to(values.device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SkipRule) or self.kind != other.kind or self.below.keys() != other.below.keys():
            return False
        return all(torch.equal(thresholds, other.below[place]) for place, thresholds in self.below.items())

    __hash__ = None  # type: ignore[assignment]  # holds tensors


def magnitude(**below: float | Tensor) -> SkipRule:
    """The rule with these thresholds by place; a number is that of every entry."""
    return SkipRule(
        "magnitude",
        {
            p: v if isinstance(v, Tensor) else torch.tensor([v], dtype=torch.float32, device="cpu")  # type: ignore[misc]
            for p, v in below.items()
        },
    )


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
