"""What relufy.py is made of: texts, the ReLU twin of a model and its closed-form start, and what training measures.

The twin of a gated MLP `down(act(gate(x)) * up(x))` has ReLU for `act` and biases (`mlp_bias`), so it is still an
ordinary checkpoint. A negative bias of the gate is a threshold: it decides how many neurons are exactly zero.
"""

from __future__ import annotations

import ast
import ctypes
import json
import math
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sparse.evaluation import perplexity

MODEL_TYPES = ("llama", "smollm3")  # gated MLPs that may have biases (mlp_bias); what a block makes is added as it is
SMOOTH = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu")
OPENING = 8  # tokens that a generated row begins with
TEMPERATURE, TOP_K = 0.7, 50
GENERATED_AT_ONCE = 64  # rows; more are slower, for the cache is copied at each token
RIDGE = 0.01  # of the mean square of an activation


def load(name: str, gguf_file: str | None) -> tuple[PreTrainedModel, Any]:
    """A plain bfloat16 model, dequantized where it is a GGUF, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=gguf_file)
    model = AutoModelForCausalLM.from_pretrained(name, gguf_file=gguf_file, dtype=torch.bfloat16)
    return _copy(model), tokenizer


def convert(teacher: PreTrainedModel, activation: str) -> PreTrainedModel:
    """The twin with `activation` and MLP biases of 0, otherwise with the weights of `teacher`. Raises ValueError for a
    model of another family, or one that has zeros already.
    """
    config = teacher.config
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"MODEL: expected model_type to be {' or '.join(MODEL_TYPES)}; got {config.model_type!r}")
    if config.hidden_act not in SMOOTH:
        raise ValueError(f"MODEL: expected hidden_act to be one of {', '.join(SMOOTH)}; got {config.hidden_act!r}")
    return _copy(teacher, hidden_act=activation, mlp_bias=True)


def _copy(model: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    fields = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    twin: Any = AutoModelForCausalLM.from_config(type(model.config).from_dict(fields | changes), dtype=torch.bfloat16)
    for mlp in mlps(twin):
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
    twin.load_state_dict(model.state_dict(), strict=False)
    twin.generation_config = model.generation_config
    return twin.eval()


def mlps(model: PreTrainedModel) -> list[Any]:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return [module for module in model.modules() if all(hasattr(module, name) for name in names)]


# Texts


def documentation() -> tuple[list[str], list[str]]:
    """The standard library's: to train on, and held out (every eighth topic of the language reference)."""
    names = sorted(topics)
    held_out = names[::8]
    return [topics[name] for name in names if name not in held_out] + list(_docstrings()), [topics[n] for n in held_out]


def _docstrings(shortest: int = 200) -> Iterator[str]:
    """Of the standard library's modules, in characters at least `shortest`."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # some are there to be wrong
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= shortest:
                    yield text


def given(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Texts of `files`: the first seven eighths of each to train on, the rest held out."""
    train, held_out = [], []
    for file in files:
        text = file.read_text(encoding="utf-8")
        cut = len(text) * 7 // 8
        train.append(text[:cut])
        held_out.append(text[cut:])
    return train, held_out


def rows_of(tokenizer: Any, texts: Iterable[str], tokens: int, vocabulary: int) -> Tensor:
    """int64 [rows, tokens]: the texts one after another, an end-of-text token between them. Raises ValueError for
    tokens that the model lacks.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = torch.tensor([id for text in texts for id in [*tokenizer(text, verbose=False).input_ids, *end]])
    if len(ids) and int(ids.max()) >= vocabulary:
        raise ValueError(f"MODEL: the tokenizer gives token {int(ids.max())}, the model has {vocabulary}")
    return ids[: len(ids) // tokens * tokens].view(-1, tokens)


def generated(teacher: PreTrainedModel, tokenizer: Any, texts: Tensor, rows: int, seed: int, work: Path) -> Tensor:
    """int64 [rows, tokens]: what the model makes of the openings of the shipped prompts and of `texts` (int64 [any,
    tokens]), half each. Kept in `work` by batch, so that a run that was killed goes on.
    """
    tokens, vocabulary = texts.shape[1], teacher.config.vocab_size
    opening = min(OPENING, tokens // 2)
    shipped = json.loads(resources.files("hf_sparse").joinpath("prompts.json").read_text(encoding="utf-8"))
    prompts = [ids for ids in (tokenizer(text).input_ids[:opening] for text in shipped) if len(ids) == opening]
    prompts = [ids for ids in prompts if max(ids) < vocabulary]
    parts = []
    for batch in tqdm(range(math.ceil(rows / GENERATED_AT_ONCE)), desc="Generating text", disable=None):
        count = min(GENERATED_AT_ONCE, rows - batch * GENERATED_AT_ONCE)
        file = work / f"generated-{batch}-{count}.safetensors"
        if not file.exists():
            draw = torch.Generator().manual_seed(seed + batch)
            begin = texts[torch.randint(len(texts), (count,), generator=draw), :opening]
            for row in range(0, count if prompts else 0, 2):
                begin[row] = torch.tensor(prompts[int(torch.randint(len(prompts), (), generator=draw))])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + batch)
                ids = teacher.generate(  # type: ignore[operator]
                    begin,
                    attention_mask=torch.ones_like(begin),
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_k=TOP_K,
                    min_new_tokens=tokens - opening,
                    max_new_tokens=tokens - opening,
                    pad_token_id=0,
                )
            save_aside({"ids": ids}, file)
        parts.append(load_file(file)["ids"])
    return torch.cat(parts) if parts else texts[:0]


def keep_memory() -> None:
    """Has glibc keep what a training step frees for the next, which else gets zeroed pages anew for each large tensor.
    Not for generating: growing caches take twice as long so.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            libc.mallopt(parameter, value)


