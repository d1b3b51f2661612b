"""What is worth seeing of a loaded model: exhibits, each with the figures that its plot was drawn of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_sparse.modeling import BlockId

from .cost_model import token_time
from .placing import placement_blocks
from .report import format_bytes
from .report_exhibit import LIGHT, Exhibit, ramp, share
from .report_quality import curve, quality

if TYPE_CHECKING:
    from .model import SparseMixin

GROUPS = 32  # of neurons, in the heat map


def exhibits(model: SparseMixin) -> list[Exhibit]:
    """In the order in which they explain each other."""
    return [
        _frequency(model),
        _shares(model),
        _heat_map(model),
        _predictors(model),
        _time(model),
        quality(model),
        curve(model),
    ]


# How often neurons are computed


def _hotness(model: SparseMixin) -> dict[int, Tensor]:
    """By layer, float64 [neurons]: the active fractions of its MLP, hottest first."""
    blocks = model.plan.blocks
    return {id.layer: blocks[id].active_fraction.double().sort(descending=True).values for id in _mlps(model)}


def _mlps(model: SparseMixin) -> list[BlockId]:
    return sorted(id for id in model.plan.blocks if id.kind == "mlp")


def _frequency(model: SparseMixin) -> Exhibit:
    hotness = _hotness(model)
    every = torch.cat(list(hotness.values()))
    law = _power_law(every)

    def draw(figure: Any) -> None:
        from matplotlib.ticker import FuncFormatter, StrMethodFormatter

        axes = figure.subplots()
        for color, (layer, active) in zip(ramp(len(hotness)), hotness.items(), strict=True):
            at = _spaced(len(active), law)
            axes.plot(at + 1, active[at].numpy(), color=color, lw=1, label=_depth(layer, hotness))
        axes.set(xlabel="neurons of a layer, hottest first", ylabel="tokens that compute it")
        if law:
            axes.set(xscale="log", yscale="log", ylim=(float(every[every > 0].min()) * 0.8, 1.25))
        else:
            axes.set_ylim(0, 1.05)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.legend(loc="lower left")

    rows = tuple(
        (str(layer), f"{len(a):,}", *map(share, (a[0], a.median(), a[-1], a.mean())), f"{int((a == 0).sum()):,}")
        for layer, a in hotness.items()
    )
    skipped = [id for id in _mlps(model) if model.plan.rules[id].kind != "none"]
    text = (
        f"How often each MLP neuron was computed on the held-out half of the calibration text, each layer sorted by "
        f"itself: {float(every.mean()):.1%} of all neurons on average."
        if skipped
        else "The rules leave out no MLP neuron: every token computes each of them, and the curves are flat."
    )
    return Exhibit(
        "activation_frequency",
        "How often neurons are active",
        text,
        f"One falling curve for each of {len(hotness)} layers: the share of tokens that compute a neuron, from the "
        f"hottest neuron ({float(every.max()):.1%}) to the coldest ({float(every.min()):.1%}).",
        ("layer", "neurons", "hottest", "median", "coldest", "mean", "never active"),
        rows,
        draw,
    )


def _power_law(active: Tensor) -> bool:
    """Whether many neurons are rare: else axes of a power law would hide that most are hot."""
    return float(active.quantile(0.25)) < 0.05 and float(active.max()) > 0


def _spaced(neurons: int, logarithmic: bool) -> Tensor:
    """int64: about a hundred of the ranks from 0."""
    if not logarithmic:
        return torch.linspace(0, neurons - 1, min(100, neurons)).round().long()
    return torch.logspace(0, math.log10(neurons), 100).round().long().unique() - 1


def _depth(layer: int, layers: dict[int, Any]) -> str | None:
    """A label for the first, the middle and the last of `layers`."""
    names = sorted(layers)
    return f"layer {layer}" if layer in (names[0], names[len(names) // 2], names[-1]) else None


def _shares(model: SparseMixin) -> Exhibit:
    hotness = _hotness(model)
    every = torch.cat(list(hotness.values())).sort(descending=True).values
    impact = torch.cat([model.plan.blocks[id].impact.double() for id in _mlps(model)]).sort(descending=True).values

    def draw(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        for color, (layer, active) in zip(ramp(len(hotness)), hotness.items(), strict=True):
            axes.plot(*_curve(active), color=color, lw=0.8, alpha=0.8, label=_depth(layer, hotness))
        axes.plot(*_curve(every), color=LIGHT["text"], lw=2, label="all layers")
        axes.plot(*_curve(impact), color=LIGHT["text"], lw=1.5, ls="--", label="all, of what they contribute")
        axes.plot([0, 1], [0, 1], color=LIGHT["grid"], lw=1, ls=":", label="if all were alike")
        axes.set(xlabel="neurons, hottest first", ylabel="share of all activations", xlim=(0, 1), ylim=(0, 1.02))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.legend(loc="lower right")

    marks = (0.1, 0.2, 0.5)
    rows = [
        (name, *(share(_taken(values, mark)) for mark in marks), share(_needed(values, 0.8)))
        for name, values in [("all", every), *((str(layer), active) for layer, active in hotness.items())]
    ]
    return Exhibit(
        "activation_shares",
        "What the hottest neurons take",
        f"The hottest 20% of all MLP neurons take {_taken(every, 0.2):.1%} of the activations; "
        f"{_needed(every, 0.8):.1%} of the neurons take 80% of them. The dashed line counts what neurons contribute to "
        f"the output (mean magnitude by the norm of what it is multiplied with) instead of how often: there 20% take "
        f"{_taken(impact, 0.2):.1%}.",
        f"Rising curves, one for each of {len(hotness)} layers and one for all: the share of activations that the "
        f"hottest neurons take together. The curve of all layers passes {_taken(every, 0.2):.1%} at 20% of the "
        f"neurons and {_taken(every, 0.5):.1%} at 50%.",
        ("layer", *(f"hottest {mark:.0%} take" for mark in marks), "neurons that take 80%"),
        tuple(rows),
        draw,
    )


def _cumulative(values: Tensor) -> Tensor:
    """float64 [neurons + 1]: the share that the first n of `values`, which fall, have of their sum."""
    return torch.cat((torch.zeros(1, dtype=values.dtype), values.cumsum(0))) / values.sum().clamp_min(1e-300)


def _curve(values: Tensor) -> tuple[Any, Any]:
    taken = _cumulative(values)
    at = torch.linspace(0, len(values), min(len(values), 80) + 1).round().long()
    return (at / len(values)).numpy(), taken[at].numpy()


def _taken(values: Tensor, of: float) -> float:
    return float(_cumulative(values)[round(of * len(values))])


def _needed(values: Tensor, of: float) -> float:
    """The least share of the neurons that take `of` of the activations together."""
    return min(1.0, int((_cumulative(values) < of * (1 - 1e-12)).sum()) / len(values))


# Where they lie


def tier_colors(tiers: Sequence[Any]) -> list[str]:
    """The last tier has one colour in every report, so has the first of several."""
    others = [LIGHT[name] for name in LIGHT if name not in ("text", "grid", "last")]
    return [*(others[i % len(others)] for i in range(len(tiers) - 1)), LIGHT["last"]]


def _heat_map(model: SparseMixin) -> Exhibit:
    tiers, mlps = model.placement.tiers, _mlps(model)
    groups = min(GROUPS, *(len(model.plan.blocks[id].active_fraction) for id in mlps))
    rare = _power_law(torch.cat([model.plan.blocks[id].active_fraction.double() for id in mlps]))
    means, lies, rows = [], [], []
    for id in mlps:
        active = model.plan.blocks[id].active_fraction.double()
        order = active.argsort(descending=True, stable=True)
        on = torch.nn.functional.one_hot(model.placement.assignment[id].long(), len(tiers)).double()
        means.append([float(part.mean()) for part in active[order].tensor_split(groups)])
        lies.append([part.mean(0).tolist() for part in on[order].tensor_split(groups)])
        heads = model.placement.assignment[BlockId(id.layer, "attention")].bincount(minlength=len(tiers))
        mean = (active @ on) / on.sum(0)
        rows.append(
            [str(id.layer)]
            + [f"{int(count):,}" for count in on.sum(0)]
            + [share(float(value)) if value == value else "–" for value in mean]
            + [f"{int(count):,}" for count in heads]
        )

    def draw(figure: Any) -> None:
        from matplotlib.colors import PowerNorm
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        panels = figure.subplots(1 + (len(tiers) > 1), sharex=True, squeeze=False)[:, 0]
        extent = (0, 1, mlps[-1].layer + 0.5, mlps[0].layer - 0.5)
        for axes in panels:
            axes.set(ylabel="layer")
            axes.grid(False)
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        norm = PowerNorm(0.5 if rare else 1, vmin=0, vmax=1)
        image = panels[0].imshow(means, aspect="auto", extent=extent, cmap="cividis", norm=norm, interpolation="none")
        bar = figure.colorbar(image, ax=panels, format=PercentFormatter(1, decimals=0), aspect=20 * len(panels))
        if rare:
            bar.set_ticks([0, 0.01, 0.05, 0.2, 0.5, 1])
        bar.set_label("tokens that compute it")
        bar.outline.set_visible(False)
        if len(tiers) > 1:
            colors = tier_colors(tiers)
            panels[1].add_collection(_cells(lies, [id.layer for id in mlps], colors))
            panels[1].set(xlim=extent[:2], ylim=extent[2:])
            handles = [Patch(color=color, label=f"on {tier.name}") for color, tier in zip(colors, tiers, strict=True)]
            figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(tiers)))
        panels[-1].set(xlabel="neurons of a layer, hottest first")
        panels[-1].xaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    names = [tier.name for tier in tiers]
    text = f"Each row is a layer, its MLP neurons in {groups} groups of equal size, hottest on the left. "
    alt = f"A heat map of {len(mlps)} layers by {groups} groups of neurons: how often each group is active"
    if len(tiers) == 1:
        text += f"Every neuron lies on {names[0]}, the only tier."
        alt += "."
    else:
        text += "Below, the tier that they lie on; a group that is split has a mixture of the tiers' colours."
        alt += f", and a second one of the same groups with the tier that they lie on: {', '.join(names)}."
    columns = (
        "layer",
        *(f"MLP neurons on {name}" for name in names),
        *(f"active on {name}, mean" for name in names),
        *(f"KV groups on {name}" for name in names),
    )
    rows_ = tuple(map(tuple, rows))
    return Exhibit(
        "placement", "Where neurons lie", text, alt, columns, rows_, draw, height=2.8 if len(tiers) == 1 else 4.8
    )


def _cells(lies: list[list[list[float]]], layers: list[int], colors: list[str]) -> Any:
    """Rectangles, a row for each layer: `lies` [layers, groups, tiers] are shares, which mix the tiers' colours. Each
    tier is laid over those before it, as thickly as its share of them all is; runs of equal groups are one rectangle.
    """
    from itertools import groupby

    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    corners, faces = [], []
    for layer, of in zip(layers, lies, strict=True):
        for tier, color in enumerate(colors):
            start = 0
            thick = (group[tier] / sum(group[: tier + 1]) if group[tier] else 0.0 for group in of)
            for alpha, run in groupby(round(value, 3) for value in thick):
                left, start = start, start + len(list(run))
                if alpha > 0:
                    x, y = (left / len(of), start / len(of)), (layer - 0.5, layer + 0.5)
                    corners.append([(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])])
                    faces.append(to_rgba(color, alpha))
    return PolyCollection(corners, facecolors=faces, linewidths=0, gid="cells")


# Predictors


def _predictors(model: SparseMixin) -> Exhibit:
    predictors = dict(sorted(model.plan.predictors.items()))

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        sizes, shares = figure.subplots(2, sharex=True)
        for kind, marker, color in (("mlp", "o", LIGHT["third"]), ("attention", "s", LIGHT["fourth"])):
            of = {id.layer: p for id, p in predictors.items() if id.kind == kind}
            if of:
                label = {"mlp": "of neurons", "attention": "of query heads"}[kind]
                sizes.plot(list(of), [p.nbytes / 1e3 for p in of.values()], marker, color=color, label=label)
                known = {layer: p.recall for layer, p in of.items() if p.recall is not None}
                shares.plot(list(known), list(known.values()), marker, color=color, label=label)
        sizes.set(ylabel="size, kB")
        sizes.set_ylim(0, 1.2e-3 * max(p.nbytes for p in predictors.values()))
        worst = min((p.recall for p in predictors.values() if p.recall is not None), default=1.0)
        shares.set(xlabel="layer", ylabel="recall", ylim=(min(0.8, worst - 0.05), 1.02))
        shares.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        shares.xaxis.set_major_locator(MaxNLocator(integer=True))
        sizes.legend(loc="lower left")

    rows = tuple(
        (
            f"{id.layer}, {'query heads' if id.kind == 'attention' else 'neurons'}",
            f"{p.width:,}",
            f"{p.nbytes:,}",
            *(share(value) for value in (p.recall, p.precision, p.kept)),
            "unknown" if p.bytes_saved is None else f"{p.bytes_saved:,}",
        )
        for id, p in predictors.items()
    )
    kinds = ", ".join(sorted({rule.kind for rule in model.plan.rules.values()}))
    total = format_bytes(sum(p.nbytes for p in predictors.values()))
    return Exhibit(
        "predictors",
        "Predictors",
        f"{len(predictors)} predictors, {total} together, foretell what is active. Recall: the share of what is active "
        "that they name; what they miss is left out."
        if predictors
        else f"This plan has no predictors: its rules ({kinds}) look at the values themselves, or leave nothing out.",
        f"Two rows of dots by layer: the sizes of {len(predictors)} predictors in kB, and their recall.",
        ("layer", "width", "bytes", "recall", "precision", "named of all", "bytes saved for a token"),
        rows,
        draw if predictors else None,
        height=3.6,
    )


# Time


def _time(model: SparseMixin) -> Exhibit:
    tiers = model.placement.tiers
    time = token_time(placement_blocks(model, model.cache_tokens), model.placement)
    layers = sorted({id.layer for id in model.plan.blocks})
    ids = {layer: [id for id in time.blocks if id.layer == layer and id in model.plan.blocks] for layer in layers}
    by_tier = [[1e6 * sum(time.blocks[id][t] for id in ids[layer]) for layer in layers] for t in range(len(tiers))]
    whole = {layer: 1e6 * sum(max(time.blocks[id]) for id in ids[layer]) for layer in layers}

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        width = 0.8 / len(tiers)
        for t, (color, tier) in enumerate(zip(tier_colors(tiers), tiers, strict=True)):
            at = [layer + (t - (len(tiers) - 1) / 2) * width for layer in layers]
            axes.bar(at, by_tier[t], width, color=color, label=f"on {tier.name}")
        if len(tiers) > 1:
            axes.step(layers, list(whole.values()), where="mid", color=LIGHT["text"], lw=1.2, label="the layer")
        axes.set(xlabel="layer", ylabel="µs for a token")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(y=0.3)
        axes.legend(loc="upper right", ncols=min(3, len(tiers) + 1))

    rows = [
        (
            f"{id.layer}, {'MLP' if id.kind == 'mlp' else id.kind}",
            *(f"{1e6 * seconds:.1f}" for seconds in of),
            f"{1e6 * max(of):.1f}",
        )
        for id, of in time.blocks.items()
    ]
    rest = sum(max(of) for id, of in time.blocks.items() if id not in model.plan.blocks)
    return Exhibit(
        "predicted_time",
        "Predicted time of a token",
        f"By the cost model, for this placement and what this machine's tiers were measured or said to do: "
        f"{1e3 * time.seconds:.2f} ms for a token that is decoded, {1 / time.seconds:.1f} tokens/s. Of that the layers "
        f"take {1e-3 * sum(whole.values()):.2f} ms, embeddings and head {1e3 * rest:.2f} ms, moves of hidden states "
        f"between tiers {1e3 * time.moves:.2f} ms. The tiers of a block run side by side: the slowest counts.",
        f"Bars by layer: the predicted microseconds on {', '.join(tier.name for tier in tiers)}; the slowest layer "
        f"takes {max(whole.values()):.1f} µs, the fastest {min(whole.values()):.1f} µs.",
        ("block", *(f"µs on {tier.name}" for tier in tiers), "µs, the block"),
        tuple(rows),
        draw,
    )
