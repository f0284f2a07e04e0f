"""One page for a job that was planned on several numbers of devices: step time and money against their number."""

from __future__ import annotations

from meshwright.planner.analysis.whatif import WhatIf
from meshwright.planner.report.html import tag
from meshwright.planner.report.page import page
from meshwright.planner.report.sizes_chart import sizes


def fit_page(found: WhatIf, least_ranks: int) -> str:
    """The page: the least number, the plot and the table."""
    title = "How many devices"
    said = f"Predicted: a plan fits on {least_ranks} devices, and on no fewer that were looked at."
    return page(title, tag("header", tag("h1", title), tag("p", said, class_="lead")), sizes(found))