def save_aside(tensors: dict[str, Tensor], file: Path) -> None:
    """Written aside and renamed."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    save_file(tensors, aside)
    os.replace(aside, file)


# The start, in closed form


@contextmanager
def watching(teacher: PreTrainedModel, seen: Callable[[int, Tensor, Tensor], None]) -> Iterator[None]:
    """Calls `seen(layer, input, output)` for every MLP that `teacher` passes; both [rows, tokens, width]."""

    def hook(layer: int) -> Any:
        return lambda module, args, output: seen(layer, args[0], output)

    handles = [mlp.register_forward_hook(hook(layer)) for layer, mlp in enumerate(mlps(teacher))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def set_thresholds(student: PreTrainedModel, teacher: PreTrainedModel, rows: Tensor, zeros: float) -> None:
    """Gate biases under which a share `zeros` of every layer's neurons is zero on `rows`, int64 [rows, tokens]; more
    where ReLU alone makes more. A neuron passes where act(gate) x rms(up) x norm(column of down) is above the layer's
    threshold.
    """
    blocks, twins = mlps(teacher), mlps(student)

    def seen(layer: int, x: Tensor, output: Tensor) -> None:
        mlp = blocks[layer]
        gate, up = mlp.gate_proj(x).flatten(0, 1).float(), mlp.up_proj(x).flatten(0, 1).float()
        weight = (up.square().mean(dim=0).sqrt() * mlp.down_proj.weight.float().norm(dim=0)).clamp_min(1e-9)
        contributions = (torch.where(gate > 0, mlp.act_fn(gate), 0.0) * weight).flatten()
        threshold = contributions.kthvalue(max(1, int(zeros * len(contributions)))).values / weight
        grid = torch.linspace(0, 50, 20001)  # act rises there
        at = torch.searchsorted(mlp.act_fn(grid), threshold).clamp_max(len(grid) - 1)
        twins[layer].gate_proj.bias.copy_(-grid[at])

    with watching(teacher, seen):
        teacher.base_model(rows, use_cache=False)


@torch.no_grad()
def fit_outputs(student: PreTrainedModel, teacher: PreTrainedModel, rows: Tensor) -> None:
    """What writes to the residual stream of `student`, o_proj and down_proj, by ridge regression, block by block: the
    stream, with all the errors that blocks before made, is led back to `teacher`'s. `rows`: int64 [rows, tokens].
    """
    calls: list[
        tuple[Tensor, dict[str, Any], Tensor, Tensor]
    ] = []  # of each layer: input, options, stream amid, output
    amid: list[Tensor] = []

    def seen(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any], output: Any) -> None:
        calls.append((args[0], options, args[0] + amid[-1], _first(output)))

    layers: Any = teacher.base_model.layers
    twins: Any = student.base_model.layers
    handles = [layer.register_forward_hook(seen, with_kwargs=True) for layer in layers]
    handles += [layer.self_attn.register_forward_hook(lambda m, a, out: amid.append(_first(out))) for layer in layers]
    teacher.base_model(rows, use_cache=False)
    for handle in handles:
        handle.remove()
    stream = calls[0][0]
    for layer, (_, options, wanted_amid, wanted) in zip(twins, calls, strict=True):
        for linear, stop, goal in (
            (layer.self_attn.o_proj, layer.post_attention_layernorm, wanted_amid),
            (layer.mlp.down_proj, None, wanted),
        ):
            passed: list[Tensor] = []
            handles = [linear.register_forward_hook(lambda m, a, out, passed=passed: passed.extend((a[0], out)))]
            if stop is not None:
                handles.append(stop.register_forward_hook(lambda m, a, out, passed=passed: passed.append(a[0])))
            after = _first(layer(stream, **options))
            for handle in handles:
                handle.remove()
            x, output = passed[:2]
            after = after if stop is None else passed[2]
            target = output + (goal.float() - after.float())
            _regress(linear, x.flatten(0, 1), target.flatten(0, 1), _token_weights(goal))
        stream = after + (linear(x) - output)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _regress(linear: Any, x: Tensor, target: Tensor, weights: Tensor) -> None:
    """Weight and bias that take `x` [tokens, in] nearest to `target` [tokens, out], tokens weighing `weights`; a ridge
    holds them near what they were.
    """
    root = weights.flatten()[:, None].sqrt()
    biased = linear.bias is not None
    x = F.pad(x.float(), (0, int(biased)), value=1.0) * root  # the last is the bias
    gram = x.T @ x
    before = torch.cat([linear.weight.T, *([linear.bias[None]] if biased else [])]).float()
    ridge = float(RIDGE * gram.diagonal().mean()) + 1e-12
    gram.diagonal().add_(ridge)
    after = torch.linalg.solve(gram, x.T @ (target.float() * root) + ridge * before)
    linear.weight.copy_(after[: linear.in_features].T)
    if biased:
        linear.bias.copy_(after[-1])


def _token_weights(output: Tensor) -> Tensor:
    """float32 [tokens, 1] for outputs [tokens, width]: a few tokens have huge ones and would count alone."""
    squares = output.float().square().mean(dim=-1, keepdim=True)
    return 1 / (squares + 0.25 * squares.median() + 1e-12)


# What training minimises, and what is measured


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL of the next tokens' distributions, mean over positions; logits [positions, vocabulary]."""
    ours, theirs = student.float().log_softmax(dim=-1), teacher.float().log_softmax(dim=-1)
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


