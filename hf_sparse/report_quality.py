"""What leaving out costs and saves: the exhibits of quality."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .report_exhibit import LIGHT, Exhibit, asked, number, share

if TYPE_CHECKING:
    from .model import SparseMixin


def quality(model: SparseMixin) -> Exhibit:
    report = model.plan.calibration_report
    found = report.get("read_shares")
    read = {id: number(found, str(id)) for id in sorted(model.plan.blocks)} if isinstance(found, dict) else {}
    unread = {id: 1 - value for id, value in read.items() if value is not None}
    total = number(report, "bytes_read_share")
    dense, sparse = number(report, "dense_perplexity"), number(report, "sparse_perplexity")

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        axes = figure.subplots()
        for side, (kind, label, color) in enumerate(
            (("attention", "attention", LIGHT["fourth"]), ("mlp", "MLP", LIGHT["third"]))
        ):
            of = {id.layer: value for id, value in unread.items() if id.kind == kind}
            axes.bar([layer + 0.4 * side - 0.2 for layer in of], list(of.values()), 0.4, color=color, label=label)
        if total is not None:
            axes.axhline(1 - total, color=LIGHT["text"], lw=1, ls="--", label="all blocks")
        axes.set(xlabel="layer", ylabel="weights left unread")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_ylim(0, max(0.1, 1.25 * max(unread.values())))
        axes.legend(loc="upper right", ncols=3)

    rows = [("all", share(None if total is None else 1 - total), "–", "–")]
    for id in sorted(model.plan.blocks):
        rule = model.plan.rules.get(id)
        kind, places = ("none", "") if rule is None else (rule.kind, ", ".join(sorted(rule.below)))
        block = f"{id.layer}, {'MLP' if id.kind == 'mlp' else id.kind}"
        rows.append((block, share(unread.get(id)), kind, places or "–"))
    parts = [f"Asked: {asked(report)}."]
    if dense and sparse:
        parts.append(f"Got: perplexity {sparse:.4f} instead of {dense:.4f} ({sparse / dense - 1:+.2%})")
        parts[-1] += "." if total is None else f", with {1 - total:.1%} of the blocks' weights left unread."
    parts.append("How much each place of a block saves is not kept: the table says where its rule looks.")
    worst = f" from {min(unread.values()):.1%} to {max(unread.values()):.1%}" if unread else ""
    return Exhibit(
        "quality",
        "Quality and what is left unread",
        " ".join(parts),
        f"Bars by layer, one for attention and one for the MLP: the share of their weights that a token leaves "
        f"unread,{worst}.",
        ("block", "weights left unread", "rule", "places"),
        tuple(rows),
        draw if unread else None,
    )


def curve(model: SparseMixin) -> Exhibit:
    """Quality against sparsity, at the levels that calibration tried."""
    report = model.plan.calibration_report
    found = report.get("curve")
    points = sorted(
        (float(point[0]), float(point[1]))
        for point in (found if isinstance(found, list) else ())
        if isinstance(point, list) and len(point) == 2 and all(_is_figure(value) for value in point)
    )
    dense, total = number(report, "dense_perplexity"), number(report, "bytes_read_share")
    sparse = number(report, "sparse_perplexity")
    if not dense or not points:
        reason = "no thresholds were searched" if found == [] else "this plan was made before calibration kept them"
        return Exhibit(
            "curve",
            "Quality against sparsity",
            f"There are no points to draw a curve through: {reason}. hf-sparse eval measures the plan on any text.",
            "",
            ("weights left unread", "perplexity", "increase"),
            (),
            None,
        )

    def draw(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        steps = [(0.0, dense), *points]
        axes.plot([x for x, _ in steps], [y / dense - 1 for _, y in steps], marker="o", ms=4, color=LIGHT["last"])
        if total is not None and sparse is not None:
            axes.plot([1 - total], [sparse / dense - 1], marker="D", ms=8, ls="", color=LIGHT["first"], label="chosen")
            axes.legend(loc="upper left")
        axes.set(xlabel="weights of the blocks left unread", ylabel="increase of perplexity")
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))

    return Exhibit(
        "curve",
        "Quality against sparsity",
        f"The levels that calibration tried on its way, on {report.get('held_out_tokens', 'the')} held-out tokens. "
        "Layers that have exact zeros keep their rule at each of them.",
        f"A rising curve through {len(points)} points: the increase of perplexity against the share of the blocks' "
        f"weights left unread, up to {points[-1][1] / dense - 1:+.1%} at {points[-1][0]:.0%}.",
        ("weights left unread", "perplexity", "increase"),
        tuple((share(x), f"{y:.4f}", f"{y / dense - 1:+.2%}") for x, y in points),
        draw,
    )


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15
