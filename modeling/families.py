"""One table row per architecture: where its blocks are and what they are called. Nothing else knows a family.

Row counts are read off the meta model's own linear layers, so a row is only names and the way in which q, k and v are
fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .attention import HybridAttention
from .block import BlockSpec, HybridBlock, Projection
from .engine import Engine, LayerNames, NotUsual
from .mlp import HybridMLP, MLPNames
from .neurons import BlockId, WeightFormat
from .rules import gives_exact_zeros


@dataclass(frozen=True)
class AttentionNames:
    """`inputs`: projections that read the hidden states; `output`: the one that writes. `separate_segments`: the one
    input holds all of q, then all of k, then all of v (Phi-3), rather than a run of rows per KV group. `splittable` is
    False where something spans all heads (OLMo 2 norms q and k over the whole projection): the block is then one
    neuron, on one tier.
    """

    path: str
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    separate_segments: bool = False
    splittable: bool = True


@dataclass(frozen=True)
class Family:
    """`layers`: path of the decoder layers in the model; `mlp`: path of the MLP in a layer, None where its parts are
    the layer's own.
    """

    layers: str
    attention: AttentionNames
    mlp: str | None
    mlp_names: MLPNames
    decoding: LayerNames | None = None  # None: the decoder layer is not one that native code knows


_ATTENTION = AttentionNames("self_attn")
_GATED = MLPNames(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")
_LLAMA = Family("model.layers", _ATTENTION, "mlp", _GATED, LayerNames())
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _h_to_4h(activation: str) -> MLPNames:
    return MLPNames(up="dense_h_to_4h", down="dense_4h_to_h", activation=activation)


FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, decoding=LayerNames(head_norms="head")),
    "gemma2": replace(_LLAMA, decoding=LayerNames(_SANDWICH, one_plus=True)),
    "gemma3_text": replace(_LLAMA, decoding=LayerNames(_SANDWICH, one_plus=True, head_norms="head")),
    "smollm3": _LLAMA,
    "olmo2": replace(
        _LLAMA,
        attention=AttentionNames("self_attn", splittable=False),
        decoding=LayerNames(_AFTER, head_norms="all"),
    ),
    "phi3": Family(
        "model.layers",
        AttentionNames("self_attn", ("qkv_proj",), separate_segments=True),
        "mlp",
        MLPNames(up="gate_up_proj", down="down_proj", activation="activation_fn", fused=True),
        LayerNames(),
    ),
    "nemotron": Family(
        "model.layers", _ATTENTION, "mlp", MLPNames(up="up_proj", down="down_proj", activation="act_fn")
    ),
    "opt": Family(
        "model.decoder.layers",
        AttentionNames("self_attn", output="out_proj"),
        None,
        MLPNames(up="fc1", down="fc2", activation="activation_fn"),
    ),
    "falcon": Family(
        "transformer.h",
        AttentionNames("self_attention", ("query_key_value",), "dense"),
        "mlp",
        _h_to_4h("act"),
    ),
    "bloom": Family(
        "transformer.h",
        AttentionNames("self_attention", ("query_key_value",), "dense"),
        "mlp",
        _h_to_4h("gelu_impl"),
    ),
    "gpt_neox": Family(
        "gpt_neox.layers",
        AttentionNames("attention", ("query_key_value",), "dense"),
        "mlp",
        _h_to_4h("act"),
    ),
}


def family_of(model_type: str) -> Family:
    """Raises ValueError, with the list of those there are, for an architecture that the table lacks."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"hf_sparse has no hybrid blocks for model_type {model_type!r}. "
            f"It has them for: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def swap_blocks(model: nn.Module, weights: WeightFormat) -> dict[BlockId, HybridBlock]:
    """Replaces the MLP and attention of every decoder layer of `model`, which lies on the meta device, by hybrid blocks
    without weights.
    """
    family = family_of(model.config.model_type)  # type: ignore[union-attr,arg-type]
    blocks: dict[BlockId, HybridBlock] = {}
    for number, layer in enumerate(model.get_submodule(family.layers).children()):
        for block in (
            _hybrid_attention(number, layer, family.attention, model.config, weights),
            _hybrid_mlp(number, layer, family, weights),
        ):
            layer.set_submodule(block.path, block)
            blocks[block.id] = block
    return blocks


def engine_of(model: nn.Module) -> Engine:
    """What decodes `model`, whose blocks are hybrid and placed, natively. Raises NotUsual where nothing does."""
    family = family_of(model.config.model_type)  # type: ignore[union-attr,arg-type]
    if family.decoding is None:
        raise NotUsual(f"decoder layers of {model.config.model_type} are left to transformers' modules")  # type: ignore[union-attr]
    return Engine(model, family.layers, family.decoding)


def hybrid_blocks(model: nn.Module) -> Iterator[HybridBlock]:
    """The hybrid blocks of `model`, in the order of its layers."""
    return (module for module in model.modules() if isinstance(module, HybridBlock))


def has_exact_zeros(block: HybridBlock) -> bool:
    """Whether the block is an MLP with neurons that can be exactly zero (ReLU, ReLU^2)."""
    return isinstance(block, HybridMLP) and gives_exact_zeros(block.activation)


def _hybrid_attention(
    number: int, layer: nn.Module, names: AttentionNames, config: Any, weights: WeightFormat
) -> HybridAttention:
    module = layer.get_submodule(names.path)
    groups = _kv_groups(config) if names.splittable else 1
    projections = []
    for name in (*names.inputs, names.output):
        linear: Any = module.get_submodule(name)
        writes = name == names.output
        rows, columns = linear.weight.shape[::-1] if writes else linear.weight.shape
        per_neuron: tuple[int, ...] = (rows // groups,)
        if names.separate_segments and not writes:
            queries = config.num_attention_heads // config.num_key_value_heads
            head_dim = rows // (groups * (queries + 2))
            per_neuron = (queries * head_dim, head_dim, head_dim)
        projections.append(Projection(name, per_neuron, columns, writes, linear.bias is not None))
    id = BlockId(number, "attention")
    spec = BlockSpec(id, names.path, f"{names.path}.", groups, tuple(projections), weights)
    return HybridAttention(spec, module)


def _kv_groups(config: Any) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else config.num_attention_heads
    for name in ("num_key_value_heads", "num_kv_heads"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return config.num_attention_heads


def _hybrid_mlp(number: int, layer: nn.Module, family: Family, weights: WeightFormat) -> HybridMLP:
    names = family.mlp_names
    module = layer if family.mlp is None else layer.get_submodule(family.mlp)
    down: Any = module.get_submodule(names.down)
    columns, neurons = down.weight.shape
    projections = []
    for name in filter(None, (names.gate, names.up, names.down)):
        linear: Any = module.get_submodule(name)
        writes = name == names.down
        rows = (1, 1) if names.fused and not writes else (1,)
        projections.append(Projection(name, rows, columns, writes, linear.bias is not None))
    activation = module.get_submodule(names.activation)
    if family.mlp is None:
        # the layer applies its parts one after the other: the first becomes the whole MLP, the others let it through
        path, prefix = names.up, ""
        for rest in (names.activation, names.down):
            layer.set_submodule(rest, nn.Identity())
    else:
        path, prefix = family.mlp, f"{family.mlp}."
    spec = BlockSpec(BlockId(number, "mlp"), path, prefix, neurons, tuple(projections), weights)
    return HybridMLP(spec, names, activation)
