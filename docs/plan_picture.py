"""Draws the plan of a job like the overview of the report, as one SVG file. This command makes docs/plan.svg:

python docs/plan_picture.py examples/70b-64xh100/job.yaml --staleness 2 -o docs/plan.svg
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.rendering import ENVIRONMENT
from meshwright.planner.report.timelines import overview
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.errors import Infeasible
from meshwright.profiles.stages import StageGraph

_MARGIN, _WIDTH, _EDGE, _LEGEND = 150, 900, 12, 24
"""Pixels: width of the nodes' names, width of the plot, margin around both, height of the legend."""

_PLACE = re.compile(r"top:([\d.]+)px;height:([\d.]+)px")
_PICTURE = ENVIRONMENT.from_string(
    """\
<svg width="{{ width }}" height="{{ height }}" viewBox="0 0 {{ width }} {{ height }}"
  xmlns="http://www.w3.org/2000/svg">
<style>
{% include "style.css" %}
svg { font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
svg text.roomy { display: inline; }
svg text.node { fill: var(--soft); font-size: 12.5px; text-anchor: end; dominant-baseline: middle; }
svg text.colour { fill: var(--soft); font-size: 12.5px; }
svg rect.paper { fill: var(--paper); }
</style>
<rect class="paper" width="100%" height="100%"/>
{% for node in nodes %}
<text x="{{ node.x }}" y="{{ node.y }}" class="node">{{ node.text }}</text>
{% endfor %}
{{ plot }}
{% for entry in legend %}
<g class="{{ entry.colour }}">
<rect x="{{ entry.x }}" y="{{ entry.y - 10 }}" width="12" height="12" class="solid"/>
<text x="{{ entry.x + 17 }}" y="{{ entry.y }}" class="colour">{{ entry.text }}</text>
</g>
{% endfor %}
</svg>
"""
)
"""The report's plot and style sheet, with what the page has beside them: names of nodes, and a legend."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="the job, planned with analytic costs")
    parser.add_argument("--staleness", type=int, default=0, help="the bound, in place of the job's")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    plan = plan_of(arguments.job, arguments.staleness)
    arguments.output.write_text(picture_of(plan), encoding="utf-8")


def plan_of(path: Path, staleness: int) -> Plan:
    """The plan of a job under a bound on staleness, to a gap of 1 %. Raises Infeasible when there is none."""
    facts = resolve(read_job(path), path.parent).model_copy(update={"staleness": staleness})
    model = cost_model_of(facts)
    found = compile_plan(facts, model, limits=Limits(gap=0.01))
    if isinstance(found, NoPlan):
        raise Infeasible(f"{path} has no plan; draw another job.")
    return found


def picture_of(plan: Plan) -> str:
    """The text of an SVG file: the report's plot, with the names of its nodes and a legend of its colours."""
    drawn = ElementTree.fromstring(overview(plan)).find(".//div[@class='picture']")
    assert drawn is not None
    names, plot = drawn
    height = float(plot.attrib["height"])
    plot.set("x", str(_EDGE + _MARGIN))
    plot.set("y", str(_EDGE))
    plot.set("width", str(_WIDTH))
    return _PICTURE.render(
        width=2 * _EDGE + _MARGIN + _WIDTH,
        height=height + _LEGEND + 2 * _EDGE,
        nodes=[_node(span) for span in names],
        plot=Markup(ElementTree.tostring(plot, encoding="unicode")),
        legend=_legend(_EDGE + height + _LEGEND - 4, plan.graph),
    )


@dataclass(frozen=True)
class _Text:
    """A text at its position in pixels, in a colour of the report if it explains one."""

    x: float
    y: float
    text: str
    colour: str = ""


def _node(span: ElementTree.Element) -> _Text:
    place = _PLACE.match(span.attrib["style"])
    assert place is not None
    top, height = map(float, place.groups())
    return _Text(_EDGE + _MARGIN - 10, _EDGE + top + height / 2, span.text or "")


def _legend(baseline: float, graph: StageGraph) -> list[_Text]:
    """The meaning of each colour, from left to right."""
    names = (*graph.names, "refit")
    each = (_MARGIN + _WIDTH) / len(names)
    return [
        _Text(_EDGE + each * place, baseline, name, formatting.colour(name, graph)) for place, name in enumerate(names)
    ]


if __name__ == "__main__":
    main()
