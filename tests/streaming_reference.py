"""What StreamingCache is compared with: a cache that keeps unrotated keys and turns all of them anew at every step, to
the slots where they are then, with the family's own functions; and a loop that feeds one token at a time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _Layer(DynamicLayer):
    """Keys as they were before they were turned."""

    def __init__(self, turn: Any) -> None:
        super().__init__()
        self.turn, self.slot = turn, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slots = torch.arange(self.slot, self.slot + key_states.shape[2])
        super().update(self.turn(key_states, slots, back=True), value_states)
        assert self.keys is not None and self.values is not None
        return self.turn(self.keys, torch.arange(self.keys.shape[2]), back=False), self.values

    def get_seq_length(self) -> int:
        return self.slot


class Reference(Cache):
    """Of `model`, a plain one, in fp32."""

    def __init__(self, model: Any, ctx_size: int, n_keep: int, n_discard: int) -> None:
        self.ctx_size, self.n_keep = ctx_size, n_keep
        self.n_discard = n_discard if n_discard > 0 else max(1, (ctx_size - n_keep) // 2)
        super().__init__([_Layer(self._turn_of(model, i)) for i in range(model.config.num_hidden_layers)])

    def _turn_of(self, model: Any, layer: int) -> Any:
        config = model.config
        found = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
        attention = [
            m for m in model.modules() if getattr(m, "layer_idx", None) == layer and "Attention" in type(m).__name__
        ]
        if not found or getattr(config, "alibi", False) or not getattr(attention[0], "use_rope", True):
            return lambda keys, slots, back: keys
        apply = sys.modules[type(attention[0]).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        types = [config.layer_types[layer]] if isinstance(getattr(found[0], "rope_type", None), dict) else []

        def turn(keys: Tensor, slots: Tensor, back: bool) -> Tensor:
            cos, sin = found[0](torch.zeros(1, dtype=torch.float64), slots[None], *types)
            if back:  # R(-a) / scaling^2, since cosines and sines are scaled (YaRN)
                scaling = (cos.double().square() + sin.double().square()).mean()
                cos, sin = cos.double() / scaling, -sin.double() / scaling
            width = cos.shape[-1]
            part = apply(keys[..., :width].double(), keys[..., :width].double(), cos.double(), sin.double())[1]
            return torch.cat((part.to(keys.dtype), keys[..., width:]), dim=-1)

        return turn

    def make_room(self) -> None:
        """Before a token: if the cache is full, the oldest that are no sinks go."""
        if self.layers[0].slot < self.ctx_size:  # type: ignore[union-attr]
            return
        for layer in self.layers:
            chosen = [*range(self.n_keep), *range(self.n_keep + self.n_discard, self.ctx_size)]
            layer.keys, layer.values = layer.keys[:, :, chosen], layer.values[:, :, chosen]  # type: ignore
            layer.slot = len(chosen)  # type: ignore[union-attr]

    def advance(self) -> None:
        for layer in self.layers:
            layer.slot = layer.keys.shape[2]  # type: ignore


def reference_logits(model: Any, ids: Tensor, cache: Reference) -> Tensor:
    """[batch, tokens, vocabulary] of a plain model that gets `ids` [batch, tokens] one by one."""
    all_logits = []
    for token in ids.unbind(1):
        cache.make_room()
        with torch.no_grad():
            out = model(input_ids=token[:, None], past_key_values=cache, use_cache=True)
        cache.advance()
        all_logits.append(out.logits[:, -1])
    return torch.stack(all_logits, dim=1)


def reference_greedy(model: Any, prompt: Tensor, new_tokens: int, cache: Reference) -> Tensor:
    """[1, prompt + new_tokens]: greedy decoding, with every key turned anew at every step."""
    ids = prompt
    logits = reference_logits(model, prompt, cache)[:, -1]
    for _ in range(new_tokens):
        token = logits.argmax(-1, keepdim=True)
        ids = torch.cat((ids, token), dim=1)
        logits = reference_logits(model, token, cache)[:, -1]
    return ids
