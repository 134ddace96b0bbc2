"""Pictures of layouts, values and results; computes nothing."""

from __future__ import annotations

from sightlens.render.attention import draw_attention
from sightlens.render.browse import browse_values
from sightlens.render.charts import plot_bars, plot_curves
from sightlens.render.figure import Figure, Markup, Plot
from sightlens.render.heat import heat_map
from sightlens.render.layout_picture import draw_layout
from sightlens.render.report import Report, Section
from sightlens.render.strip import token_strip
from sightlens.render.style import Labels, Scale
from sightlens.render.values_picture import draw_values

__all__ = [
    "Figure",
    "Labels",
    "Markup",
    "Plot",
    "Report",
    "Scale",
    "Section",
    "browse_values",
    "draw_attention",
    "draw_layout",
    "draw_values",
    "heat_map",
    "plot_bars",
    "plot_curves",
    "token_strip",
]