def hidden_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared error of the residual stream relative to itself; mean over layers and tokens."""
    pairs = zip(student, teacher, strict=True)
    errors = [(a - b).float().square().mean(dim=-1) / (b.float().square().mean(dim=-1) + 1e-12) for a, b in pairs]
    return torch.stack([error.mean() for error in errors]).mean()


class Pressure:
    """Pushes gates that are barely open towards zero: adds to the gradient of each in (0, width) what
    `strength * min(relu(gate) / width, 1)`, mean over tokens, would; a controller holds the share of zeros at `target`.
    """

    def __init__(self, student: PreTrainedModel, target: float, strength: float, width: float = 1.0) -> None:
        self.target, self.strength, self.width = target, strength, width
        self.shares: list[Tensor] = []
        for mlp in mlps(student):
            mlp.gate_proj.register_forward_hook(self._press)

    def _press(self, module: nn.Module, args: tuple[Tensor, ...], gate: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        self.shares.append((gate.detach()[:, ::8] <= 0).float().mean())  # of some tokens: to look at all takes long
        return _Pressed.apply(gate, self.strength / (gate.shape[0] * gate.shape[1]), self.width)  # type: ignore[no-untyped-call]

    def settle(self, gain: float) -> float:
        """Moves the strength; returns the share of zeros since the last call."""
        share = float(torch.stack(self.shares).mean())
        self.shares.clear()
        self.strength = min(max(self.strength * math.exp(gain * (self.target - share)), 1e-7), 10.0)
        return share


class _Pressed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, strength: float, width: float) -> Tensor:
        ctx.save_for_backward(gate)
        ctx.strength, ctx.width = strength, width
        return gate.view_as(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gate,) = ctx.saved_tensors
        push = torch.full((), ctx.strength / ctx.width, dtype=gate.dtype).expand_as(gate)
        return gradients[0] + torch.ops.aten.hardtanh_backward(push, gate, 0.0, ctx.width), None, None


@torch.no_grad()
def measure(model: PreTrainedModel, rows: Tensor) -> tuple[float, list[float]]:
    """Perplexity on `rows`, int64 [rows, tokens], and by layer the share of MLP activations that are exactly zero."""
    blocks = mlps(model)
    shares: list[list[Tensor]] = [[] for _ in blocks]
    handles = [
        mlp.act_fn.register_forward_hook(lambda module, args, out, kept=kept: kept.append((out == 0).float().mean(-1)))
        for mlp, kept in zip(blocks, shares, strict=True)
    ]
    training = model.training
    model.eval()
    found = perplexity(model, rows, "never")
    model.train(training)
    for handle in handles:
        handle.remove()
    return found, [float(torch.cat([part.flatten() for part in kept]).mean()) for kept in shares]
