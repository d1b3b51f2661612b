"""What a report shows: an exhibit, the colours of its plot, and how figures are read and written.

Plots are drawn in the colours of `LIGHT`; `html_report` has them follow a dark page by exchanging each for its `DARK`
counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# After Okabe and Ito, so that colour-blind eyes tell them apart; all but the grid have a contrast of 4.5 or more.
LIGHT = {
    "text": "#1b1d21",
    "grid": "#8a8f98",
    "last": "#0067a8",
    "first": "#c44e00",
    "third": "#00805b",
    "fourth": "#a3467f",
    "fifth": "#6b6100",
    "sixth": "#555fc0",
}
DARK = {
    "text": "#e6e8eb",
    "grid": "#7d838d",
    "last": "#62b6f0",
    "first": "#ff9f5a",
    "third": "#3fd0a0",
    "fourth": "#e79ac5",
    "fifth": "#d8c840",
    "sixth": "#a9b0ff",
}
_RAMP = {"light": (0.0, 0.63), "dark": (0.42, 0.97)}  # of matplotlib's plasma: contrasts of 3 or more


@dataclass(frozen=True)
class Exhibit:
    """`text`: what is seen, in sentences. `alt`: the plot for who cannot see it. `columns`, `rows`: the figures, the
    first of a row names it. `draw(figure)` draws on an empty matplotlib Figure, `height` inches high; None where there
    is nothing to draw, and `text` says why.
    """

    name: str
    title: str
    text: str
    alt: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    draw: Callable[[Any], None] | None
    height: float = 2.8


def ramp(layers: int, scheme: str = "light") -> list[str]:
    """A colour for each layer, by depth, that stands out from a page that is "light" or "dark"."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    low, high = _RAMP[scheme]
    return [to_hex(colormaps["plasma"](low + (high - low) * i / max(1, layers - 1))) for i in range(layers)]


def number(fields: dict[str, Any], name: str) -> float | None:
    """A field of a calibration report, which may hold anything."""
    value = fields.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15:
        return float(value)
    return None


def share(value: float | Tensor | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{float(value):.{digits}%}"


def asked(report: dict[str, Any]) -> str:
    """What calibration was to keep to."""
    target, increase = number(report, "target_sparsity"), number(report, "max_perplexity_increase")
    if target is not None:
        return f"{target:.0%} of the blocks' weights left unread, whatever that costs"
    return "unknown" if increase is None else f"at most {100 * increase:+g}% perplexity"
