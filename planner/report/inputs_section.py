"""The sections of the report on a plan's inputs and on its solver record: status, bound and gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.planner.analysis.optional_features import (
    adapter_summary,
    best_samples,
    host_rewards,
    measured_latencies,
)
from meshwright.planner.analysis.wave_size import sampled_waves
from meshwright.planner.plan.plan import Plan
from meshwright.planner.report import formatting
from meshwright.planner.report.html import Html, note, section, table, tag
from meshwright.profiles.hardware import Cluster, Link, MixedCluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload

_PROOFS = {
    "optimal": "The search ended: no plan in the space is faster than the bound.",
    "feasible": "The search was stopped early: a faster plan may exist, but none faster than the bound.",
    "pinned": "The placements were fixed and nothing was searched, so no bound is known.",
}


def proof(plan: Plan) -> Html:
    """Return the section with the solver's record, the staleness and the pins."""
    solver = plan.solver
    rows = [
        ("status", solver.status),
        ("objective", f"{solver.objective_seconds:.6g} s"),
        ("bound", f"{solver.bound_seconds:.6g} s"),
        ("gap", f"{solver.gap:.4%}"),
        ("solver", f"{solver.name} {solver.version}, seed {solver.seed}, {solver.num_workers} workers"),
        ("limit", f"{solver.max_deterministic_time:g} deterministic seconds"),
        ("pinned", "; ".join(plan.pins) or "nothing"),
        ("staleness", _staleness(plan)),
        ("works ahead", _steps_ahead(plan)),
    ]
    return section("proof", "Proof", note(_PROOFS[solver.status]), table(("", ""), rows))


def facts(plan: Plan) -> Html:
    """Return the section with models, cluster, workload, and the digests of all inputs."""
    plan_facts = plan.facts
    return section(
        "facts",
        "Facts",
        tag("h3", "Models"),
        table(_MODEL_HEADINGS, _models(plan), numbers=range(2, 8)),
        tag("h3", "Cluster"),
        table(("", ""), _cluster(plan)),
        tag("h3", "Workload"),
        table(("", ""), _workload(plan)),
        *_adapter(plan),
        *_rewards(plan),
        *_latencies(plan),
        *_waves(plan),
        tag("h3", "Inputs"),
        table(("", "SHA-256"), sorted(plan.digests.items())),
        *(note(f"{part.device.name}: {part.device.source}") for part in plan_facts.cluster.parts),
    )


_MODEL_HEADINGS = ("role", "model", "parameters", "layers", "hidden", "heads", "KV heads", "vocabulary")


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
    return f"{formatting.count(link.bytes_per_second)}B/s, {formatting.seconds(link.seconds)}"


def _cluster_part(cluster: Cluster) -> Iterable[tuple[str, str]]:
    device = cluster.device
    links = (("in a node", cluster.intra_node), ("between nodes", cluster.inter_node), ("to the host", cluster.host))
    return (
        ("ranks", f"{cluster.nodes} nodes of {cluster.ranks_per_node} {device.name}: {cluster.num_ranks}"),
        ("memory", f"{formatting.size(device.memory_bytes)}, {formatting.size(device.usable_bytes)} usable"),
        ("peak", ", ".join(f"{n} {formatting.count(v)}FLOP/s" for n, v in sorted(device.flops_per_second.items()))),
        *((name, _link(link)) for name, link in links),
    )


def _workload(plan: Plan) -> Iterable[tuple[str, str]]:
    workload = plan.facts.workload
    return (
        ("batch", _batch(workload)),
        ("updates", f"{workload.num_minibatches} minibatches, {workload.num_epochs} epochs"),
        ("prompts", f"{_lengths(workload.prompt)}, mean {workload.prompt_lengths.mean:.1f}"),
        ("responses", _responses(workload)),
        ("precision", plan.facts.precision),
        ("engine", plan.facts.engine),
        *((("generation weights", plan.facts.generation_weights),) if plan.facts.generation_weights else ()),
    )


def _adapter(plan: Plan) -> Iterable[Html]:
    """The adapter of the actor, if it has one."""
    adapter = adapter_summary(plan)
    return (tag("h3", "Adapter"), *map(note, adapter.sentences)) if adapter else ()


def _rewards(plan: Plan) -> Iterable[Html]:
    """The rewards on hosts, if there are any."""
    rewards = host_rewards(plan)
    return (tag("h3", "Rewards on hosts"), *map(note, rewards.sentences)) if rewards else ()


def _latencies(plan: Plan) -> Iterable[Html]:
    """The measured latencies of rewards and of the tool, if there are any."""
    latencies = measured_latencies(plan.facts)
    return (tag("h3", "Measured latencies"), *map(note, latencies.sentences)) if latencies else ()


def _waves(plan: Plan) -> Iterable[Html]:
    """The samples of a step with best-of-n or dynamic sampling."""
    if best := best_samples(plan):
        return (tag("h3", "Best of several samples"), *map(note, best.sentences))
    sampling_waves = sampled_waves(plan)
    return (tag("h3", "Dynamic sampling"), *map(note, sampling_waves.sentences)) if sampling_waves else ()


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
