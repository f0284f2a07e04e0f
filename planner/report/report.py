"""The report of a plan as one HTML file. It draws what `Contents` has, and computes no costs."""

from __future__ import annotations

from meshwright.planner.analysis.whatif import outlook
from meshwright.planner.job.custom_graph import OwnGraph
from meshwright.planner.plan.evaluate import fullest_rank
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.contents import Contents
from meshwright.planner.report.html import Html, badge, page, tag
from meshwright.planner.report.inputs_section import facts, proof
from meshwright.planner.report.predicted_and_observed import predicted_and_observed
from meshwright.planner.report.resource_sections import idle, memory, terms
from meshwright.planner.report.timelines import overview, period_timeline, timelines
from meshwright.planner.report.training_curves import training_section
from meshwright.planner.report.whatif_pages import sizes

_SECTIONS = (
    ("glance", "The plan at a glance"),
    ("turn", "The period"),
    ("timelines", "Timelines"),
    ("memory", "Memory"),
    ("idle", "Idle time"),
    ("terms", "Costs"),
    ("compared", "Predicted and observed"),
    ("learning", "Training"),
    ("sizes", "Other numbers of GPUs"),
    ("proof", "Proof"),
    ("facts", "Facts"),
)


def report(contents: Contents) -> str:
    """Return the text of the HTML file."""
    plan = contents.plan
    return page(
        _title(plan),
        _head(contents),
        overview(plan),
        period_timeline(plan),
        timelines(contents),
        memory(plan),
        idle(contents.simulation, plan.graph),
        terms(plan),
        predicted_and_observed(contents),
        training_section(contents.learned),
        sizes(contents.sizes),
        proof(plan),
        facts(plan),
    )


def _title(plan: Plan) -> str:
    algorithm = plan.facts.algorithm
    prefix = f"A plan of {algorithm}" if isinstance(algorithm, OwnGraph) else f"A {algorithm.upper()} plan"
    return f"{prefix} for {plan.facts.cluster.name}".replace(" x ", " × ")


def _head(contents: Contents) -> Html:
    models = contents.plan.facts.models
    roles = ", ".join(f"{role} {formatting.parameters(spec.num_params)}" for role, spec in models.by_name.items())
    links = (tag("a", heading, href=f"#{name}") for name, heading in _SECTIONS)
    return tag(
        "header",
        tag("h1", _title(contents.plan)),
        tag("p", f"{roles} parameters", class_="lead"),
        tag("div", *_cards(contents), class_="cards"),
        tag("nav", *links),
    )


def _cards(contents: Contents) -> list[Html]:
    plan, simulation = contents.plan, contents.simulation
    plan_outlook = outlook(plan)
    fullest = fullest_rank(plan.facts.cluster, plan.peak_bytes_per_rank)
    peak, usable = plan.peak_bytes_per_rank[fullest], plan.facts.cluster.usable_bytes(fullest)
    staleness = "synchronous" if not plan.staleness else f"at most {plan.facts.staleness} allowed"
    return [
        _card(formatting.seconds(plan.period_seconds), "a step, predicted"),
        _card(
            formatting.seconds(simulation.steps.mean), badge("SIMULATED"), f"a step, {simulation.durations} durations"
        ),
        _card(formatting.count(plan_outlook.tokens_per_second), "response tokens/s, predicted"),
        _card(formatting.percent(plan_outlook.idle_share), "of the ranks' time idle, predicted"),
        _card(formatting.size(peak), f"on the fullest rank, of {formatting.size(usable)}"),
        _card(formatting.percent(plan.solver.gap), f"gap, {plan.solver.status}"),
        _card(str(plan.staleness), f"staleness, {staleness}"),
    ]


def _card(figure: str, *what: str) -> Html:
    return tag("div", tag("b", figure), tag("span", *what), class_="card")
