"""The legal layouts of a stage on a pool, and the legal schedules of a layout.

Each rule function yields one sentence for each violation, with the value, the rule and the nearest legal value. The
search enumerates choices by these rules and the verifier checks plans by them; neither uses the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.planner.job.job import Facts
from meshwright.planner.plan.engine_rules import (
    engine_layout_rules,
    engine_schedule_rules,
    generates_with_vllm,
    keeps_sequences_in_flight,
)
from meshwright.planner.plan.micro_batch_rules import (
    NO_EXTRA_CHOICES,
    ExtraChoices,
    MicroBatchOptions,
    offered_micro_batches,
    row_rules,
    token_rules,
)
from meshwright.planner.plan.pool_rules import mixed_pool_rules, row_split_rules
from meshwright.planner.plan.steps_ahead import SearchCase, max_deferral, synchronous_case
from meshwright.profiles.choice_table import ScheduleTable
from meshwright.profiles.errors import nearest
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, divisors, has_equal_stages, layout_violations, nearest_divisor
from meshwright.profiles.model_parts.fp8_weights import fp8_shape_violations
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload, Recompute, Schedule, WhileWaiting
from meshwright.profiles.stages import Stage, StageGraph

CHUNKS = (128, 256, 512)
"""Chunk sizes, in tokens, in which a stage may read responses while they are generated (OPPO, arXiv:2509.25762)."""

MIN_CONTEXT_TOKENS = 2048
"""The fewest tokens of the longest sequence that context parallelism may leave to a rank."""


def rows_per_update(facts: Facts, stage: Stage) -> int:
    """The number of sequences that all replicas together process at once: a minibatch when training, else the batch, or
    a wave of prompts for a stage that processes all samples."""
    workload = facts.workload.wave if processes_all_samples(stage) else facts.workload
    return workload.batch_size // workload.num_minibatches if stage.trains else workload.batch_size


def rows_per_replica(facts: Facts, stage: Stage, layout: Layout) -> int:
    """The number of sequences that the fullest replica processes at once; others may have one fewer."""
    return -(-rows_per_update(facts, stage) // layout.dp)


def has_even_rows(facts: Facts, stage: Stage, layout: Layout) -> bool:
    """True if all replicas process the same number of sequences."""
    return rows_per_update(facts, stage) % layout.dp == 0


def workload_violations(facts: Facts) -> tuple[str, ...]:
    """Rules that the workload itself breaks, whatever the plan."""
    batch_size, num_minibatches = facts.workload.batch_size, facts.workload.num_minibatches
    if batch_size % num_minibatches:
        legal = nearest_divisor(num_minibatches, batch_size)
        return (f"num_minibatches={num_minibatches} does not divide batch_size={batch_size}; use {legal}.",)
    return ()


def max_context_parallel(facts: Facts, stage: Stage) -> int:
    """The largest cp that a stage may have.

    Generation samples one token after the other, so it has no sequence to shard. Elsewhere a rank's shard of the
    longest sequence has at least `MIN_CONTEXT_TOKENS` tokens: with fewer, the gathering of keys and values and the
    smaller kernels cost more than is saved, and such short sequences fit in memory without it.
    """
    spec = facts.models.spec(stage.role)
    if stage.generates or stage.judges or spec.experts or spec.linear:
        return 1
    return max(1, facts.workload.max_tokens // MIN_CONTEXT_TOKENS)


def offered_layouts(
    facts: Facts, stage: Stage, layout: Layout, extra_choices: ExtraChoices = NO_EXTRA_CHOICES
) -> Iterator[Layout]:
    """The layouts that are offered for a layout without expert degrees, one for each offered ep and etp.

    Pipelines with uneven layers are offered only if their number of stages is a power of two; the others are many and
    hardly better (docs/plan_space.md has the figures).
    """
    spec = facts.models.spec(stage.role)
    if extra_choices.all_layouts or layout.pp.bit_count() == 1 or has_equal_stages(spec, layout.pp):
        yield from _with_experts(spec, layout, facts.cluster.ranks_per_node, extra_choices)


def _with_experts(spec: ModelSpec, layout: Layout, per_node: int, extra_choices: ExtraChoices) -> Iterator[Layout]:
    """The layout with each offered degree of expert parallelism, with sharded (etp = tp) or whole (etp = 1) experts.

    With the same number of replicas, whole experts take as much memory as sharded ones, have wider matrix products in
    fewer kernels, and need no exchange of tokens that other tensor-parallel ranks hold too; but their load is less
    balanced, because it is spread over more ranks. For fine-grained experts (less than half as wide as the hidden
    state) the exchange outweighs the balance if all ranks are in one node or if tensor-parallel ranks hold the same
    tokens (no sp); sharded experts are then offered only with `extra_choices.all_layouts`. Other whole experts on more
    replicas than a node has ranks are likewise offered only with it (docs/plan_space.md has the figures).
    """
    tp, experts = layout.tp, spec.experts
    if experts is None:
        yield layout
        return
    is_fine_grained = 2 * experts.ffn_size < spec.hidden_size
    for ep in divisors(layout.dp):
        whole = tp * ep
        has_whole = tp > 1 and experts.num_experts % whole == 0
        is_better = has_whole and is_fine_grained and (not layout.sp or whole <= per_node)
        if extra_choices.all_layouts or not is_better:
            yield replace(layout, ep=ep)
        if has_whole and (extra_choices.all_layouts or is_better or ep <= per_node):
            yield replace(layout, ep=whole, etp=1)


def layout_rules(facts: Facts, stage: Stage, layout: Layout, part: int = 0) -> tuple[str, ...]:
    """Rules that the layout of a stage breaks on a part of the cluster: the nodes of one kind (see `parts_of`)."""
    sentences = [
        *(workload_violations(facts) if stage.trains else ()),
        *layout_violations(layout, facts.models.spec(stage.role)),
    ]
    per_node = facts.cluster.ranks_per_node
    if per_node % layout.tp:
        legal = nearest_divisor(layout.tp, per_node)
        sentences.append(f"tp={layout.tp} does not divide the {per_node} ranks of a node; use tp={legal}.")
    sentences += _batch_split_rules(facts, stage, layout)
    if stage.trains and facts.models.spec(stage.role).experts and layout.tp > 1 and not layout.sp:
        verb = "shards" if layout.fold_size == 1 else "distributes"
        sentences.append(
            f"tp={layout.tp} {verb} experts, which are trained with sequence parallelism only; turn sp on."
        )
    if (stage.generates or stage.judges) and layout.sp:
        sentences.append("sp is on, and a single new token cannot be divided along the sequence; turn sp off.")
    if stage.generates:
        sentences += engine_layout_rules(facts, layout)
    if stage.is_quantised and facts.cluster.kind != "cpu" and not sentences:
        sentences += fp8_shape_violations(facts.models.spec(stage.role), layout.tp)
    max_cp = max_context_parallel(facts, stage)
    if stage.judges and layout.pp > 1:
        sentences.append(f"pp={layout.pp} on a stage that generates verdicts, whose micro-batches decode alone; use 1.")
    if layout.cp > max_cp and (stage.generates or stage.judges):
        sentences.append(f"cp={layout.cp} shards sequences, and generation samples one token at a time; use cp=1.")
    elif layout.cp > max_cp and not (facts.models.spec(stage.role).experts or facts.models.spec(stage.role).linear):
        tokens = facts.workload.max_tokens
        sentences.append(
            f"cp={layout.cp} leaves {tokens // layout.cp} of the {tokens} tokens of the longest sequence to a rank, "
            f"fewer than {MIN_CONTEXT_TOKENS}; use cp={max_cp} at most."
        )
    return (*sentences, *mixed_pool_rules(facts, stage, layout, part))


def _batch_split_rules(facts: Facts, stage: Stage, layout: Layout) -> Iterator[str]:
    """Rules about the number of sequences of each replica."""
    rows, dp, vpp = rows_per_update(facts, stage), layout.dp, layout.vpp
    what = "minibatch" if stage.trains else "batch"
    if dp > rows:
        yield f"dp={dp} is more than the {rows} sequences of a {what}; use dp={rows} at most."
    uneven = f"equally many sequences on every replica, and dp={dp} does not divide the {rows} of a {what}"
    if vpp > 1 and not stage.trains:
        yield f"vpp={vpp} is only for a stage that trains; use vpp=1."
    elif vpp > 1 and rows % dp:
        yield f"vpp={vpp} needs {uneven}; use vpp=1."
    elif vpp > 1 and rows // dp % layout.pp:
        yield (
            f"vpp={vpp} needs micro-batches in multiples of pp={layout.pp}, and a replica has {rows // dp} sequences "
            f"of a {what}; use vpp=1."
        )
    if layout.expert_replicas > 1 and stage.trains and rows % dp:
        yield f"ep={layout.ep} needs {uneven}; use ep={layout.fold_size}."


def schedule_rules(facts: Facts, stage: Stage, layout: Layout, schedule: Schedule, part: int = 0) -> tuple[str, ...]:
    """Rules that the schedule of a stage breaks on a legal layout on a part of the cluster."""
    sentences: list[str] = []
    rows, is_even = rows_per_replica(facts, stage, layout), has_even_rows(facts, stage, layout)
    if schedule.micro_batch_tokens:
        sentences += token_rules(stage, layout, schedule, rows, facts.workload.max_tokens)
    else:
        sentences += row_rules(layout, schedule, rows, is_even=is_even)
    if schedule.recompute is not Recompute.NONE and not stage.trains:
        sentences.append(f"recompute={schedule.recompute} is only for a stage that trains; use none.")
    if schedule.offload not in offloads(stage):
        legal_kinds = " or ".join(offloads(stage))
        sentences.append(f"offload={schedule.offload} is not for this stage; use {legal_kinds}.")
    if schedule.chunk_tokens and not stage.may_stream:
        names = ", ".join(facts.graph.streaming) or "no stage of this job"
        sentences.append(f"chunk_tokens={schedule.chunk_tokens} is only for {names}; use 0.")
    generation = (
        _generation_rules(facts, layout, schedule, rows) if stage.generates else _inference_only_rules(schedule)
    )
    return (
        *sentences,
        *streaming_rules(facts, layout, schedule, part),
        *row_split_rules(facts, rows_per_update(facts, stage), layout, schedule, part),
        *generation,
        *_turn_rules(facts, schedule),
        *_wave_rules(facts, schedule),
        *engine_schedule_rules(facts, schedule),
        *(_draft_rules(facts, stage, schedule) if stage.generates else ()),
    )


def streaming_rules(facts: Facts, layout: Layout, schedule: Schedule, part: int = 0) -> tuple[str, ...]:
    """Rules that a stage breaks when it reads responses in chunks while they are generated."""
    if schedule.chunk_tokens and len(facts.cluster.parts_of(part)) > 1:
        return (
            f"chunk_tokens={schedule.chunk_tokens} does not work on two kinds of nodes, whose rows are split by speed; "
            "use 0.",
        )
    if schedule.chunk_tokens and layout.num_ranks == facts.cluster.num_ranks:
        return (
            f"a stage on all {layout.num_ranks} ranks cannot stream from a generation beside it; use chunk_tokens=0.",
        )
    if schedule.chunk_tokens and layout.cp > 1:
        return (f"cp={layout.cp} shards whole sequences, and chunks arrive one by one; use cp=1 or chunk_tokens=0.",)
    if schedule.chunk_tokens and layout.expert_replicas > 1:
        return (
            f"chunk_tokens={schedule.chunk_tokens} lets each replica read at its own pace, and the replicas of "
            f"ep={layout.ep} exchange tokens in every layer; use chunk_tokens=0.",
        )
    return ()


def _generation_rules(facts: Facts, layout: Layout, schedule: Schedule, rows: int) -> Iterator[str]:
    """Rules about the sequences that a replica has in flight, and its slots."""
    if schedule.micro_batch_size > 1:
        yield f"micro_batch_size={schedule.micro_batch_size} on a stage that generates slot by slot; use 1."
    batch_size, extra = facts.workload.batch_size, schedule.overcommit
    if extra and facts.workload.group_size > 1:
        yield (
            f"overcommit={extra} defers single sequences, and the {facts.workload.group_size} of a prompt are "
            "compared with each other; use 0."
        )
        return
    if extra % layout.dp or extra > batch_size:
        legal = nearest(extra, range(0, batch_size + 1, layout.dp))
        yield f"overcommit={extra} is not a multiple of dp={layout.dp} up to the batch of {batch_size}; use {legal}."
        return
    slots, legal_slots = schedule.generation_slots, slot_counts(in_flight(schedule, rows, layout.dp), layout.pp)
    if slots not in legal_slots:
        yield (
            f"generation_slots={slots} is not a power of two between pp={layout.pp} and the {legal_slots[-1]} "
            f"sequences of a replica, nor that number; use {nearest(slots, legal_slots)}."
        )


def _turn_rules(facts: Facts, schedule: Schedule) -> Iterator[str]:
    """Rules about multi-turn rollouts, whose batches may stay in flight and run to a certain turn in each period."""
    if not facts.workload.turns:
        if schedule.while_waiting is not WhileWaiting.KEEP:
            yield f"while_waiting={schedule.while_waiting} is only for multi-turn rollouts; use {WhileWaiting.KEEP}."
        return
    yield from _unsupported_with(schedule, "multi-turn rollouts", ("chunk_tokens",))
    if schedule.overcommit:
        yield (
            f"overcommit={schedule.overcommit} trains first on the sequences that end first, and with multi-turn "
            "rollouts those are the ones whose tool answers fast, so that the clock would select the samples; use 0."
        )
    if (batches := schedule.batches_in_flight) > (most := facts.workload.turns.number.max):
        yield f"batches_in_flight={batches} is more than the {most} turns of a rollout; use {most}."


def _wave_rules(facts: Facts, schedule: Schedule) -> Iterator[str]:
    """Rules about best-of-n and dynamic sampling, which select samples by the scores of whole groups."""
    if facts.workload.selects_samples:
        yield from _unsupported_with(schedule, "best_of" if facts.workload.best_of else "dynamic sampling")


def _draft_rules(facts: Facts, stage: Stage, schedule: Schedule) -> Iterator[str]:
    """Rules about drafts, which are planned only where the workload states their acceptance."""
    drafts, speculation = schedule.draft_tokens, facts.workload.speculation
    if not drafts:
        return
    if speculation is None:
        yield (
            f"draft_tokens={drafts} needs the share of drafts that are accepted, which the job does not state; give "
            "workload.speculation.acceptance, or use 0."
        )
    elif drafts > speculation.max_draft:
        yield (
            f"draft_tokens={drafts} is more than the {speculation.max_draft} positions of "
            f"workload.speculation.acceptance; use {speculation.max_draft} at most."
        )
    if reason := _drafts_unsupported(facts, stage):
        yield f"draft_tokens={drafts} is not supported with {reason}; use 0."


def _drafts_unsupported(facts: Facts, stage: Stage) -> str:
    """The feature of the job that speculative decoding does not support; empty if there is none."""
    if facts.workload.turns:
        return "multi-turn rollouts"
    if facts.models.spec(stage.role).linear:
        return "layers that have a recurrent state, which cannot be rolled back"
    return "engine vllm on a CPU, which is started without drafts" if generates_with_vllm(facts) else ""


_DRAFTS = (2, 4, 8)
"""The offered lengths of drafts in tokens, as far as the workload states their acceptance."""


def _offered_drafts(facts: Facts, stage: Stage) -> tuple[int, ...]:
    """The offered lengths of drafts; 0 alone without a stated acceptance, or where no round has a draft."""
    speculation = facts.workload.speculation
    if speculation is None or not speculation.drafted or _drafts_unsupported(facts, stage):
        return (0,)
    return (0, *(tuple(k for k in _DRAFTS if k <= speculation.max_draft) or (speculation.max_draft,)))


def _unsupported_with(
    schedule: Schedule, what: str, names: Sequence[str] = ("chunk_tokens", "batches_in_flight", "overcommit")
) -> Iterator[str]:
    plain = Schedule()
    for name in names:
        if getattr(schedule, name) != getattr(plain, name):
            yield f"{name}={getattr(schedule, name)} is not supported with {what}; use {getattr(plain, name)}."


def _may_stream_responses(facts: Facts) -> bool:
    """True if a stage may read a response while others are generated."""
    return not (facts.workload.turns or facts.workload.selects_samples)


def _inference_only_rules(schedule: Schedule) -> Iterator[str]:
    plain = Schedule()
    for name in ("generation_slots", "batches_in_flight", "overcommit", "while_waiting", "draft_tokens"):
        if getattr(schedule, name) != getattr(plain, name):
            yield f"{name}={getattr(schedule, name)} on a stage that does not generate; use {getattr(plain, name)}."


def in_flight(schedule: Schedule, rows: int, dp: int) -> int:
    """The maximum number of sequences that a replica may have in flight, if it has `rows` rows of each batch."""
    return rows * schedule.batches_in_flight + schedule.overcommit // dp


def slot_counts(num_rows: int, pp: int) -> tuple[int, ...]:
    """The legal numbers of generation slots: powers of two and `num_rows`, at least one for each pipeline stage."""
    counts = {2**k for k in range(num_rows.bit_length()) if 2**k <= num_rows} | {num_rows}
    return tuple(sorted(count for count in counts if count >= pp)) or (num_rows,)


def offloads(stage: Stage) -> tuple[Offload, ...]:
    """The kinds of state that a stage may offload to host memory."""
    if stage.trains:
        return (Offload.NONE, Offload.OPTIMIZER)
    return (Offload.NONE,) if stage.may_share or stage.is_trained else (Offload.NONE, Offload.WEIGHTS)


def schedules(
    facts: Facts,
    stage: Stage,
    layout: Layout,
    search_case: SearchCase | None = None,
    extra_choices: ExtraChoices = NO_EXTRA_CHOICES,
) -> tuple[Schedule, ...]:
    """All offered schedules of a stage on a legal layout; see `schedule_table`."""
    return schedule_table(facts, stage, layout, search_case, extra_choices).schedules


def schedule_table(
    facts: Facts,
    stage: Stage,
    layout: Layout,
    search_case: SearchCase | None = None,
    extra_choices: ExtraChoices = NO_EXTRA_CHOICES,
) -> ScheduleTable:
    """The table of all offered schedules of a stage on a legal layout; without a search case, those of a synchronous
    plan without offload.

    `extra_choices` adds micro-batches to the usual ones. Generation fills free slots and has no micro-batches. Layouts
    that are offered the same schedules share one table.
    """
    rows, search_case = rows_per_replica(facts, stage, layout), search_case or synchronous_case(facts.graph)
    if stage.generates:
        offered = tuple(
            (overlap.batches_in_flight, overlap.overcommit, slots)
            for overlap in _overlaps(facts, layout, search_case)
            for slots in slot_counts(in_flight(overlap, rows, layout.dp), layout.pp)
        )
        return _generation_table(offered, _treatments(facts), _offered_drafts(facts, stage))
    kinds = tuple(Recompute) if stage.trains else (Recompute.NONE,)
    streams = search_case.streams(stage) and layout.cp == 1 and _may_stream_responses(facts)
    chunks = (0, *(c for c in CHUNKS if c < facts.workload.response.max)) if streams else (0,)
    states = offloads(stage) if search_case.offload else (Offload.NONE,)
    is_even = has_even_rows(facts, stage, layout)
    micro_batches = offered_micro_batches(
        facts.workload, stage, layout, rows, is_even=is_even, extra_choices=extra_choices
    )
    return _pass_table(micro_batches, kinds, chunks, states)


def _treatments(facts: Facts) -> tuple[WhileWaiting, ...]:
    """The offered treatments of a sequence that waits for its tool."""
    if not facts.workload.turns:
        return (WhileWaiting.KEEP,)
    return (WhileWaiting.LEAVE,) if generates_with_vllm(facts) else tuple(WhileWaiting)


@lru_cache(maxsize=1024)  # many layouts of many stages have the same number of rows
def _pass_table(
    micro_batches: MicroBatchOptions, kinds: tuple[Recompute, ...], chunks: tuple[int, ...], states: tuple[Offload, ...]
) -> ScheduleTable:
    return ScheduleTable(
        tuple(
            replace(micro_batch, recompute=kind, offload=state)
            for chunk in chunks
            for state in states
            for micro_batch in micro_batches.schedules(chunk)
            for kind in kinds
        )
    )


@lru_cache(maxsize=1024)  # many layouts have equally many replicas and pipeline stages
def _generation_table(
    offered: tuple[tuple[int, int, int], ...], waiting: tuple[WhileWaiting, ...], drafts: tuple[int, ...]
) -> ScheduleTable:
    """The table for (batches in flight, overcommit, slots), each with every treatment of a sequence that waits for its
    tool and every length of drafts."""
    return ScheduleTable(
        tuple(
            Schedule(
                batches_in_flight=batches,
                overcommit=extra,
                generation_slots=slots,
                while_waiting=treatment,
                draft_tokens=draft,
            )
            for batches, extra, slots in offered
            for treatment in waiting
            for draft in drafts
        )
    )


def _overlaps(facts: Facts, layout: Layout, search_case: SearchCase) -> tuple[Schedule, ...]:
    """The batches in flight and the overcommit that are offered to a generation within the bound on staleness.

    With neither, all sequences end in the period that starts them. Batches in flight are powers of two. The overcommit
    is an eighth, a quarter, a half or the whole of a batch, rounded down to a multiple of dp where the replicas' rows
    are uneven; there is none where samples are in groups or rollouts are multi-turn. The latter have at most as many
    batches in flight as turns.
    """
    batch_size, turns = facts.workload.batch_size, facts.workload.turns
    ends_in_period = facts.workload.selects_samples or not keeps_sequences_in_flight(facts)
    deferral = (
        max_deferral(search_case.ahead, facts.staleness) if search_case.keeps_in_flight and not ends_in_period else 0
    )
    most = min(deferral + 1, turns.number.max) if turns else deferral + 1
    batches = [Schedule(batches_in_flight=2**k) for k in range(most.bit_length())]
    if not deferral or turns or facts.workload.group_size > 1:
        return tuple(batches)
    fractions = [
        fraction for fraction in (8, 4, 2, 1) if batch_size % layout.dp or batch_size % (fraction * layout.dp) == 0
    ]
    extras = dict.fromkeys(batch_size // fraction // layout.dp * layout.dp for fraction in fractions)
    return (*batches, *(Schedule(overcommit=extra) for extra in extras if extra))


def available_bytes(facts: Facts, part: int) -> tuple[int, float]:
    """Device bytes that a choice may use on each rank of a part, and bytes of host memory for each rank; on two kinds
    of nodes, the smaller of each."""
    parts = facts.cluster.parts_of(part)
    return min(one.device.usable_bytes for one in parts), min(host_bytes_for_stage(one, facts.graph) for one in parts)


def host_bytes_for_stage(cluster: Cluster, graph: StageGraph) -> float:
    """Bytes of host memory that one rank may use for one stage: an equal share for each stage that can offload."""
    offloading = sum(len(offloads(stage)) > 1 for stage in graph.stages)
    return cluster.host_memory_bytes / cluster.ranks_per_node / offloading
