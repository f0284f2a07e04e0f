"""The sections of the report on a plan's inputs and on its solver record: status, bound and gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.planner.analysis.optional_features import (
    adapter_summary,
    best_samples,
    call_latencies,
    engine_choice,
    host_rewards,
)
from meshwright.planner.analysis.wave_size import sampled_waves
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.rendering import render
from meshwright.profiles.hardware import Cluster, Link, MixedCluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

_PROOFS = {
    "optimal": "The search ended: no plan in the space is faster than the bound.",
    "within the gap": "The search ended at the requested gap: a faster plan may exist, but none faster than the bound.",
    "feasible": "The search was stopped early: a faster plan may exist, but none faster than the bound.",
    "pinned": "The placements were fixed and nothing was searched, so no bound is known.",
}


def proof(plan: Plan) -> Markup:
    """Return the section with the solver's record, the staleness and the pins."""
    solver = plan.solver
    is_within_gap = solver.status == "feasible" and solver.has_requested_gap
    rows = [
        ("status", solver.status),
        ("objective", f"{solver.objective_seconds:.6g} s"),
        ("bound", f"{solver.bound_seconds:.6g} s"),
        ("gap", f"{solver.gap:.4%}"),
        ("solver", f"{solver.name} {solver.version}, seed {solver.seed}, {_number(solver.num_workers, 'worker')}"),
        ("limit", f"{solver.max_deterministic_time:g} deterministic seconds"),
        ("pinned", "; ".join(plan.pins) or "nothing"),
        ("staleness", _staleness(plan)),
        ("works ahead", _steps_ahead(plan)),
    ]
    return render("proof.html", meaning=_PROOFS["within the gap" if is_within_gap else solver.status], rows=rows)


def _number(count: int, one: str, several: str = "") -> str:
    """A count with its noun; `several` is the plural of a noun that does not take an s."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def facts(plan: Plan) -> Markup:
    """Return the section with models, cluster, workload, and the digests of all inputs."""
    return render(
        "facts.html",
        models=_models(plan),
        cluster=_cluster(plan),
        workload=_workload(plan),
        optional_features=_optional_features(plan),
        digests=sorted(plan.digests.items()),
        devices=[part.device for part in plan.facts.cluster.parts],
    )


def _models(plan: Plan) -> Iterator[tuple[str, ...]]:
    for role, spec in plan.facts.models.by_name.items():
        yield (
            role,
            spec.name,
            formatting.parameters(spec.num_params),
            *(str(n) for n in (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.vocab_size)),
        )


def _cluster(plan: Plan) -> Iterable[tuple[str, str]]:
    cluster = plan.facts.cluster
    for part in cluster.parts:
        yield from _cluster_part(part)
    if isinstance(cluster, MixedCluster):
        yield "between the parts", _link(cluster.between)


def _link(link: Link) -> str:
    return f"{formatting.count(link.bytes_per_second)}B/s, latency {formatting.seconds(link.seconds)}"


def _cluster_part(cluster: Cluster) -> Iterable[tuple[str, str]]:
    device = cluster.device
    links = (("in a node", cluster.intra_node), ("between nodes", cluster.inter_node), ("to the host", cluster.host))
    return (
        ("ranks", f"{_number(cluster.nodes, 'node')} of {cluster.ranks_per_node} {device.name}: {cluster.num_ranks}"),
        ("memory", f"{formatting.size(device.memory_bytes)}, {formatting.size(device.usable_bytes)} usable"),
        ("peak", ", ".join(f"{n} {formatting.count(v)}FLOP/s" for n, v in sorted(device.flops_per_second.items()))),
        *((name, _link(link)) for name, link in links),
    )


def _workload(plan: Plan) -> Iterable[tuple[str, str]]:
    workload = plan.facts.workload
    return (
        ("batch", _batch(workload)),
        (
            "updates",
            f"{_number(workload.num_minibatches, 'minibatch', 'minibatches')}, {_number(workload.num_epochs, 'epoch')}",
        ),
        ("prompts", f"{_lengths(workload.prompt)}, mean {workload.prompt_lengths.mean:.1f}"),
        ("responses", _responses(workload)),
        ("precision", plan.facts.precision),
        ("engine", plan.facts.engine),
        *((("generation weights", plan.facts.generation_weights),) if plan.facts.generation_weights else ()),
    )


@dataclass(frozen=True)
class _OptionalFeature:
    """An optional feature of a plan, with the sentences on it."""

    heading: str
    sentences: tuple[str, ...]


def _optional_features(plan: Plan) -> Iterator[_OptionalFeature]:
    summaries = {
        "Adapter": adapter_summary(plan),
        "Adapter of the critic": adapter_summary(plan, Role.CRITIC),
        "Rewards on hosts": host_rewards(plan),
        "Latencies of calls": call_latencies(plan.facts),
        "Engines": engine_choice(plan),
        "Best of several samples": best_samples(plan),
        "Dynamic sampling": sampled_waves(plan),
    }
    for heading, summary in summaries.items():
        if summary:
            yield _OptionalFeature(heading, tuple(summary.sentences))


def _responses(workload: Workload) -> str:
    described = f"{_lengths(workload.response)}, mean {workload.response.resolve().mean:.1f}"
    if not workload.turns:
        return described
    turns, mean_tokens = _lengths(workload.turns.number), workload.response_lengths.mean
    return f"in each of {turns} turns {described}; {mean_tokens:.1f} with answers"


def _batch(workload: Workload) -> str:
    if workload.group_size == 1:
        return f"{workload.batch_size} prompts a step"
    return f"{workload.num_prompts} prompts a step, {workload.group_size} sequences of each"


def _lengths(spec: LengthSpec) -> str:
    if spec.fixed is not None:
        return f"{spec.fixed} tokens each"
    if spec.histogram is not None:
        return f"a histogram of {len(spec.histogram)} lengths up to {spec.max} tokens"
    return f"log-normal with median {spec.median:g} and p99 {spec.p99:g}, at most {spec.max} tokens"


def _staleness(plan: Plan) -> str:
    max_staleness = plan.facts.staleness
    if not plan.staleness:
        return f"0 of at most {max_staleness}: synchronous"
    return f"{plan.staleness} of at most {max_staleness} actor updates between sampling a token and training on it"


def _steps_ahead(plan: Plan) -> str:
    return ", ".join(f"{p.stage} by {p.steps_ahead}" for p in plan.placements if p.steps_ahead) or "no stage"
