"""HybridAttention: the family's own attention, run on each tier with the KV groups that live there.

Positions, norms, masks, softcaps and score functions stay transformers' own code. Each tier has a narrowed copy of the
family's module: its projections read that tier's rows, its head counts are the tier's. The partial outputs are added
once.
"""

from __future__ import annotations

import copy
import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.quantization import (
    InputMatrix,
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    input_product,
)

from .block import FEW_ROWS, BlockSpec, HybridBlock, Shard, union
from .cache import TierCacheView, settle_cache
from .predictor import Predictor
from .rules import Place, RuleKind
from .tiers import HandedOver, all_to_device, merge

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
CACHE_NAMES = ("cache", "layer_past", "past_key_values")

# bool [tokens, query heads of a tier]: those that are computed while its module runs; None: all.
_computed_heads: ContextVar[Tensor | None] = ContextVar("hf_sparse_computed_heads", default=None)


class NeuronLinear(nn.Module):
    """Stands in a narrowed module where a linear layer was. One that `writes` gives fp32, unmerged and without bias.
    `place`: where its input is in the block, whose rule may leave out entries of it; `positions` are those of the
    entries in the whole block.
    """

    def __init__(
        self,
        matrix: NeuronMatrix | InputMatrix,
        bias: Tensor | None,
        writes: bool,
        block: HybridBlock,
        shard: Shard,
        place: Place | None,
        positions: Tensor | None,
    ) -> None:
        super().__init__()
        self.matrix, self.bias, self.writes, self.place, self.positions = matrix, bias, writes, place, positions
        self.compute_dtype = block.weights.compute_dtype
        self.shard = shard
        self._block = (block,)  # in a tuple: it must not become a child

    def forward(self, x: Tensor) -> Tensor:
        (block,), flat, index, rows = self._block, x.reshape(-1, x.shape[-1]), None, None
        if self.place is not None:
            within = None
            if (heads := _computed_heads.get()) is not None:
                of_heads = heads.repeat_interleave(self.matrix.rows // heads.shape[1], dim=1)
                within, rows = (of_heads, None) if self.writes else (None, of_heads)
            flat, kept = block.seen(self.place, flat, block.rule_now(), self.positions, within, self.shard)
            if kept is not None and len(flat) <= FEW_ROWS and block.probe is None:
                index = union(kept)
        if isinstance(self.matrix, InputMatrix):
            out = input_product(self.matrix, flat, index, compute_dtype=self.compute_dtype)
        elif self.writes:
            values = flat if index is None else flat[:, index]
            added = gathered_accumulate(self.matrix, values, index, compute_dtype=self.compute_dtype)
            return added.view(*x.shape[:-1], -1)
        else:
            listed = None if rows is None or len(flat) > FEW_ROWS else union(rows)
            out = gathered_row_product(self.matrix, flat, listed, compute_dtype=self.compute_dtype)
            if listed is not None:
                out = out.new_zeros(len(flat), self.matrix.rows).index_copy(1, listed, out)
        if self.bias is not None:
            out = out + self.bias
        if rows is not None:
            out = torch.where(rows, out, 0.0)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


class _NarrowedConfig:
    """A view of a config with other head counts: what else is read or changed on the config is seen through it."""

    def __init__(self, config: Any, overrides: dict[str, int]) -> None:
        self._config, self._overrides = config, overrides

    def __getattr__(self, name: str) -> Any:
        if name in ("_config", "_overrides"):  # not there yet while a copy is made
            raise AttributeError(name)
        return self._overrides[name] if name in self._overrides else getattr(self._config, name)


class HybridAttention(HybridBlock):
    """Takes and gives what the family's attention module does: `forward(hidden_states, ...) -> (output, attention
    weights or None)`.

    `module` is that module, on the meta device; its projections are replaced, its other children (q and k norms) stay.
    The instance also counts as one of the module's class, so that `output_attentions` finds it.
    """

    def __init__(self, spec: BlockSpec, module: nn.Module) -> None:
        super().__init__(spec)
        self.skips_inputs_of = "q_proj" if "q_proj" in self.projections else None
        self._template = [module]  # in a list: it must not become a child, its projections are on the meta device
        for name, child in module.named_children():
            if name not in self.projections:
                self.add_module(name, child)
        self.modules_of_tiers: list[nn.Module] = []  # a plain list: they share this block's children
        self.predicts = self._heads_to_predict(module)
        self.__class__ = _attention_class(type(module))  # type: ignore[arg-type]  # classes are hashable

    def _heads_to_predict(self, module: nn.Module) -> int:
        """Query heads, where one may be left out alone: q has a matrix for itself, and no norm over all heads."""
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
        q, width = self.projections.get("q_proj"), self.width_of("output")
        if not isinstance(heads, int) or q is None or sum(q.rows) * self.neurons != width:
            return 0
        norm = getattr(getattr(module, "q_norm", None), "weight", None)
        return 0 if isinstance(norm, Tensor) and norm.numel() == width and heads > 1 else heads

    def takes(self, kind: RuleKind) -> tuple[Place, ...]:
        """One matrix for q, k and v is read whole; where heads are predicted q is read by head."""
        return self.places if self.skips_inputs_of and kind != "predicted" else ("output",)

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """What keys and values of one neuron (a KV group) take in a cache of `dtype`; int8 has a scale per head."""
        module: Any = self._template[0]
        config = getattr(module, "config", None)
        heads = getattr(config, "num_attention_heads", None) or module.num_heads
        head_dim = getattr(module, "head_dim", None) or self.width_of("output") // heads
        cached = cached_heads(config, heads)
        scales = 4 if dtype == torch.int8 else 0
        return -(-2 * cached // self.neurons) * (head_dim * dtype.itemsize + scales)

    def read_share_of(self, name: str, matrix: NeuronMatrix | InputMatrix, counters: Tensor | None = None) -> float:
        if name == "q_proj" and self.predictor_in_use is not None:
            return self.kept("heads")
        return super().read_share_of(name, matrix, counters)

    @property
    def predictor_in_use(self) -> Predictor | None:
        return self._predictor if self._rule.kind == "predicted" else None

    def _heads(self, hidden_states: Tensor) -> Tensor | None:
        """bool [tokens, query heads]: those that count for the tokens of `hidden_states`; None: all."""
        predictor = self.predictor_in_use
        if predictor is None or self.rule_now() is None:
            return None
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        heads = predictor.active(x, self.weights.compute_dtype)
        self.count("heads", heads, heads.numel())
        return heads

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _bare_attention, (type(self._template[0]),), self.__dict__

    def _placed(self) -> None:
        self.modules_of_tiers = [self._narrowed(shard) for shard in self.shards]

    def _narrowed(self, shard: Shard) -> nn.Module:
        module = copy.copy(self._template[0])
        module._modules = {}
        for name, child in self.named_children():
            if any(p.device != shard.tier.device for p in child.parameters()):
                child = copy.deepcopy(child).to(shard.tier.device)
            module._modules[name] = child
        for name, projection in self.projections.items():
            place: Place | None = "output" if projection.writes else "input" if name == self.skips_inputs_of else None
            positions = None
            if projection.writes and len(shard.neurons) < self.neurons:
                positions = projection.stored_rows(shard.neurons.cpu(), self.neurons).to(shard.tier.device)
            module._modules[name] = NeuronLinear(
                shard.matrices[name], shard.biases.get(name), projection.writes, self, shard, place, positions
            )
        if len(shard.neurons) < self.neurons:
            narrow = lambda count: count * len(shard.neurons) // self.neurons  # noqa: E731
            for name in HEAD_COUNTS:
                if hasattr(module, name):
                    setattr(module, name, narrow(getattr(module, name)))
            if hasattr(module, "config"):
                heads = {name: getattr(module.config, name, None) for name in HEAD_COUNTS}
                overrides = {name: narrow(count) for name, count in heads.items() if isinstance(count, int)}
                module.config = _NarrowedConfig(module.config, overrides)  # type: ignore[assignment]
        return module.eval()

    @property
    def output_linear(self) -> NeuronLinear:
        """The projection that writes, while one tier holds the whole block; its input is what the heads contribute."""
        name = next(name for name, p in self.projections.items() if p.writes)
        (module,) = self.modules_of_tiers
        return module.get_submodule(name)  # type: ignore[return-value]

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`residual` is added for families whose attention does so itself (Bloom)."""
        heads = self._heads(hidden_states)
        for name in CACHE_NAMES:
            if kwargs.get(name) is not None:
                parts = [(shard.neurons, shard.tier.device) for shard in self.shards]
                settle_cache(kwargs[name], self.id.layer, parts)
        given = HandedOver(hidden_states, [shard.tier for shard in self.shards])
        results = self.side_by_side(lambda i: self._partial(i, self.shards[i], given, residual, heads, kwargs))
        out = merge([partial for partial, _ in results], hidden_states.device)
        if self.output_bias is not None:
            out = out + self.output_bias
        out = out.to(hidden_states.dtype)
        if residual is not None:
            out = out + residual
        return out, self._merged_weights([weights for _, weights in results])

    def _partial(
        self,
        tier: int,
        shard: Shard,
        given: HandedOver,
        residual: Tensor | None,
        heads: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        device = shard.tier.device
        hidden_states = given.at(device)
        if heads is not None:
            heads = heads.to(device)[:, self._query_heads(shard, heads.shape[1])]
        kwargs = {name: all_to_device(value, device) for name, value in kwargs.items()}
        if len(self.shards) > 1:
            for name in CACHE_NAMES:
                if kwargs.get(name) is not None:
                    kwargs[name] = TierCacheView(kwargs[name], tier)
            if kwargs.get("alibi") is not None:
                kwargs["alibi"] = self._alibi_of(shard, kwargs["alibi"], hidden_states.shape[0])
            mask = kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:  # one mask per head: ALiBi is in it
                kwargs["attention_mask"] = mask[:, self._query_heads(shard, mask.shape[1])]
        if residual is not None:
            kwargs["residual"] = torch.zeros((), device=device)
        token = _computed_heads.set(heads)
        try:
            return self.modules_of_tiers[tier](hidden_states, **kwargs)
        finally:
            _computed_heads.reset(token)

    def _query_heads(self, shard: Shard, total: int) -> Tensor:
        per_group = total // self.neurons
        return (
            shard.neurons.long()[:, None] * per_group + torch.arange(per_group, device=shard.neurons.device)
        ).flatten()

    def _alibi_of(self, shard: Shard, alibi: Tensor, batch: int) -> Tensor:
        """alibi [batch * heads, 1, keys] or [batch, heads, 1, keys] -> the same for the heads of one tier."""
        if alibi.dim() == 4:
            return alibi[:, self._query_heads(shard, alibi.shape[1])]
        alibi = alibi.view(batch, -1, *alibi.shape[1:])
        return alibi[:, self._query_heads(shard, alibi.shape[1])].flatten(0, 1)

    def _merged_weights(self, parts: list[Tensor | None]) -> Tensor | None:
        """Attention weights [batch, heads, queries, keys] of all tiers, in model order."""
        if len(parts) == 1:
            return parts[0]
        if any(part is None for part in parts):
            return None
        whole = torch.cat([part.to(parts[0].device) for part in parts], dim=1)  # type: ignore[union-attr]
        heads = torch.cat([self._query_heads(shard, whole.shape[1]).to(whole.device) for shard in self.shards])
        return whole[:, heads.argsort()]


def cached_heads(config: Any, heads: int) -> int:
    """Heads whose keys a layer with `heads` query heads caches."""
    if getattr(config, "model_type", None) == "falcon":  # which repeats keys for each query head
        return heads if config.new_decoder_architecture or not config.multi_query else 1
    return getattr(config, "num_key_value_heads", None) or heads


@functools.cache
def _attention_class(cls: type[nn.Module]) -> type[HybridAttention]:
    return type("HybridAttention", (HybridAttention, cls), {"__module__": __name__})


def _bare_attention(cls: type[nn.Module]) -> HybridAttention:
    """For copying and unpickling, which fill it afterwards."""
    made = _attention_class(cls)  # type: ignore[arg-type]
    return made.__new__(made)
