"""The page that `hf-sparse report` writes: all there is to see of a loaded model, in one file that needs no other.

Whatever comes from a plan or a config is text: the template escapes it, and the page allows no script.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from . import __version__
from .report import format_bytes
from .report_exhibit import DARK, LIGHT, Exhibit, asked, number, ramp, share
from .report_plots import exhibits

if TYPE_CHECKING:
    from .model import SparseMixin
    from .placement import Solution

WIDTH = 4.2  # inches: what a phone shows in its own size


def write_report(model: SparseMixin, path: str | os.PathLike[str], *, name: str | None = None) -> None:
    """Writes the page about `model` to `path`, aside first. `name`: what it calls the model, else the plan's base model
    or the folder it came from. The same model, plan and placement give the same bytes.

    Raises NotADirectoryError or IsADirectoryError for a path that cannot be written, ImportError without matplotlib.
    """
    path = check_output(path)
    page = html_report(model, name=name)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def check_output(path: str | os.PathLike[str]) -> Path:
    """`path`. Raises what `write_report` would."""
    _matplotlib()
    path = Path(path)
    if not path.parent.is_dir():
        raise NotADirectoryError(f"path: got {path}, but there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"path: got {path}, a directory, expected the name of a file")
    return path


def html_report(model: SparseMixin, *, name: str | None = None) -> str:
    """The page itself. Raises ImportError without matplotlib."""
    _matplotlib()  # before anything is computed
    found = exhibits(model)
    layers = len({id.layer for id in model.plan.blocks})
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(_PAGE)
        .render(
            name=_name(model) if name is None else name,
            facts=_facts(model),
            placement=_placement(model),
            exhibits=found,
            plots={exhibit.name: Markup(_svg(exhibit, layers)) for exhibit in found if exhibit.draw is not None},
            light=_variables(LIGHT, ramp(layers)),
            dark=_variables(DARK, ramp(layers, "dark")),
            style=Markup(_STYLE),
        )
    )


def plots_of(model: SparseMixin) -> dict[str, str]:
    """The page's plots: name -> SVG, in CSS variables for colours. Raises ImportError without matplotlib."""
    layers = len({id.layer for id in model.plan.blocks})
    return {exhibit.name: _svg(exhibit, layers) for exhibit in exhibits(model) if exhibit.draw is not None}


def figure_bytes(model: SparseMixin) -> dict[str, bytes]:
    """The same plots as PNG, on white: "activation_frequency", "activation_shares", "placement", "predictors",
    "predicted_time", "quality", those that there is something to draw for. Raises ImportError without matplotlib.
    """
    return {exhibit.name: _render(exhibit, "png") for exhibit in exhibits(model) if exhibit.draw is not None}


def figure_texts(model: SparseMixin) -> dict[str, str]:
    """What each of `figure_bytes` shows: a text in place of the picture."""
    return {exhibit.name: exhibit.alt for exhibit in exhibits(model) if exhibit.draw is not None}


# The head


def _name(model: SparseMixin) -> str:
    return model.plan.base_model or Path(model.name_or_path or "").name or f"a {model.plan.model_type} model"


def _facts(model: SparseMixin) -> list[tuple[str, str]]:
    plan, report = model.plan, model.plan.calibration_report
    dense, sparse = number(report, "dense_perplexity"), number(report, "sparse_perplexity")
    read, held_out, tokens = (number(report, name) for name in ("bytes_read_share", "held_out_tokens", "tokens"))
    stored = {k: v for k, v in plan.key.quantization.items() if k not in ("quant_method", "format_version")}
    texts = plan.key.calibration.get("texts")
    achieved = f"{sparse / dense - 1:+.2%} perplexity ({dense:.4f} to {sparse:.4f})" if dense and sparse else "unknown"
    return [
        ("Kind", f"{plan.model_type}, {len({id.layer for id in plan.blocks})} layers"),
        ("Base model", " at ".join(filter(None, (plan.base_model, plan.base_model_revision))) or "none named"),
        ("Weights", ", ".join(f"{k} {v}" for k, v in stored.items()) or "as they came, not quantized"),
        ("Budget asked", asked(report)),
        ("Achieved", f"{achieved} on {'unknown' if held_out is None else f'{held_out:,.0f}'} held-out tokens"),
        ("Read for a token", f"{share(read)} of the weights of the blocks"),
        (
            "Calibrated on",
            f"{'an unknown number of' if tokens is None else f'{tokens:,.0f}'} tokens, "
            + ("written by the model itself" if texts == "default" else "the user's own texts"),
        ),
        ("Placement", _solved(model.solution)),
        ("Plan made by", f"hf_sparse {plan.library_version}"),
        ("Report made by", f"hf_sparse {__version__}"),
        ("Checkpoint", plan.key.checkpoint),
    ]


def _solved(solution: Solution | None) -> str:
    """Without the time that it took, which is another in every run."""
    if solution is None:
        return "given, or changed since it was solved"
    if solution.status == "single tier":
        return "one tier, nothing to solve"
    return (
        f"{solution.status}, by {solution.solver}: at most {solution.gap:.2%} from the best, "
        f"{solution.fast_impact:.0%} of the neurons' load on the fast tiers"
    )


