"""What bench_quality.py is made of: skip rules on transformers' own model.

A rule says which entries of a vector are set to zero: those of an input of a projection, whose stored rows (the columns
of the weight) are then not read, or of the activated gate, which spares a neuron's rows of up and down, or whole
neurons, by what a predictor foretells. All rules here come down to a threshold per entry, |v_i| < t_i, so that they
differ in their t alone and run through the same hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_sparse.activation_profile import ActivationProfile, thresholds

GATE = "act"  # the activated gate
NEURONS = "neurons"  # a predictor's scores of them; every other place is the input of the linear module of that name
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = (*ATTENTION, *MLP)
OURS = {  # the library's places, and what they are here
    ("attention", "input"): "q_proj",
    ("attention", "output"): "o_proj",
    ("mlp", "input"): "gate_proj",
    ("mlp", "gate"): GATE,
    ("mlp", "hidden"): "down_proj",
}
AT_ONCE = 4  # rows of tokens that pass through the model together
SAMPLED = 128  # tokens whose vectors are kept: thresholds are quantiles of them
SORTED = 1 << 16  # values of a place that its quantiles are read from
FINEST = 30  # halvings of a level
TOP, PREDICTOR_SHARE, EPOCHS = 0.5, 0.08, 20  # of a predictor: what it learns to find, its size, its training

Site = tuple[int, str]  # layer, place
Setting = dict[Site, Tensor]  # thresholds, [width] or one for all


@dataclass(frozen=True)
class Measured:
    """`perplexity` of a text; `read`: share of the block weights that were read; `kl`: nats from the dense model's
    distributions, 0 where they were not given.
    """

    perplexity: float
    read: float
    kl: float = 0.0


class Dropper:
    """A plain model whose hooks set entries to zero as `setting` says, in every token, and count what that spares.

    Matrices are counted in weights: rows of one matrix take the same bytes, and so do all weights of a model where
    widths are multiples of the quantization group. Raises ValueError for a model of another build than Llama's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.setting: Setting = {}
        self.predictors: dict[int, nn.Module] = {}  # by layer: what the MLP reads -> scores of its neurons, in 0..1
        self.modules: dict[Site, Any] = {}
        self._left_out = torch.empty(0, dtype=torch.bool)  # of the neurons of the layer that is passed
        self.seen: Callable[[Site, Tensor], None] | None = None  # looks at vectors before they are dropped
        layers: Any = getattr(model.base_model, "layers", ())
        for layer, block in enumerate(layers):
            for part, names in (("self_attn", ATTENTION), ("mlp", MLP)):
                for name in names:
                    linear = getattr(getattr(block, part, None), name, None)
                    if not isinstance(linear, nn.Linear):
                        raise ValueError(
                            f"model: expected {part}.{name} in every layer; {type(model).__name__} has none"
                        )
                    self.modules[layer, name] = linear
                    linear.register_forward_pre_hook(self._before((layer, name)))
            self.modules[layer, GATE] = block.mlp.act_fn
            block.mlp.act_fn.register_forward_hook(self._after((layer, GATE)))
        if len({id(module) for module in self.modules.values()}) < len(self.modules) or not self.modules:
            raise ValueError(f"model: expected layers that share no module; got {type(model).__name__}")
        self.layers = len(layers)
        self.weights = {site: m.weight.numel() for site, m in self.modules.items() if site[1] != GATE}
        self.total = sum(self.weights.values())
        self._spared = torch.zeros((), dtype=torch.float64)

    def _before(self, site: Site) -> Any:
        return lambda module, args: (self._drop(site, args[0]),)

    def _after(self, site: Site) -> Any:
        return lambda module, args, output: self._drop(site, output)

    def _drop(self, site: Site, values: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen(site, values)
        threshold = self.setting.get(site)
        if threshold is not None:
            values = values.masked_fill(values.abs() < threshold, 0)
        layer, place = site
        if place == "gate_proj" and (least := self.setting.get((layer, NEURONS))) is not None:
            self._left_out = self.predictors[layer](values) < least
            of_neuron = sum(self.weights[layer, name] for name in MLP) / self._left_out.shape[-1]
            of_predictor = sum(p.numel() for p in self.predictors[layer].parameters())
            self._spared += self._left_out.sum() * of_neuron - self._left_out[..., 0].numel() * of_predictor
        if place == GATE and (layer, NEURONS) in self.setting:
            return values.masked_fill(self._left_out, 0)
        gated = (layer, GATE) in self.setting
        if threshold is not None or (gated and place == "down_proj"):  # a gate that is dropped spares the row of down
            spared = self.weights[(layer, "up_proj") if place == GATE else site] / values.shape[-1]
            self._spared += (values == 0).sum() * spared
        return values

    @torch.no_grad()
    def measure(self, rows: Tensor, setting: Setting, reference: Sequence[Tensor] | None = None) -> Measured:
        """`rows`: int64 [rows, tokens], each by itself; `reference`: what `last_hidden_states` gave for them."""
        loss, divergence = 0.0, 0.0
        self.take_spared(1)
        for number, hidden in enumerate(self._hidden(rows, setting)):
            log_q = self._log_probs(hidden)
            loss += float(F.nll_loss(log_q, rows[number, 1:], reduction="sum"))
            if reference is not None:
                log_p = self._log_probs(reference[number])
                divergence += float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
        count = rows[:, 1:].numel()
        return Measured(math.exp(loss / count), 1 - self.take_spared(rows.numel()), divergence / count)

    def take_spared(self, tokens: int) -> float:
        """Share of the block weights that was not read for `tokens` tokens, since this was asked last."""
        share = float(self._spared) / tokens / self.total
        self._spared.zero_()
        return share

    @torch.no_grad()
    def last_hidden_states(self, rows: Tensor) -> list[Tensor]:
        """The dense model's, [tokens, width] by row."""
        return list(self._hidden(rows, {}))

    def _hidden(self, rows: Tensor, setting: Setting) -> Iterator[Tensor]:
        with self.applied(setting):
            for batch in rows.split(AT_ONCE):
                yield from self.model.base_model(batch, use_cache=False).last_hidden_state

    def _log_probs(self, hidden: Tensor) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        return head(hidden[:-1]).float().log_softmax(dim=-1)

    @contextmanager
    def applied(self, setting: Setting) -> Iterator[None]:
        dtype = self.model.dtype
        self.setting = {site: threshold.to(dtype) for site, threshold in setting.items()}
        try:
            yield
        finally:
            self.setting = {}

    @contextmanager
    def watched(self, seen: Callable[[Site, Tensor], None]) -> Iterator[None]:
        """`seen(site, values)` is called with every vector of the dense model."""
        self.seen = seen
        try:
            yield
        finally:
            self.seen = None


# Calibration


@dataclass(frozen=True)
class Calibration:
    """Of every site: `samples` float32 [SAMPLED tokens, width]; and `ours`, what `library_thresholds` gives. `rows`:
    the tokens of both.
    """

    samples: dict[Site, Tensor]
    ours: Setting
    rows: Tensor


@torch.no_grad()
def sample(dropper: Dropper, rows: Tensor) -> dict[Site, Tensor]:
    """The dense model's vectors at about SAMPLED tokens of `rows`, evenly spread."""
    step = max(1, rows.numel() // SAMPLED)
    parts: dict[Site, list[Tensor]] = {site: [] for site in dropper.modules}

    def seen(site: Site, values: Tensor) -> None:
        parts[site].append(values.flatten(0, -2)[::step].float())

    with dropper.watched(seen):
        for batch in rows.split(AT_ONCE):
            dropper.model.base_model(batch, use_cache=False)
    return {site: torch.cat(part) for site, part in parts.items()}


def library_thresholds(model: Any, rows: Tensor) -> Setting:
    """The library's own, at level 1: of `model`, which it loaded, from the profile of `rows`."""
    profile = ActivationProfile(model)
    profile.measure(rows, torch.ones_like(rows, dtype=torch.bool))
    return {
        (id.layer, OURS[id.kind, place]): at
        for id, places in thresholds(profile, 1.0).items()
        for place, at in places.items()
    }


# Rules


@dataclass
class Rule:
    """`setting(level)`: the thresholds at a level from 0, nothing is left out, to 1, nearly everything is."""

    name: str
    setting: Callable[[float], Setting]


def by_quantile(name: str, calibration: Calibration, weights: dict[Site, Tensor | None]) -> Rule:
    """Leaves the same share of values out at every site of `weights`, those of least |v| times the site's weights,
    [width] or None for 1.
    """
    share = dict.fromkeys(weights, 1.0)
    return by_shares(name, calibration, weights, lambda level: dict.fromkeys(share, level))


def by_shares(
    name: str,
    calibration: Calibration,
    weights: dict[Site, Tensor | None],
    shares: Callable[[float], dict[Site, float]],
) -> Rule:
    """As `by_quantile`, with shares of their own for the sites."""
    ordered: dict[Site, Tensor] = {}
    for site, weight in weights.items():
        scores = calibration.samples[site].abs()
        scores = (scores if weight is None else scores * weight).flatten()
        ordered[site] = scores[:: -(-len(scores) // SORTED)].sort().values

    def setting(level: float) -> Setting:
        found = {}
        for site, share in shares(level).items():
            if share > 0:
                cut = ordered[site][min(int(share * len(ordered[site])), len(ordered[site]) - 1)]
                weight = weights[site]
                found[site] = cut if weight is None else cut / weight.clamp_min(1e-12)
        return found

    return Rule(name, setting)


def cats(dropper: Dropper, calibration: Calibration) -> Rule:
    """CATS (Lee et al. 2024, section 3): per layer the neurons of least |act(gate)|; gates and attention stay whole."""
    return by_quantile("CATS", calibration, {(layer, GATE): None for layer in range(dropper.layers)})


def teal(dropper: Dropper, calibration: Calibration) -> Rule:
    """TEAL (Liu et al. 2024, section 4), uniform: per tensor the inputs of least magnitude, of all projections."""
    return by_quantile("TEAL", calibration, dict.fromkeys(dropper.weights))


def wina(dropper: Dropper, calibration: Calibration) -> Rule:
    """WINA (Chen et al. 2025, section 3): as TEAL, inputs weighted by the norms of the columns they meet; a threshold
    per tensor in place of its top k per token.
    """
    return by_quantile("WINA", calibration, column_norms(dropper))


def column_norms(dropper: Dropper) -> dict[Site, Tensor | None]:
    return {site: dropper.modules[site].weight.detach().float().norm(dim=0) for site in dropper.weights}


def predicted(dropper: Dropper, calibration: Calibration) -> Rule:
    """DejaVu (Liu et al. 2023, section 4): per layer the neurons that a low-rank network scores least, in all three
    projections; attention stays whole. Trains the networks, on the calibration's rows.
    """
    rows = calibration.rows
    seen: dict[Site, list[Tensor]] = {}

    def look(site: Site, values: Tensor) -> None:
        if site[1] in ("gate_proj", "down_proj"):
            seen.setdefault(site, []).append(values.detach().flatten(0, -2).float())

    for layer in range(dropper.layers):  # one at a time: what all read and compute is more than fits
        seen.clear()
        only = lambda site, values, layer=layer: look(site, values) if site[0] == layer else None  # noqa: E731
        with dropper.watched(only), torch.no_grad():
            for batch in rows.split(AT_ONCE):
                dropper.model.base_model(batch, use_cache=False)
        norms = dropper.modules[layer, "down_proj"].weight.detach().float().norm(dim=0)
        x, sizes = (torch.cat(seen[layer, place]) for place in ("gate_proj", "down_proj"))
        dropper.predictors[layer] = _train_predictor(x, sizes.abs() * norms).to(dropper.model.dtype)
        with torch.no_grad():
            chosen = x[:: max(1, len(x) // SAMPLED)].to(dropper.model.dtype)
            calibration.samples[layer, NEURONS] = dropper.predictors[layer](chosen).float()
    return by_quantile("DejaVu", calibration, {(layer, NEURONS): None for layer in range(dropper.layers)})


def _train_predictor(x: Tensor, sizes: Tensor) -> nn.Module:
    """Scores in 0..1 of the neurons, high for those that are among the TOP of their token by `sizes` [tokens, neurons].
    `x`: [tokens, width]. Takes PREDICTOR_SHARE of the three projections' weights.
    """
    width, neurons = x.shape[1], sizes.shape[1]
    rank = max(1, int(PREDICTOR_SHARE * 3 * width * neurons / (width + neurons)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(width, rank, bias=False), nn.ReLU(), nn.Linear(rank, neurons, bias=False), nn.Sigmoid()
        )
        least = sizes.kthvalue(max(1, int((1 - TOP) * neurons)), dim=1, keepdim=True).values
        labels = (sizes > least).float()
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
        scale = x.square().mean(1, keepdim=True).sqrt().clamp_min(1e-6).median()
        x = (x / scale).clamp(-20, 20)
        with torch.enable_grad():
            for _ in range(EPOCHS):
                for batch in torch.randperm(len(x)).split(128):
                    loss = F.binary_cross_entropy_with_logits(network[:-1](x[batch]), labels[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    network[0].weight.data /= scale
    return network.requires_grad_(False).eval()


def teal_greedy(dropper: Dropper, calibration: Calibration, path: dict[int, list[str]], step: float) -> Rule:
    """TEAL with the shares of its search (algorithm 1): `path`, by layer, is what `greedy_path` found with `step`. All
    layers leave out the same share of their weights.
    """
    totals = {layer: sum(dropper.weights[layer, name] for name in LINEARS) for layer in path}

    def shares(level: float) -> dict[Site, float]:
        found: dict[Site, float] = {}
        for layer, names in path.items():
            steps = level * len(names)
            whole = int(steps)
            taken = [
                *((name, 1.0) for name in names[:whole]),
                *((name, steps - whole) for name in names[whole : whole + 1]),
            ]
            for name, part in taken:
                site = layer, name
                found[site] = found.get(site, 0.0) + part * step * totals[layer] / dropper.weights[site]
        return found

    return by_shares("TEAL, greedy", calibration, dict.fromkeys(dropper.weights), shares)


def ours(dropper: Dropper, calibration: Calibration) -> Rule:
    """That of hf_sparse.calibration: thresholds at one level, here the one that reads the share that is asked for."""
    at_one = calibration.ours
    scores = [(calibration.samples[site].abs() / at).flatten()[::13] for site, at in at_one.items()]
    ordered = torch.cat(scores).sort().values

    def setting(level: float) -> Setting:
        risk = ordered[min(int(level * len(ordered)), len(ordered) - 1)] if level > 0 else torch.tensor(0.0)
        return {site: risk * at for site, at in at_one.items()}

    return Rule("hf_sparse", setting)


def foreseen(dropper: Dropper, samples: dict[Site, Tensor], setting: Setting) -> float:
    """Share of the block weights that `setting` reads on the sampled tokens, as if dropping changed nothing else."""
    spared = 0.0
    for layer in range(dropper.layers):
        below = {
            place: samples[layer, place].abs() < setting[layer, place]
            for place in (*LINEARS, GATE)
            if (layer, place) in setting
        }
        if GATE in below:
            below["down_proj"] = below["down_proj"] | below[GATE] if "down_proj" in below else below[GATE]
            below["up_proj"] = below.pop(GATE)
        if (layer, NEURONS) in setting:
            left_out = float((samples[layer, NEURONS] < setting[layer, NEURONS]).float().mean())
            spared += left_out * sum(dropper.weights[layer, name] for name in MLP)
            spared -= sum(p.numel() for p in dropper.predictors[layer].parameters())
        spared += sum(float(mask.float().mean()) * dropper.weights[layer, place] for place, mask in below.items())
    return 1 - spared / dropper.total


def level_for(read: float, dropper: Dropper, samples: dict[Site, Tensor], rule: Rule) -> float | None:
    """The level at which `rule` is foreseen to read a share `read`; None where it cannot read so little."""
    low, high = 0.0, 1.0
    if foreseen(dropper, samples, rule.setting(high)) > read:
        return None
    for _ in range(FINEST):
        if high - low < 1e-5:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if foreseen(dropper, samples, rule.setting(middle)) > read else (low, middle)
    return high


def at_equal_bytes(
    read: float,
    tolerance: float,
    dropper: Dropper,
    samples: dict[Site, Tensor],
    rule: Rule,
    rows: Tensor,
    reference: Sequence[Tensor] | None = None,
) -> Measured | None:
    """`rule` with its level set so that it reads the share `read` of the block weights on `rows`, within `tolerance`;
    None where it cannot. Three corrections at most: the level is first set on the calibration's samples.
    """
    aim, found = read, None
    for _ in range(4):
        level = level_for(min(aim, 1.0), dropper, samples, rule)
        if level is None:
            break
        found = dropper.measure(rows, rule.setting(level), reference)
        if abs(found.read - read) <= tolerance:
            break
        aim += read - found.read
    return found
