"""Whole decode steps of the kernels at random shapes, and what they give in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz_case import COMPUTES, TOLERANCE, Case, dense, near, predicted_scores

PAGE_TOKENS = 256
MARGIN = 3e-4  # of what decides: nearer than that, rounding in fp32 may
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.nn.functional.silu,
    torch.nn.functional.gelu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    torch.relu,
    lambda x: torch.relu(x).square(),
)


class Linear:
    """`by_neuron`: stored transposed, as what writes. `may_turn`: packed weights may lie by input."""

    def __init__(
        self,
        case: Case,
        rows: int,
        cols: int,
        form: tuple[str | None, int],
        by_neuron: bool = False,
        may_turn: bool = False,
    ) -> None:
        self.matrix = case.matrix(rows, cols, form, (rows if by_neuron else cols) ** -0.5)
        width = cols if by_neuron else rows
        self.bias = case.place(case.normal(width)) if case.random.random() < 0.5 else None
        self.case = case
        bias = 0 if self.bias is None else self.bias.data_ptr()
        stored = self.matrix
        if may_turn and form[0] is not None and case.random.random() < 0.6:
            stored = case.turned(self.matrix)
        self.by_input = stored is not self.matrix
        self.stored = stored  # addresses of its tensors are what the handle holds
        self.handle = case.kernels.Linear(stored.native().handle, bias)

    def __call__(self, x: Tensor) -> Tensor:
        compute = self.case.compute
        if self.by_input and compute == "int8":
            compute = "fp32"  # rounds less than a product by rows: only some instruction sets have it in integers
        y = dense(self.matrix) @ self.case.rounded(x[None], self.matrix, compute)[0]
        return y if self.bias is None else y + self.bias.double()

    def sum_of_rows(self, a: Tensor) -> Tensor:
        y = a.double() @ dense(self.matrix)
        return y if self.bias is None else y + self.bias.double()


def rms(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


class Thresholds:
    """Of one place: none, or one per entry, in a buffer of its own. `doubt`: whether rounding may have had an entry
    fall to the other side of its own, as of the last call.
    """

    def __init__(self, case: Case, width: int, most: float) -> None:
        kind = case.random.choice(("none", "any", "all or nothing", "nothing is below"))
        self.below, self.doubt, self.case, self.any = None, False, case, kind == "any"
        if kind != "none":
            each = torch.rand(width, generator=case.generator) * most
            if not self.any:
                each = torch.where(each > most / 2, 1e9, 0.0) if kind == "all or nothing" else torch.zeros(width)
            self.below = case.place(each)
        self.address = 0 if self.below is None else self.below.data_ptr()

    def keeps(self, values: Tensor) -> Tensor:
        if self.below is None:
            return torch.ones_like(values, dtype=torch.bool)
        above = values.abs() - self.below.double()
        self.doubt = self.any and (self.case.compute != "fp32" or bool((above.abs() < MARGIN).any()))
        return above >= 0

    def counts(self, kept: Tensor) -> tuple[int, int]:
        """Entries kept and offered; zeros where there are no thresholds to count for."""
        return (0, 0) if self.below is None else (int(kept.sum()), len(kept))


class Attention:
    def __init__(self, case: Case, hidden: int, form: tuple[str | None, int], places: list[int], keep: int) -> None:
        """`places`: where the tokens of the cache lie, `keep` sinks first, the new one last."""
        rng = case.random
        self.case, self.places, self.keep = case, places, keep
        self.kv_heads, self.queries, self.head_dim = rng.randint(1, 3), rng.randint(1, 4), case.size(70)
        heads, dim = self.kv_heads * self.queries, self.head_dim
        widths = (heads * dim, self.kv_heads * dim, self.kv_heads * dim)
        predicts = rng.random() < 0.4  # a predictor chooses rows
        self.qkv = [
            Linear(case, width, hidden, form, may_turn=part == 0 and not predicts) for part, width in enumerate(widths)
        ]
        self.out = Linear(case, heads * dim, hidden, form, by_neuron=True)
        self.scaling, self.softcap = dim**-0.5, rng.choice((0.0, 0.0, 2.0))
        self.window = rng.choice((0, 0, 1, rng.randint(1, 300)))
        self.norms: list[Tensor | None] = [None, None]
        self.all_heads = rng.random() < 0.5
        self.made = case.kernels.Attention(
            *(part.handle for part in (*self.qkv, self.out)),
            heads,
            self.kv_heads,
            dim,
            self.scaling,
            COMPUTES.index(case.compute),
        )
        if rng.random() < 0.5:
            self.norms = [case.place(1 + case.normal(n if self.all_heads else dim)) for n in widths[:2]]
            self.made.set_norms(*(norm.data_ptr() for norm in self.norms), self.all_heads, 0.01)
        self.rotary = 2 * rng.randint(0, dim // 2)
        self.rotation = rng.randint(0, 1) if self.rotary else -1
        if self.rotary:
            self.made.set_rotation(self.rotation, self.rotary)
        self.made.softcap, self.made.window = self.softcap, self.window
        self.inputs, self.attended = Thresholds(case, hidden, 1.0), Thresholds(case, heads * dim, 0.5)
        self.predictor = None
        if predicts:
            width = case.size(40)
            fc1, fc2 = case.matrix(width, hidden, ("int8", 32)), case.matrix(heads, width, ("int8", 32))
            bias = case.place(case.normal(heads) + rng.choice((-100, 0, 100)))
            self.predictor = fc1, fc2, bias
            self.made.predictor = case.kernels.Predictor(fc1.native().handle, fc2.native().handle, bias.data_ptr())
            self.inputs.below, self.inputs.address = None, 0
        self.made.set_thresholds(self.inputs.address, self.attended.address)
        self.doubt = False  # as of Thresholds
        self._make_cache()

    def _make_cache(self) -> None:
        case = self.case
        self.dtype = case.random.choice((torch.float32, torch.bfloat16, torch.int8))
        pages, shape = max(self.places) // PAGE_TOKENS + 1, (self.kv_heads, PAGE_TOKENS, self.head_dim)
        self.pages: list[list[Tensor]] = [[], [], [], []]  # keys, values, their scales
        for _ in range(pages):
            for side in (0, 1):
                states = case.normal(*shape)
                if self.dtype == torch.int8:
                    scales = states.abs().amax(-1) / 127
                    self.pages[2 + side].append(case.place(scales))
                    states = (states / scales[..., None]).round()
                self.pages[side].append(case.place(states.to(self.dtype)))
        addresses = [[t.data_ptr() for t in column] or [0] * pages for column in self.pages]
        self.table = case.place(torch.tensor(addresses).T.contiguous())
        self.code = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}[self.dtype]
        self.before = [[t.clone() for t in column] for column in self.pages]

    def _held(self, side: int, pages: list[list[Tensor]]) -> Tensor:
        """[kv_heads, tokens, head_dim]"""
        values = torch.cat(pages[side], dim=1).double()
        return values * torch.cat(pages[2 + side], dim=1).double()[..., None] if self.dtype == torch.int8 else values

    def __call__(
        self, x: Tensor, rotations: list[tuple[Tensor, Tensor]], rules: bool
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """After the kernel has run, whose new keys and values are looked at here, and then used. What it adds, and
        what is counted of its input, of what it attended to and of its heads.
        """
        seen = self.inputs.keeps(x) if rules else torch.ones_like(x, dtype=torch.bool)
        heads = torch.ones(self.kv_heads * self.queries, dtype=torch.bool)
        unsure = False
        if rules and self.predictor is not None:
            predicted = predicted_scores(self.case, *self.predictor, x)
            heads = predicted > 0
            unsure = self.case.compute != "fp32" or bool((predicted.abs() < MARGIN).any())
        q, k, v = (part(torch.where(seen, x, 0.0) if i == 0 else x) for i, part in enumerate(self.qkv))
        q = torch.where(heads.repeat_interleave(self.head_dim), q, 0.0)  # which a norm over all heads sees
        sink_q = self._turned(q, self.norms[0], rotations[2:])
        q, k = (self._turned(states, norm, rotations) for states, norm in zip((q, k), self.norms, strict=True))
        at, stop = self.places[-1], len(self.places)
        held = [self._held(side, self.pages) for side in (0, 1)]
        for states, new in ((held[0], k), (held[1], v.view(self.kv_heads, -1))):
            peak = new.abs().amax(-1, keepdim=True)
            step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.int8: 1 / 127}[self.dtype]
            near(
                "new key or value", states[:, at], new, (TOLERANCE[self.case.compute] * 10 + step) * peak.clamp_min(0.1)
            )
        for column, was in zip(self.pages, self.before, strict=True):
            for number, (page, before) in enumerate(zip(column, was, strict=True)):
                rest = torch.arange(PAGE_TOKENS) != at - number * PAGE_TOKENS
                if not torch.equal(page[:, rest], before[:, rest]):
                    raise AssertionError("another token of the cache was changed")
        start = max(0, stop - self.window) if self.window else 0
        keys, values = (states[:, self.places[start:]] for states in held)
        scores, of_sinks = (
            torch.einsum("kqd,ktd->kqt", asked.view(self.kv_heads, self.queries, -1), keys) * self.scaling
            for asked in (q, sink_q)
        )
        sinks = max(0, self.keep - start)
        scores = torch.cat((of_sinks[..., :sinks], scores[..., sinks:]), dim=-1)
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        attended = torch.einsum("kqt,ktd->kqd", scores.softmax(-1), values).flatten()
        if not rules:
            return self.out.sum_of_rows(attended), [(0, 0)] * 3
        kept = self.attended.keeps(attended) & heads.repeat_interleave(self.head_dim)
        self.doubt = self.inputs.doubt or self.attended.doubt or unsure
        counts = [self.inputs.counts(seen), self.attended.counts(kept), (0, 0)]
        if self.predictor is not None:
            counts[1:] = [(int(of.sum()), len(of)) for of in (kept, heads)]
        return self.out.sum_of_rows(torch.where(kept, attended, 0.0)), counts

    def _turned(self, states: Tensor, norm: Tensor | None, rotations: list[tuple[Tensor, Tensor]]) -> Tensor:
        states = rms(states, norm, 0.01) if self.all_heads else states
        states = states.view(-1, self.head_dim)
        states = states if self.all_heads else rms(states, norm, 0.01)
        if not self.rotary:
            return states
        cos, sin = (t.double() for t in rotations[self.rotation])
        half = self.rotary // 2
        a, b, rest = states.split((half, half, self.head_dim - self.rotary), dim=1)
        cos, sin = cos[:half], sin[:half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=1)


class Mlp:
    def __init__(self, case: Case, hidden: int, form: tuple[str | None, int]) -> None:
        rng, self.case, self.neurons = case.random, case, case.size(300)
        self.rule, predicts = rng.random() < 0.6, rng.random() < 0.3
        turns = not (self.rule and predicts)  # a predictor chooses rows
        self.gate = Linear(case, self.neurons, hidden, form, may_turn=turns) if rng.random() < 0.6 else None
        self.up = Linear(case, self.neurons, hidden, form, may_turn=turns and self.gate is None)
        down_form = form if rng.random() < 0.7 else case.format()
        self.down = Linear(case, self.neurons, hidden, down_form, by_neuron=True)
        self.activation = rng.randrange(len(ACTIVATIONS))
        self.made = case.kernels.Mlp(self.up.handle, self.down.handle, self.activation, COMPUTES.index(case.compute))
        if self.gate is not None:
            self.made.gate = self.gate.handle
        self.made.rule = self.rule
        self.inputs = Thresholds(case, hidden, 1.0)
        self.gates, self.hidden = Thresholds(case, self.neurons, 0.4), Thresholds(case, self.neurons, 0.2)
        self.made.set_thresholds(self.inputs.address, self.gates.address, self.hidden.address)
        self.predictor = None
        if self.rule and predicts:
            width = case.size(40)
            fc1, fc2 = case.matrix(width, hidden, ("int8", 32)), case.matrix(self.neurons, width, ("int8", 32))
            bias = case.place(case.normal(self.neurons) + rng.choice((-100, 0, 100)))
            self.predictor = fc1, fc2, bias
            self.made.predictor = case.kernels.Predictor(fc1.native().handle, fc2.native().handle, bias.data_ptr())
        self.doubt = False  # as of Thresholds

    def __call__(self, x: Tensor, rules: bool) -> tuple[Tensor, list[tuple[int, int]]]:
        """What it adds, and what is counted of its input, gates and hidden states."""
        rules = self.rule and rules
        seen = self.inputs.keeps(x) if rules else torch.ones_like(x, dtype=torch.bool)
        gate = ACTIVATIONS[self.activation]((self.gate or self.up)(torch.where(seen, x, 0.0)))
        hidden = gate if self.gate is None else gate * self.up(x)
        if not rules:
            return self.down.sum_of_rows(hidden), [(0, 0)] * 3
        kept = gate != 0 if self.gates.below is None else self.gates.keeps(gate)
        self.doubt = self.inputs.doubt or self.gates.doubt
        if self.predictor is not None:
            scores = predicted_scores(self.case, *self.predictor, x)
            kept &= scores > 0
            self.doubt = self.doubt or self.case.compute != "fp32" or bool((scores.abs() < MARGIN).any())
        stays = kept & self.hidden.keeps(hidden)
        self.doubt = self.doubt or self.hidden.doubt
        counts = [self.inputs.counts(seen), *((int(places.sum()), self.neurons) for places in (kept, stays))]
        return self.down.sum_of_rows(torch.where(stays, hidden, 0.0)), counts

    def off(self) -> int:
        """How many gates more or less may be counted: a sum that is zero may come out as less than nothing, and a small
        GELU as zero.
        """
        if self.gates.below is not None:
            return 0
        return 3 if self.case.compute == "fp32" and self.activation >= 3 else self.neurons


def check_counts(counted: list[list[int]], expected: list[tuple[int, int]], off: list[int], text: str) -> None:
    for (kept, offered), (wanted, of), most in zip(counted, expected, off, strict=True):
        if offered != of or not 0 <= kept <= of or abs(kept - wanted) > most:
            raise AssertionError(f"counted {counted}, not {expected}, or {off} off; {text}")


def places_of(case: Case, held: int) -> tuple[list[int], list[int]]:
    """A ring (sinks, size, place of the oldest of the others), and where in it `held` tokens and the next one lie."""
    if case.random.random() < 0.4:
        return [0, 0, 0], list(range(held + 1))
    keep = case.random.randint(0, 6)
    size = max(1, held + 1 - keep) + case.random.choice((0, 0, 1, case.random.randint(0, 300)))
    first = case.random.randrange(size)
    places = [i if i < keep else keep + (first + i - keep) % size for i in range(held + 1)]
    return [keep, size, first], places


def decode(case: Case) -> str:
    """Layers and a head, or parts of one layer."""
    rng, hidden, form = case.random, case.size(150), case.format()
    part = rng.choice(("layers", "layers", "layers and head", "layers and head", "attention", "mlp"))
    held = rng.choice((0, rng.randint(1, 70), rng.randint(1, 600), 63, 64, 255, 256))
    ring, places = places_of(case, held)
    count = rng.randint(1, 3) if part.startswith("layers") else 1
    decoder = case.kernels.Decoder(case.level, hidden)
    layers: list[tuple[list[Tensor | None], Attention | None, Mlp | None]] = []
    for _ in range(count):
        made = case.kernels.Layer()
        norms = [case.place(1 + case.normal(hidden)) if rng.random() < 0.7 else None for _ in range(4)]
        made.set_norms(*(0 if norm is None else norm.data_ptr() for norm in norms), 0.01)
        attention = None if part == "mlp" else Attention(case, hidden, form, places, ring[0])
        mlp = None if part == "attention" else Mlp(case, hidden, form)
        if attention is not None:
            made.attention = attention.made
        if mlp is not None:
            made.mlp = mlp.made
        if not part.startswith("layers"):
            norms = [None] * 4
            made.set_norms(0, 0, 0, 0, 0.01)
        decoder.add(made)
        layers.append((norms, attention, mlp))
    head = final = None
    if part == "layers and head":
        head, final = Linear(case, case.size(400), hidden, case.format()), case.place(1 + case.normal(hidden))
        cap = rng.choice((0.0, 5.0))
        decoder.set_head(
            case.kernels.Head(final.data_ptr(), 0.01, head.handle, cap, False, COMPUTES.index(case.compute))
        )

    x, rules, threads = case.place(case.normal(hidden)), rng.random() < 0.8, rng.choice((1, 2, 3, 4, 7))
    rotations: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        angles = case.normal(max(attention.rotary // 2 if attention else 0 for _, attention, _ in layers))
        rotations.append((case.place(angles.cos()), case.place(angles.sin())))
    addresses = [[cos.data_ptr(), sin.data_ptr()] for cos, sin in rotations]
    if rng.random() < 0.5:  # sinks lie where the position is
        rotations[2:], addresses[2:] = rotations[:2], [[0, 0]] * 2
    rotation_table = case.place(torch.tensor(addresses))
    tables = case.place(torch.tensor([[a.table.data_ptr(), a.code] if a else [0, 0] for _, a, _ in layers]))
    computed = case.place(torch.zeros(count, 6, 2, dtype=torch.int64)) if rng.random() < 0.7 else None
    out = case.buffer(hidden if head is None else head.matrix.rows)
    decoder.run(
        0,
        count,
        part.startswith("layers"),
        x.data_ptr(),
        out.data_ptr() if head is None else 0,
        0 if head is None else out.data_ptr(),
        held,
        case.place(torch.tensor(ring)).data_ptr(),
        rotation_table.data_ptr(),
        tables.data_ptr(),
        rules,
        0 if computed is None else computed.data_ptr(),
        threads,
    )

    text = f"{part} x {count}, hidden {hidden}, {form}, {case.compute}, {held} tokens, ring {ring}, {threads} threads"
    if not bool(out.isfinite().all()):
        raise AssertionError(f"not finite; {text}")
    states = x.double()
    for number, (norms, attention, mlp) in enumerate(layers):
        counts, off = [(0, 0)] * 6, [0] * 6
        if attention is not None:
            added, counts[3:] = attention(rms(states, norms[0], 0.01), rotations, rules)
            states = states + rms(added, norms[1], 0.01) if part != "attention" else added
        if mlp is not None:
            added, counts[:3] = mlp(rms(states, norms[2], 0.01), rules)
            states = states + rms(added, norms[3], 0.01) if part != "mlp" else added
            off[1:3] = [mlp.off()] * 2
        doubt = any(block is not None and block.doubt for block in (attention, mlp))
        if computed is not None:
            check_counts(computed[number].tolist(), counts, [10**6] * 6 if doubt else off, text)
        if doubt:
            return text  # errors of what came before grow where a norm blows up small states
    if head is not None:
        states = head(rms(states, final, 0.01))
        states = torch.tanh(states / cap) * cap if cap else states
    slack = {"fp32": 1e-3, "bf16": 0.3, "int8": 0.1}[case.compute]
    wide = any(attention is not None and attention.dtype != torch.float32 for _, attention, _ in layers)
    near(text, out, states, (slack + 0.05 * wide) * (1 + states.abs().max()))
    return text
