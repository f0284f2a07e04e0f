"""How an export writes the keys of a table: functions from the plan and the job to the value of a row's key."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.vllm_settings import vllm_settings
from meshwright.planner.trainers.export_settings import (
    pool_nodes,
    prompts_of_mini_batch,
    token_budget,
    token_budget_origin,
    uneven_stage_layers,
)
from meshwright.planner.trainers.table import Row, Write, write_field
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue
from meshwright.profiles.algorithms import OldLogprobs
from meshwright.profiles.schedule import Recompute
from meshwright.profiles.stages import GENERATE, Role

VLLM_RULE = "rule: run starts vLLM with it"
"""The origin of arguments of vLLM that are no field of a plan."""


def always(value: ConfigValue) -> Write:
    """The same value in every export."""
    return lambda _source, _row: value


def of_plan(value: Callable[[Plan], ConfigValue]) -> Write:
    """A value that is computed from the plan alone."""
    return lambda source, _row: value(source.plan)


def vllm_argument(source: ExportInput, row: Row) -> ConfigValue:
    """The argument of vLLM that the key is named after, where `run` starts vLLM with the plan; elsewhere the trainer's
    own default holds."""
    settings = vllm_settings(source.plan.facts, source.plan.placement(GENERATE).schedule)
    value: ConfigValue = getattr(settings, row.key.rpartition(".")[2]) if settings else None
    return value


def with_stage(stage: str, write: Write) -> Write:
    """Write only where the plan has a stage."""
    return lambda source, row: write(source, row) if stage in source.plan.graph.by_name else None


def one_ahead(write: Write) -> Write:
    """Write only where generation works ahead."""
    return lambda source, row: write(source, row) if source.plan.ahead[GENERATE] else None


def with_function(write: Write) -> Write:
    """Write only where a function scores."""
    return lambda source, row: None if source.reward_function is None else write(source, row)


def with_reward_model(write: Write) -> Write:
    """Write only where a reward model scores."""
    return lambda source, row: write(source, row) if source.reward_function is None else None


def number_of_nodes(stage: str) -> Write:
    """The nodes of a stage's pool."""
    return with_stage(stage, lambda source, _row: pool_nodes(source.plan, stage)[0])


def ranks_of_node(stage: str) -> Write:
    """The ranks that a stage's pool has on each of its nodes."""
    return with_stage(stage, lambda source, _row: pool_nodes(source.plan, stage)[1])


def num_prompts(source: ExportInput, _row: Row) -> ConfigValue:
    """The prompts of a step."""
    return source.plan.facts.workload.num_prompts


def minibatch_prompts(stage: str) -> Write:
    """The prompts of one update of a stage."""
    return with_stage(stage, lambda source, _row: prompts_of_mini_batch(source.plan))


def max_tokens(source: ExportInput, _row: Row) -> ConfigValue:
    """The tokens of the longest sequence."""
    return source.plan.facts.workload.max_tokens


def old_logprobs_from(source: OldLogprobs, write: Write) -> Write:
    """Write only where the log-probabilities before the updates come from this source."""
    return lambda origin, row: write(origin, row) if origin.plan.facts.old_logprobs == source else None


DRAFT_TOKENS = f"placements.{GENERATE}.schedule.draft_tokens"
"""The field of a plan that the keys of speculative decoding are written from."""

_LONGEST_MATCH, _SHORTEST_MATCH = 8, 2
"""Tokens of the suffixes that are looked up for a draft, as in `runtime.inference.drafts`."""


def if_drafts(value: Callable[[int], ConfigValue], engine: str | None = None) -> Write:
    """A value that depends on the tokens of a draft; written where the plan drafts, and only with `engine` if given."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        draft_tokens = source.plan.placement(GENERATE).schedule.draft_tokens
        is_written = draft_tokens and engine in (None, source.plan.facts.engine)
        return value(draft_tokens) if is_written else None

    return write


def ngram_rows(mapping: str, engine: str | None = None) -> tuple[Row, ...]:
    """The keys of vLLM's configuration of speculative decoding, for drafts from n-grams of the sequence itself, in a
    mapping of a trainer."""
    return (
        Row(f"{mapping}.method", DRAFT_TOKENS, None, if_drafts(lambda _: "ngram", engine)),
        Row(f"{mapping}.num_speculative_tokens", DRAFT_TOKENS, None, if_drafts(lambda count: count, engine)),
        Row(f"{mapping}.prompt_lookup_max", DRAFT_TOKENS, None, if_drafts(lambda _: _LONGEST_MATCH, engine)),
        Row(f"{mapping}.prompt_lookup_min", DRAFT_TOKENS, None, if_drafts(lambda _: _SHORTEST_MATCH, engine)),
    )


def budget(*stages: str) -> Write:
    """Tokens of a micro-batch per context-parallel rank of the first of these stages that the plan has, from its limit
    on tokens or, without it, on rows."""

    def write(source: ExportInput, row: Row) -> ConfigValue | KeyValue:
        stage = next((stage for stage in stages if stage in source.plan.graph.by_name), None)
        if stage is None:
            return None
        return KeyValue(row.key, token_budget(source.plan, stage), token_budget_origin(source.plan, stage))

    return write


def model_path(role: Role) -> Write:
    """The path of a model, where the plan has it."""
    return lambda source, _row: source.path(role) if role in source.plan.graph.roles else None


def with_experts(stage: str) -> Write:
    """The row's field where a stage's model is a mixture of experts."""

    def write(source: ExportInput, row: Row) -> ConfigValue:
        graph = source.plan.graph
        if stage not in graph.by_name or not source.plan.facts.models.spec(graph.by_name[stage].role).experts:
            return None
        return write_field(source, row)

    return write


def recomputation(stage: str) -> Write:
    """How much a stage recomputes: full or selective."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        recompute = source.plan.placement(stage).schedule.recompute
        return None if recompute is Recompute.NONE else recompute.value

    return with_stage(stage, write)


def if_recomputing_all(stage: str, value: ConfigValue) -> Write:
    """A value where a stage recomputes every layer."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        return value if source.plan.placement(stage).schedule.recompute is Recompute.FULL else None

    return with_stage(stage, write)


def null_if_selective(stage: str) -> Write:
    """Null where a stage recomputes attention only: Megatron-core then refuses a method and a number of layers."""

    def write(source: ExportInput, row: Row) -> KeyValue | None:
        is_selective = source.plan.placement(stage).schedule.recompute is Recompute.SELECTIVE
        return KeyValue(row.key, None, row.field) if is_selective else None

    return with_stage(stage, write)


def end_layers(stage: str, end: int) -> Write:
    """The layers of the first (0) or the last (1) stage of an uneven pipeline."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        layers = uneven_stage_layers(source.plan, stage)
        return layers[end] if layers else None

    return with_stage(stage, write)


def engine_experts(*, times_tp: bool) -> Write:
    """The number of replicas of an engine that share experts, or of their ranks with `times_tp`; nothing for ep=1."""

    def write(source: ExportInput, _row: Row) -> ConfigValue:
        layout = source.plan.placement(GENERATE).layout
        return layout.expert_replicas * (layout.tp if times_tp else 1) if layout.ep > 1 else None

    return write


def clip_low(source: ExportInput, _row: Row) -> ConfigValue:
    """How far below 1 the policy ratio is clipped."""
    return round(1 - source.settings.clip_range[0], 9)


def clip_high(source: ExportInput, _row: Row) -> ConfigValue:
    """How far above 1 the policy ratio is clipped."""
    return round(source.settings.clip_range[1] - 1, 9)
