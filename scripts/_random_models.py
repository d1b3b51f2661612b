"""Random llama models for benchmarks: made without a checkpoint, with a share of the MLP skipped on purpose if wanted,
and their GGUFs for llama.cpp.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bench import random_bytes, random_packed
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from hf_sparse import WeightOnlyQuantConfig
from hf_sparse.checkpoint import Checkpoint
from hf_sparse.model import as_sparse, block_neurons
from hf_sparse.modeling import (
    HybridBlock,
    HybridMLP,
    Placement,
    Predictor,
    SkipRule,
    Tier,
    WeightFormat,
    hybrid_blocks,
    swap_blocks,
)
from hf_sparse.quantization import gathered_row_product
from hf_sparse.weights import load_weights, skeleton

GATE_BIAS = 16.0  # gates are about normal around it: none is negative
AIMING_TOKENS, AIMING_TURNS = 12, 8

Decode = Callable[[Any, int], object]  # has a model generate so many tokens


@dataclass(frozen=True)
class Shapes:
    """Sizes of a llama model. `relu`: with ReLU, and predictors that skip most of the MLP."""

    like: str
    intermediate: int
    kv_heads: int
    vocabulary: int
    relu: bool
    hidden: int = 4096
    heads: int = 32

    def shrunk(self, by: int) -> Shapes:
        sizes = {
            name: getattr(self, name) // by for name in ("hidden", "intermediate", "heads", "kv_heads", "vocabulary")
        }
        return Shapes(self.like if by == 1 else f"{self.like} / {by}", relu=self.relu, **sizes)

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's weights, under their names in a GGUF."""
        keys = self.hidden * self.kv_heads // self.heads
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }


RANDOM_CASES = {
    "llama-7b": Shapes("Llama-2-7B", 11008, 32, 32000, relu=False),
    "llama-7b-relu": Shapes("Llama-2-7B", 11008, 32, 32000, relu=True),
    "llama3-8b-relu": Shapes("Llama-3-8B", 14336, 8, 128256, relu=True),
}


def load_random(
    shapes: Shapes, form: WeightOnlyQuantConfig, arguments: argparse.Namespace, decode: Decode
) -> tuple[Any, str, dict[str, Any]]:
    """The model, what it is in words, and what its predictors weigh. Takes --layers, --active and --rank."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        hidden_size=shapes.hidden,
        intermediate_size=shapes.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        vocab_size=shapes.vocabulary,
        max_position_embeddings=4096,
        hidden_act="relu" if shapes.relu else "silu",
        mlp_bias=shapes.relu,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = skeleton(config, torch.bfloat16, None, None)
    swap_blocks(model, WeightFormat(form.weight_dtype, form.group_size, form.compute_dtype))
    head = None if form.head_dtype is None else WeightFormat(form.head_dtype, form.group_size, form.compute_dtype)
    load_weights(model, RandomWeights(model, arguments.active if shapes.relu else None, generator), head)
    model.config.quantization_config = form
    sparse = as_sparse(model)
    sparse.eval()
    description = f"shapes of {shapes.like}, {arguments.layers} layers, random weights"
    facts: dict[str, Any] = {}
    if shapes.relu:
        facts = skip_on_purpose(sparse, arguments, decode, generator)
        description += f", {arguments.active:.0%} of the MLP neurons active on purpose"
    else:
        place(sparse)
    return sparse, description, facts


class RandomWeights(Checkpoint):
    """A checkpoint of random tensors, made as they are asked for; those of the blocks are packed. Weights have a size
    that keeps the hidden states about as large as they come; `active` is the share of the neurons that add to them.
    """

    def __init__(self, model: PreTrainedModel, active: float | None, generator: torch.Generator) -> None:
        super().__init__([Path("random weights")], None)
        self._active, self._generator = active, generator
        self._pool = torch.randn(4_194_301, generator=generator)  # numbers repeat, but no two rows are alike
        self._parameters = dict(model.named_parameters())
        self._packed: dict[str, Tensor] = {}  # made together with another one
        self._slots: dict[str, tuple[HybridBlock, str]] = {}
        for block in hybrid_blocks(model):
            prefix = f"model.layers.{block.id.layer}.{block.prefix}"
            self._slots.update({prefix + name: (block, name) for name in block.expected_tensors(quantized=True)})

    def names(self) -> list[str]:
        return [*self._parameters, *self._slots]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)

    def _read(self, name: str) -> tuple[Tensor, Path]:
        if name in self._parameters:
            tensor = self._parameter(name, self._parameters[name])
        else:
            block, local = self._slots[name]
            projection_name, _, leaf = local.rpartition(".")
            tensor = self._bias(block, projection_name) if leaf == "bias" else self._part(name, block, projection_name)
        return tensor, self.files[0]

    def _parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Norms are 1; embeddings have a standard deviation of 1, the head of 1 / sqrt(hidden)."""
        made = torch.ones(parameter.shape, dtype=parameter.dtype)
        if parameter.dim() == 2:
            is_head = "lm_head" in name  # other numbers than the embeddings', or a token would be followed by itself
            numbers = self._pool.flip(0) * parameter.shape[1] ** -0.5 if is_head else self._pool
            numbers = numbers.to(parameter.dtype)
            for piece in made.view(-1).split(len(numbers)):
                piece.copy_(numbers[: len(piece)])
        return made

    def _bias(self, block: HybridBlock, projection_name: str) -> Tensor:
        projection = block.projections[projection_name]
        width = projection.columns if projection.writes else sum(projection.rows) * block.neurons
        return torch.full((width,), GATE_BIAS if projection_name == "gate_proj" else 0.0, dtype=torch.bfloat16)

    def _part(self, name: str, block: HybridBlock, projection_name: str) -> Tensor:
        if name not in self._packed:
            form, projection = block.weights, block.projections[projection_name]
            assert form.weight_dtype is not None
            rows = sum(projection.rows) * block.neurons
            inputs: float = rows if projection.writes else projection.columns
            if projection_name == "down_proj" and self._active is not None:
                inputs *= self._active * GATE_BIAS**2
            sizes = (rows, projection.columns, form.weight_dtype, form.group_size)
            made = random_packed(*sizes, inputs**-0.5, self._generator)
            base = name.rpartition(".")[0]
            self._packed.update({f"{base}.{leaf}": tensor for leaf, tensor in made.items()})
        return self._packed.pop(name)


