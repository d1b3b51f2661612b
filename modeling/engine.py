"""Decoding one token in one native call, where the family's decoder layer is the usual one: RMSNorm, attention with
rotary positions, residual, RMSNorm, MLP, residual. transformers' own modules stay what it is compared with, and what
runs wherever this does not apply.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_sparse.quantization import NeuronMatrix, native

from .attention import HybridAttention
from .block import HybridBlock, Shard
from .head import PackedHead
from .mlp import HybridMLP
from .native_mlp import NativeWeights
from .native_mlp import NotUsual as NotUsual  # part of what this module offers
from .paged_cache import PagedCacheLayer, PageTables
from .pages import PAGE_TOKENS
from .streaming_cache import StreamingCache
from .watch import Watch

ATTENTION_IMPLEMENTATIONS = (None, "eager", "sdpa")  # that compute what native code does
STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the length
ROTATION_BLOCKS = 256  # of PAGE_TOKENS positions, whose cosines and sines are kept


@dataclass(frozen=True)
class LayerNames:
    """What a family calls the parts of a decoder layer that are not blocks. `norms`: before and after attention, before
    and after the MLP; None where there is none. `one_plus`: norms multiply by 1 + weight (Gemma). `head_norms`: q and k
    are normed, head by head ("head") or all at once ("all").
    """

    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    one_plus: bool = False
    head_norms: str | None = None


class _Rotations:
    """Cosines and sines of positions, half a head wide, float32, for the stretches of text that were looked at last."""

    def __init__(self, tables: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """`tables`: positions [1, tokens] -> cosines and sines [1, tokens, width of half a head or more]."""
        self._tables = tables
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def half_width(self) -> int:
        return self._block(0)[0].shape[1]

    def _block(self, block: int) -> tuple[Tensor, Tensor]:
        found = self._blocks.get(block)
        if found is None:
            if len(self._blocks) >= ROTATION_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            start = block * PAGE_TOKENS
            positions = torch.arange(start, start + PAGE_TOKENS, device="cpu")[None]
            with torch.no_grad():
                cos, sin = self._tables(positions)
            found = self._blocks[block] = (cos[0].float().contiguous(), sin[0].float().contiguous())
        return found

    def addresses(self, position: int) -> tuple[int, int]:
        """Of the cosines and sines of `position`, until others are asked for."""
        block, row = divmod(position, PAGE_TOKENS)
        cos, sin = self._block(block)
        offset = row * cos.shape[1] * 4
        return cos.data_ptr() + offset, sin.data_ptr() + offset


def _half(rotary: Callable[..., tuple[Tensor, Tensor]], *layer_type: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What a family's rotary embedding gives, without the second half, which repeats the first."""

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions, *layer_type)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    return tables


