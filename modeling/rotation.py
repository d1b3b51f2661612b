"""Rotary positions as a family computes them, at any distance without loss.

transformers multiplies positions and frequencies in float32: from a few ten thousand tokens on, angles are off by
thousandths, and frequencies that depend on the length change under keys that are cached. A text without an end needs
neither: angles are formed in float64, frequencies are those of the context's length.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Layout = Literal["halves", "neighbours", "once"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer turns queries and keys (RoPE, Su et al. 2021, section 3.4.2).

    `frequencies`: float64 [pairs], radians per token; the first 2 * pairs entries of a head turn. `scaling`: what
    cosines and sines are multiplied by (YaRN's). `interleaved`: neighbours are pairs, not the halves of the head.
    `layout`: how the family's tables repeat what belongs to a pair.
    """

    frequencies: Tensor
    scaling: float
    interleaved: bool
    layout: Layout

    def pairs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float64 [..., pairs], scaled."""
        angles = positions[..., None].double() * self.frequencies.to(positions.device)
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` [batch, tokens] as the family's own module gives them."""
        cos, sin = (self._laid_out(table) for table in self.pairs(positions))
        return cos.to(dtype), sin.to(dtype)

    def _laid_out(self, table: Tensor) -> Tensor:
        if self.layout == "halves":
            return torch.cat((table, table), dim=-1)
        return table.repeat_interleave(2, dim=-1) if self.layout == "neighbours" else table

    def turn(self, keys: Tensor, by: int) -> Tensor:
        """`keys` [..., head_dim], which lie at some positions, as they were `by` tokens later; scaled as before."""
        angles = by * self.frequencies.to(keys.device)
        cos, sin = angles.cos().float(), angles.sin().float()
        width, turned = 2 * len(self.frequencies), keys.float()
        if self.interleaved:
            a, b = turned[..., 0:width:2], turned[..., 1:width:2]
            part = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned[..., : width // 2], turned[..., width // 2 : width]
            part = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((part, turned[..., width:]), dim=-1).to(keys.dtype)


def rotary_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module of `model` that computes cosines and sines, and the one that owns it. Raises ValueError where there is
    none, or more than one.
    """
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if len(found) != 1:
        raise ValueError(f"model: expected one module rotary_emb, {type(model).__name__} has {len(found)}")
    name, module = found[0]
    return module, model.get_submodule(name.rpartition(".")[0])


def rotations_of(model: nn.Module, ctx_size: int, attention: nn.Module) -> dict[str | None, Rotation]:
    """By type of layer (None: all alike) how `model` turns keys in texts of up to `ctx_size` tokens. `attention` is one
    of its attention modules, as transformers made it. Raises ValueError where that cannot be told.
    """
    rotary: Any = rotary_of(model)[0]
    kinds = getattr(rotary, "rope_type", "default")
    of_layers: list[str | None] = list(kinds) if isinstance(kinds, dict) else [None]
    return {kind: _rotation(rotary, kind, ctx_size, attention) for kind in of_layers}


def _rotation(rotary: Any, layer_type: str | None, ctx_size: int, attention: nn.Module) -> Rotation:
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies = getattr(rotary, f"{prefix}original_inv_freq", getattr(rotary, f"{prefix}inv_freq", None))
    if not isinstance(frequencies, Tensor):
        raise ValueError(f"model: {type(rotary).__name__} has no inv_freq")
    probes = [0, 1, 5]
    if (rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]) == "longrope":
        parameters = rotary.config.rope_parameters
        trained = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        if ctx_size > trained:  # the factors for long texts, all along
            options: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, "cpu", seq_len=trained + 1, **options)
            probes[-1] = trained
    scaling = float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    positions = torch.tensor([probes], device=frequencies.device)
    x = torch.zeros(1, len(probes), 1, dtype=torch.float32, device=frequencies.device)
    with torch.no_grad():
        cos, sin = rotary(x, positions) if layer_type is None else rotary(x, positions, layer_type)
        for layout in ("halves", "neighbours", "once"):
            made = Rotation(frequencies.detach().double(), scaling, _interleaved(attention, cos, sin), layout)
            if all(_near(*tables) for tables in zip(made.tables(positions, torch.float32), (cos, sin), strict=True)):
                return made
    raise ValueError(f"model: cannot tell how {type(rotary).__name__} lays out its cosines")


def _interleaved(attention: nn.Module, cos: Tensor, sin: Tensor) -> bool:
    """Which entries of a key are a pair, by what the family does with one."""
    apply = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
    half = cos.shape[-1] // 2
    key = torch.zeros(1, 1, cos.shape[1], cos.shape[-1], device=cos.device)
    key[..., 0] = 1.0
    try:
        turned = apply(key, key, cos, sin)[1][0, 0, 1]  # type: ignore[misc]
    except Exception as error:
        raise ValueError(f"model: cannot tell how {type(attention).__name__} turns its keys: {error}") from error
    partners = [i for i in (1, half) if i != 0 and float(turned[i].abs()) > 1e-6]
    if len(partners) != 1 and half != 1:
        raise ValueError(f"model: cannot tell which entries {type(attention).__name__} turns together")
    return partners == [1] and half != 1


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=2e-3)


# By type of layer, those of the cache that the model is given at the moment, if it is one that goes on without an end.
_streamed: ContextVar[dict[str | None, Rotation] | None] = ContextVar("hf_sparse_streamed", default=None)


def turn_exactly(model: nn.Module) -> None:
    """From now on `model` turns queries and keys by exact angles whenever it is given a StreamingCache. A model that
    does already, and one without rotary positions, are left as they are.
    """
    try:
        rotary, owner = rotary_of(model)
    except ValueError:
        return
    if _exact_tables in rotary._forward_hooks.values():
        return
    owner.register_forward_pre_hook(_note_cache, with_kwargs=True)
    owner.register_forward_hook(_forget_cache, always_call=True)
    rotary.register_forward_hook(_exact_tables, with_kwargs=True)


def _note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    _streamed.set(getattr(cache, "rotations", None))


def _forget_cache(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    _streamed.set(None)


def _exact_tables(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    rotations = _streamed.get()
    if not rotations:
        return result
    given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
    return rotations[given.get("layer_type")].tables(given["position_ids"], result[0].dtype)


for _hook in (_note_cache, _forget_cache, _exact_tables):
    _hook.of_hf_sparse = True  # type: ignore[union-attr]  # see Engine.observed