def _placement(model: SparseMixin) -> dict[str, Any]:
    summary = model.placement_summary()
    rows = [
        (
            tier.name,
            f"{tier.mlp_neurons:,} ({share(tier.mlp_neurons / max(1, summary.mlp_neurons), 0)})",
            f"{tier.kv_groups:,} ({share(tier.kv_groups / max(1, summary.kv_groups), 0)})",
            ", ".join(tier.whole) or "–",
            format_bytes(tier.nbytes),
            format_bytes(tier.cache_bytes),
            "none" if tier.budget is None else format_bytes(tier.budget),
        )
        for tier in summary.tiers
    ]
    columns = ("tier", "MLP neurons", "KV groups", "with", "takes", "room for the cache", "budget")
    return {"columns": columns, "rows": rows}


# Pictures


def _matplotlib() -> Any:
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError('report: needs matplotlib: pip install "hf_sparse[plots]"') from error
    return matplotlib


def _render(exhibit: Exhibit, format: str) -> bytes:
    style = _matplotlib().style
    from matplotlib.figure import Figure

    assert exhibit.draw is not None
    own = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["text"]) | {
        "axes.edgecolor": LIGHT["grid"],
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "font.size": 9,
        "grid.color": LIGHT["grid"],
        "grid.alpha": 0.35,
        "grid.linewidth": 0.6,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": exhibit.name,
        "text.parse_math": False,
    }
    none = dict.fromkeys(("Date", "Creator", "Format", "Type") if format == "svg" else ("Software",))
    out = io.BytesIO()
    with style.context(["default", own]):
        figure = Figure(figsize=(WIDTH, exhibit.height), layout="constrained")
        exhibit.draw(figure)
        figure.savefig(out, format=format, metadata=none, transparent=format == "svg", dpi=200)
    return out.getvalue()


def _svg(exhibit: Exhibit, layers: int) -> str:
    """An element for an HTML page: its ids are its own, its colours the page's, its size that of its place."""
    text = _render(exhibit, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    label = Markup.escape(exhibit.alt)
    text = f'<svg {view[0]} role="img" aria-label="{label}">' + text[text.index(">") + 1 :]
    text = text.replace("xlink:href=", "href=").replace('id="', f'id="{exhibit.name}-')
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{exhibit.name}-", text)
    names = {color: f"var(--{name})" for name, color in _colors(LIGHT, ramp(layers)).items()}
    text = re.sub("#[0-9a-f]{6}", lambda found: names.get(found[0], found[0]), text)
    return re.sub(r"font: ([^;\"]*px) [^;\"]*", r"font: \1 var(--font)", text)


def _colors(named: dict[str, str], ramp: list[str]) -> dict[str, str]:
    return named | {f"layer{i}": color for i, color in enumerate(ramp)}


def _variables(named: dict[str, str], ramp: list[str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in _colors(named, ramp).items())


_STYLE = """
body { margin: 0 auto; max-width: 46rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 var(--font); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; max-width: 36rem; height: auto; margin: 0 auto; }
[id$="-cells"] { shape-rendering: crispEdges; } /* no seams between them */
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; }
th:first-child, .facts td { text-align: left; }
.facts { width: 100%; overflow-wrap: anywhere; }
.facts th, .scroll th, .scroll td { white-space: nowrap; }
@media (max-width: 30rem) {
  .facts th, .facts td { display: block; padding: .25rem 0 0; border: 0; }
  .facts td { padding: 0 0 .35rem; border-bottom: 1px solid var(--line); }
}
summary { cursor: pointer; padding: .4rem 0; }
:focus-visible { outline: 2px solid var(--last); outline-offset: 2px; }
"""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ name }}: hf_sparse report</title>
<style>
:root { color-scheme: light dark; --font: system-ui, sans-serif; --page: #ffffff; --line: #d5d8dd; {{ light }} }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --line: #3a3e45; {{ dark }} } }
{{ style }}
</style>
</head>
<body>
{% macro table(columns, rows, label) %}
<div class="scroll" role="region" tabindex="0" aria-label="{{ label }}">
<table>
<thead><tr>{% for column in columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% endmacro %}
<header>
<h1>{{ name }}</h1>
<p>What hf_sparse knows of this model: which neurons matter, where they lie, what leaving out the others costs.</p>
</header>
<main>
<section>
<h2>The plan</h2>
<table class="facts">
<tbody>
{% for label, value in facts %}
<tr><th scope="row">{{ label }}</th><td>{{ value }}</td></tr>
{% endfor %}
</tbody>
</table>
</section>
<section>
<h2>The tiers</h2>
{{ table(placement.columns, placement.rows, "The tiers") }}
</section>
{% for exhibit in exhibits %}
<section id="{{ exhibit.name }}">
<h2>{{ exhibit.title }}</h2>
<p>{{ exhibit.text }}</p>
{% if exhibit.name in plots %}
<figure>
{{ plots[exhibit.name] }}
</figure>
{% endif %}
{% if exhibit.rows %}
<details>
<summary>The figures</summary>
{{ table(exhibit.columns, exhibit.rows, exhibit.title) }}
</details>
{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>
"""