def place(sparse: Any) -> None:
    """Everything on one CPU tier."""
    zeros = {id: torch.zeros(count, dtype=torch.int64) for id, count in block_neurons(sparse).items()}
    sparse.place(Placement((Tier("cpu"),), zeros))


def mlps(sparse: Any) -> list[HybridMLP]:
    return [block for block in hybrid_blocks(sparse) if isinstance(block, HybridMLP)]


def skip_on_purpose(
    sparse: Any, arguments: argparse.Namespace, decode: Decode, generator: torch.Generator
) -> dict[str, Any]:
    """Predictors with which about `--active` of the neurons are computed, in every layer. Returns what they weigh."""
    spreads = [give_predictor(block, arguments, generator) for block in mlps(sparse)]
    place(sparse)
    normal = statistics.NormalDist()
    for _ in range(AIMING_TURNS):
        sparse.reset_active_fraction()
        decode(sparse, AIMING_TOKENS + 1)
        shares = [min(max(block.active_fraction or 0.0, 1e-4), 1 - 1e-4) for block in mlps(sparse)]
        if max(abs(share / arguments.active - 1) for share in shares) < 0.02:
            break
        for block, spread_of_scores, share in zip(mlps(sparse), spreads, shares, strict=True):
            shift = spread_of_scores * (normal.inv_cdf(arguments.active) - normal.inv_cdf(share))
            assert block.predictor is not None
            predictor = copy.copy(block.predictor)  # another one: what a model computes with is not changed in place
            predictor.bias = predictor.bias + shift
            block.predictor = predictor
    predictors = sum(block.predictor.nbytes for block in mlps(sparse) if block.predictor is not None)
    mlp_bytes = sum(shard.nbytes for block in mlps(sparse) for shard in block.shards)
    all_bytes = sum(shard.nbytes for block in hybrid_blocks(sparse) for shard in block.shards)
    return {
        "rank": arguments.rank,
        "predictor_dtype": arguments.predictor_dtype,
        "predictor_bytes": predictors,
        "predictor_share_of_mlp": predictors / mlp_bytes,
        "predictor_share_of_layers": predictors / all_bytes,
        "active_asked": arguments.active,
    }


def give_predictor(block: HybridMLP, arguments: argparse.Namespace, generator: torch.Generator) -> float:
    """A random one whose bias fits random inputs. Returns the standard deviation of its scores."""
    hidden, rank = block.projections["up_proj"].columns, arguments.rank
    fc1 = torch.randn(rank, hidden, generator=generator) * hidden**-0.5
    fc2 = torch.randn(block.neurons, rank, generator=generator) * rank**-0.5
    fc2 -= fc2.mean(1, keepdim=True)  # or the mean of a ReLU would make some neurons active for every token
    block.rule = SkipRule("predicted")
    tensors = {"fc1": fc1, "fc2": fc2, "bias": torch.zeros(block.neurons)}
    block.predictor = Predictor.from_tensors(tensors, torch.device("cpu"), arguments.predictor_dtype)
    middle = gathered_row_product(block.predictor.fc1, torch.randn(64, hidden, generator=generator)).relu_()
    scores = gathered_row_product(block.predictor.fc2, middle).flatten().sort().values
    block.predictor.bias -= scores[int((1 - arguments.active) * (len(scores) - 1))]
    return float(scores.std())


def write_gguf(shapes: Shapes, layers: int, work: Path) -> Path:
    """What llama-quantize makes of such a model for Q4_0, with random numbers: the head in Q6_K, the rest in Q4_0.
    Layers share their numbers, but not their place in the file.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    generator = torch.Generator().manual_seed(0)

    def blocks(rows: int, cols: int, kind: Any, scale_at: int, std: float) -> Any:
        weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
        data = random_bytes(rows * cols // weights * nbytes, generator).view(-1, nbytes)
        data[:, scale_at : scale_at + 2] = torch.tensor([std], dtype=torch.float16).view(torch.uint8)
        return data.view(rows, -1).numpy()

    file = work / f"{shapes.like.replace(' / ', '-')}-{layers}-layers-Q4_0.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shapes.hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shapes.intermediate)
    writer.add_head_count(shapes.heads)
    writer.add_head_count_kv(shapes.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shapes.hidden // shapes.heads)
    writer.add_vocab_size(shapes.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("no_vocab")
    ends = (shapes.vocabulary, shapes.hidden)
    writer.add_tensor("token_embd.weight", blocks(*ends, types.Q4_0, 0, 0.2), raw_dtype=types.Q4_0)
    writer.add_tensor("output.weight", blocks(*ends, types.Q6_K, 208, 1e-5), raw_dtype=types.Q6_K)
    ones = torch.ones(shapes.hidden).numpy()
    writer.add_tensor("output_norm.weight", ones)
    weights = {
        name: blocks(rows, cols, types.Q4_0, 0, 0.2 * cols**-0.5) for name, (rows, cols) in shapes.tensors().items()
    }
    for layer in range(layers):
        for name, data in weights.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=types.Q4_0)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
