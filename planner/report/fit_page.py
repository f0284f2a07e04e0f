"""The page of a job that was planned on several numbers of devices: step time and cost against their number."""

from __future__ import annotations

from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.report.html import tag
from meshwright.planner.report.page import page
from meshwright.planner.report.sizes_chart import sizes


def fit_page(what_if: WhatIf, least_ranks: int) -> str:
    """Return the HTML page: the smallest number of devices, the plot and the table."""
    title = "How many devices"
    summary = f"Predicted: a plan fits on {least_ranks} devices, and on none of the smaller numbers that were tried."
    return page(title, tag("header", tag("h1", title), tag("p", summary, class_="lead")), sizes(what_if))