class Engine:
    """The native counterpart of a model whose blocks all live on the CPU. Holds addresses of the model's weights:
    `fits` says whether they still are what the model computes with.
    """

    def __init__(self, model: Any, layers_path: str, names: LayerNames) -> None:
        """Raises NotUsual where the model cannot be decoded natively."""
        if (level := native.level()) is None:
            raise NotUsual("there are no kernels")
        self._kernels = native.kernels()
        self._weights = NativeWeights()
        self._model, config = model, model.config
        if config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise NotUsual(f"attention by {config._attn_implementation!r}")
        self._base = _unwrapped(model.get_submodule(layers_path.rpartition(".")[0]))
        layers: list[Any] = list(model.get_submodule(layers_path))
        self._blocks: list[tuple[HybridAttention, HybridMLP]] = []
        self._sizes: list[tuple[int, int, int]] = []
        with torch.inference_mode(False):  # blocks count in it elsewhere too
            self._counts = torch.zeros(len(layers), 6, 2, dtype=torch.int64, device="cpu")  # see kernels.h: Step
        self._decoder = self._kernels.Decoder(level, config.hidden_size)
        self._rotations = self._make_rotations(config)
        for number, layer in enumerate(layers):
            attention, mlp = _blocks_of(layer, number, names)
            self._decoder.add(self._layer(number, layer, attention, mlp, names))
            self._blocks.append((attention, mlp))
            for block, counts in ((mlp, self._counts[number, :3]), (attention, self._counts[number, 3:])):
                counts.copy_(block.counters)
                block.counters = counts
        self._vocabulary = self._make_head(config, names)
        self._embed = model.get_input_embeddings()
        self._lock = native.Lock()
        self._watched = self._watch(layers, names)
        self._rotation_array = array("q", [0] * 8)
        self._ring_array = array("q", [0] * 3)
        self._exact: tuple[Any, list[_Rotations]] | None = None  # for the rotations of the streaming cache seen last
        self._exact_tables: dict[Any, list[_Rotations]] = {}
        self._tables: PageTables | None = None
        hooks = [
            hooks
            for module in model.modules()
            if module is not model  # which is called as ever
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        ours = [of_module for of_module in hooks if of_module and not any(map(_observes, of_module.values()))]
        self._our_hooks = [(of_module, len(of_module)) for of_module in ours]
        self._hooks = [of_module for of_module in hooks if not any(of_module is known for known in ours)]

    # Building

    def _norm(self, owner: Any, name: str | None, one_plus: bool) -> int:
        if name is None:
            return 0
        norm = owner.get_submodule(name)
        if not isinstance(weight := getattr(norm, "weight", None), Tensor) or not _is_rms_norm(norm, weight, one_plus):
            raise NotUsual(f"{name} is not an RMSNorm")
        return self._weights.address(weight, 1.0 if one_plus else 0.0)

    def _make_rotations(self, config: Any) -> list[tuple[str | None, _Rotations]]:
        rotary = _unwrapped(self._base.rotary_emb)
        kinds: Any = getattr(rotary, "rope_type", "default")  # of all layers, or of each kind of layer
        by_layer = isinstance(kinds, dict)
        for kind in kinds.values() if by_layer else (kinds,):
            if kind not in STATIC_ROTATIONS:
                raise NotUsual(f"rope_type {kind!r} depends on the length")
        if not by_layer:
            return [(None, _Rotations(_half(rotary)))]
        types = sorted(set(config.layer_types))
        if len(types) > 2:
            raise NotUsual(f"{len(types)} kinds of rotations")
        return [(kind, _Rotations(_half(rotary, kind))) for kind in types]

    def _layer(self, number: int, layer: Any, attention: HybridAttention, mlp: HybridMLP, names: LayerNames) -> Any:
        made = self._kernels.Layer()
        norms = [self._norm(layer, name, names.one_plus) for name in names.norms]
        made.set_norms(*norms, _epsilon(layer.get_submodule(next(filter(None, names.norms)))))
        made.attention = self._attention(number, layer, attention, names)
        made.mlp = self._mlp(mlp)
        return made

    def _attention(self, number: int, layer: Any, block: HybridAttention, names: LayerNames) -> Any:
        shard, config = _only_shard(block), self._model.config
        module: Any = block.modules_of_tiers[0]
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, module.head_dim
        widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        if "qkv_proj" in shard.matrices:
            parts, start = [], 0
            whole, bias = shard.by_neuron("qkv_proj"), shard.biases.get("qkv_proj")
            for width in widths:
                part = None if bias is None else bias[start : start + width]
                parts.append(self._weights.linear(whole.narrow(start, width), part))
                start += width
        else:
            parts = [
                self._weights.linear(shard.matrices[name], shard.biases.get(name))
                for name in ("q_proj", "k_proj", "v_proj")
            ]
        compute = native.COMPUTE_CODES[block.weights.compute_dtype]
        out = self._weights.linear(shard.matrices["o_proj"], block.output_bias)
        made = self._kernels.Attention(*parts, out, heads, kv_heads, head_dim, module.scaling, compute)
        if block.rule.kind != "none":
            inputs = self._weights.thresholds(block, "input", config.hidden_size)
            made.set_thresholds(inputs, self._weights.thresholds(block, "output", widths[0]))
        if block.predictor_in_use is not None:
            made.predictor = self._weights.predictor(block.predictor_in_use)
        if names.head_norms is not None:
            q_norm, k_norm = (self._norm(module, name, names.one_plus) for name in ("q_norm", "k_norm"))
            made.set_norms(q_norm, k_norm, names.head_norms == "all", _epsilon(module.get_submodule("q_norm")))
        if getattr(module, "use_rope", True):
            kinds = [kind for kind, _ in self._rotations]
            which = 0 if kinds == [None] else kinds.index(config.layer_types[number])
            made.set_rotation(which, 2 * self._rotations[which][1].half_width())
        made.softcap = float(getattr(module, "attn_logit_softcapping", None) or 0.0)
        made.window = _window(config, number)
        self._sizes.append((1, kv_heads, head_dim))
        return made

    def _mlp(self, block: HybridMLP) -> Any:
        made = self._weights.mlp(block, _only_shard(block), block.output_bias)
        if made.rule and block.predictor is not None:
            made.predictor = self._weights.predictor(block.predictor)
        return made

    def _make_head(self, config: Any, names: LayerNames) -> int | None:
        """Gives native code the final norm and the head. Returns the size of the vocabulary; None where the head is
        left to its module.
        """
        head = self._model.get_output_embeddings()
        if isinstance(head, PackedHead):
            matrix, compute = head.matrix, head.compute_dtype
        elif type(head) is nn.Linear and head.weight.dtype == torch.bfloat16:
            weight = head.weight.detach()
            matrix, compute = NeuronMatrix(None, 32, *weight.shape, weight=weight.contiguous()), "fp32"
        else:
            return None
        linear = self._weights.linear(matrix, head.bias)
        norm, epsilon = self._norm(self._base, "norm", names.one_plus), _epsilon(self._base.norm)
        cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        rounds = self._model.dtype == torch.bfloat16
        self._decoder.set_head(self._kernels.Head(norm, epsilon, linear, cap, rounds, native.COMPUTE_CODES[compute]))
        return matrix.rows

    # Whether it still applies

    def _watch(self, layers: list[Any], names: LayerNames) -> Watch:
        attributes_of = [self._model.config, self._base.rotary_emb, self._base.norm]
        objects: list[tuple[Any, str]] = [(self._model.config, "_attn_implementation_internal")]
        for layer, (attention, mlp) in zip(layers, self._blocks, strict=True):
            attributes_of += [layer.get_submodule(name) for name in names.norms if name is not None]
            attributes_of += [attention.modules_of_tiers[0]]
            if names.head_norms is not None:
                attributes_of += [attention.get_submodule(name) for name in ("q_norm", "k_norm")]
            objects += [
                *((block, name) for block in (attention, mlp) for name in ("shards", "_rule", "_predictor")),
                (mlp, "activation"),
            ]
        return Watch(self._model, attributes_of, objects)

    def fits(self, thoroughly: bool = True) -> bool:
        """Whether the model still is what this was built from. Not `thoroughly`: rules, predictors, placement and what
        PyTorch counts of changes in place are looked at, as is done for every token of a generation.
        """
        return self._watched.same() if thoroughly else self._watched.likely_same()

    def observed(self) -> bool:
        """Whether a calibration or a hook wants to see what modules compute."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return True
        if any(mlp.probe or attention.probe for attention, mlp in self._blocks):
            return True
        if not any(self._hooks) and all(len(hooks) == count for hooks, count in self._our_hooks):
            return False
        every = (*self._hooks, *(hooks for hooks, _ in self._our_hooks))
        return any(any(map(_observes, hooks.values())) for hooks in every)

    # Decoding

    def logits(self, token: Tensor, cache: Cache, rules: bool) -> Tensor | None:
        """Logits float32 [1, vocabulary] that follow `token`, int64 [1, 1], and its keys and values in `cache`, which
        must consist of pages. None, and nothing is changed, where the cache is not one that native code writes to.
        """
        with self._lock:  # tables and addresses are those of one step
            return self._logits(token, cache, rules)

    def _logits(self, token: Tensor, cache: Cache, rules: bool) -> Tensor | None:
        if self._tables is None or not self._tables.belongs_to(cache):
            if not all(isinstance(layer, PagedCacheLayer) for layer in cache.layers):
                return None
            self._tables = PageTables(cache)
        if len(cache.layers) != len(self._blocks):
            return None
        if isinstance(cache, StreamingCache):
            if (place := self._place(cache)) is None:
                return None
            held, slot, state = place
        else:
            held = slot = state = cache.get_seq_length()
            self._turn([rotations for _, rotations in self._rotations], held)
            self._ring_array[1] = 0
        if not self._tables.make_room(slot, state, self._sizes):
            return None
        states = self._embed(token).to(torch.float32).contiguous()
        headless = self._vocabulary is None
        width = states.shape[-1] if self._vocabulary is None else self._vocabulary
        out = torch.empty(1, width, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        self._decoder.run(
            0,
            len(self._blocks),
            True,
            states.data_ptr(),
            out.data_ptr() if headless else 0,
            0 if headless else out.data_ptr(),
            held,
            self._ring_array.buffer_info()[0],
            self._rotation_array.buffer_info()[0],
            self._tables.array.buffer_info()[0],
            rules,
            self._counts.data_ptr(),
            native.threads(),
        )
        self._tables.advance(slot, state)
        if not headless:
            return out
        logits = self._model.get_output_embeddings()(self._base.norm(out.to(self._model.dtype)))
        if cap := getattr(self._model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits.to(torch.float32)

    def _turn(self, tables: list[_Rotations], position: int, slot: int | None = None) -> None:
        """Tells native code the angles of a token at `position`, whose slot, which sinks go by, may be another."""
        for i, rotations in enumerate(tables):
            self._rotation_array[2 * i], self._rotation_array[2 * i + 1] = rotations.addresses(position)
            of_slot = (0, 0) if slot is None else rotations.addresses(slot)
            self._rotation_array[4 + 2 * i], self._rotation_array[5 + 2 * i] = of_slot

    def _place(self, cache: StreamingCache) -> tuple[int, int, Any] | None:
        """How many tokens `cache` holds, the slot of the next one, and its state; tells native code the ring and the
        angles. None where it is not one row's.
        """
        state = cache.state
        if state is None or len(state.rows) != 1:
            return None
        row, options = state.rows[0], cache.options
        if self._exact is None or self._exact[0] is not cache.rotations:
            if not all(kind in cache.rotations for kind, _ in self._rotations):
                return None
            rotations = [cache.rotations[kind] for kind, _ in self._rotations]
            key = tuple((rotation.scaling, *rotation.frequencies.tolist()) for rotation in rotations)
            if key not in self._exact_tables:
                self._exact_tables[key] = [_Rotations(rotation.pairs) for rotation in rotations]
            self._exact = cache.rotations, self._exact_tables[key]
        self._turn(self._exact[1], row.position, row.held if row.evicted else None)
        ((slot, _),) = options.slots(row.first, row.held, row.held + 1)
        self._ring_array[0], self._ring_array[1], self._ring_array[2] = options.n_keep, options.ring, row.first
        return row.held, slot, state


def _observes(hook: Callable[..., Any]) -> bool:
    """Not so the hooks of ours and those that transformers leaves behind once states were asked for: they record only
    while states are asked for, and such a forward is no native step.
    """
    module = getattr(hook, "__module__", None)
    return module != "transformers.utils.output_capturing" and not getattr(hook, "of_hf_sparse", False)


def _unwrapped(module: Any) -> Any:
    """`module`. Raises NotUsual where it is not as transformers or this package made it."""
    if "forward" in vars(module) or not type(module).__module__.startswith(("transformers.models.", "hf_sparse.")):
        raise NotUsual(f"{type(module).__name__} was wrapped or replaced")
    return module


def _blocks_of(layer: Any, number: int, names: LayerNames) -> tuple[HybridAttention, HybridMLP]:
    """Raises NotUsual for a layer with other parts than the family's."""
    parts = _unwrapped(layer)._modules
    attention = next((part for part in parts.values() if isinstance(part, HybridAttention)), None)
    mlp = next((part for part in parts.values() if isinstance(part, HybridMLP)), None)
    rest = {name for name, part in parts.items() if part not in (attention, mlp) and not isinstance(part, nn.Dropout)}
    if attention is None or mlp is None or rest != set(filter(None, names.norms)):
        raise NotUsual(f"layer {number} consists of {', '.join(parts)}")
    if _unwrapped(attention).modules_of_tiers[0].layer_idx != number or _unwrapped(mlp).id.layer != number:
        raise NotUsual(f"layer {number} is another one's place in the cache")
    return attention, mlp


def _is_rms_norm(norm: Any, weight: Tensor, one_plus: bool) -> bool:
    """Whether it computes one, be it called what it may."""
    x = torch.linspace(-2, 3, weight.shape[0], dtype=torch.float32, device=weight.device)[None]
    with torch.no_grad():
        expected = x * torch.rsqrt(x.square().mean() + _epsilon(norm)) * (weight.float() + (1.0 if one_plus else 0.0))
        return torch.allclose(norm(x).float(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def _only_shard(block: HybridBlock) -> Shard:
    if len(block.shards) != 1 or block.shards[0].tier.device.type != "cpu":
        raise NotUsual(f"block {block.id} is not on the CPU as a whole")
    return block.shards[0]


def _epsilon(norm: Any) -> float:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(epsilon, float):
        raise NotUsual(f"{type(norm).__name__} has no epsilon")
    return epsilon


def _window(config: Any, layer: int) -> int:
    """How many tokens a token of this layer sees; 0: all."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    return int(window) if window and (types is None or types[layer] == "sliding_attention") else 0
