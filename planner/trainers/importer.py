"""Import of a trainer's configuration: its job as YAML, the cost of the configuration as it is, and faster plans.

A value that is not legal here is read as the nearest legal one, or left free where there is none; a note says so. An
engine's limit of sequences (`max_num_seqs`) and its share of the memory (`gpu_memory_utilization`) bound its
generation slots from above.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from meshwright.cost_models.protocol import CostModel, StageQuery
from meshwright.planner.compile import best_plan, compile_plan
from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS, Facts, Job, resolve
from meshwright.planner.plan.cost_queries import CostModelBuilder
from meshwright.planner.plan.layout_and_schedule_rules import layout_rules, slot_counts
from meshwright.planner.plan.pins import Pin, parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import pattern_ahead
from meshwright.planner.search.legal_choices import check_pins
from meshwright.planner.search.no_plan import NoPlan
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import best_expressible_plan
from meshwright.planner.trainers.parsed_config import MEMORY_SHARE, FieldValue, ParsedConfig, ParsedField, layout_of
from meshwright.planner.trainers.trainer import OtherTrainer
from meshwright.profiles.algorithms import graph_of
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import usual_network
from meshwright.profiles.layout import Layout, divisors
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE, Role
from meshwright.profiles.workload import Workload


def slot_bounds(facts: Facts, model: CostModel, values: Mapping[str, FieldValue]) -> tuple[tuple[Pin, ...], list[str]]:
    """Pins that forbid the slot counts that a configuration excludes, and notes for the user.

    A slot count is allowed if it is within the configuration's limit, and if weights, KV cache and transient memory
    take no more than the configured share of a device. The smallest count is always allowed.
    """
    layout = _layout(facts, values)
    if layout is None:
        return (), []
    counts = slot_counts(-(-facts.workload.batch_size // layout.dp), layout.pp)
    limit, share = int(values.get(f"{GENERATE}.generation_slots", counts[-1])), values.get(MEMORY_SHARE)
    admitted = [count for count in counts if count <= limit] or [counts[0]]
    if share is None:
        return tuple(_forbid_others(facts, counts, admitted)), []
    budget_bytes = float(share) * facts.cluster.parts[0].device.memory_bytes
    fitting = [count for count in admitted if _needed_bytes(facts, model, layout, count) <= budget_bytes]
    notes = []
    if not fitting:
        notes.append(
            f"the cost model has no room for a KV cache of {counts[0]} sequences of {facts.workload.max_tokens} tokens "
            f"beside the weights in {share:g} of a device's memory: the share is left free."
        )
    elif fitting[-1] < admitted[-1]:
        notes.append(
            f"the KV cache in {share:g} of a device's memory holds {fitting[-1]} of the longest sequences, fewer than "
            f"the {admitted[-1]} that would be costed otherwise; at most {fitting[-1]} are costed."
        )
    return tuple(_forbid_others(facts, counts, fitting or admitted)), notes


def _layout(facts: Facts, values: Mapping[str, FieldValue]) -> Layout | None:
    """The layout of the engines; None where the configuration does not give one or it is not legal here."""
    pool, tp, pp = (values.get(f"{GENERATE}.{key}") for key in ("pool", "tp", "pp"))
    if pool is None or tp is None or pp is None:
        return None
    try:
        layout = layout_of({"tp": int(tp), "pp": int(pp)}, int(str(pool).partition(":")[2]))
    except BadInput:
        return None
    return None if any(layout_rules(facts, facts.graph.by_name[GENERATE], layout)) else layout


def _needed_bytes(facts: Facts, model: CostModel, layout: Layout, count: int) -> float:
    schedule = Schedule(generation_slots=count)
    stage = facts.graph.by_name[GENERATE]
    query = StageQuery(stage=stage, model=facts.models.actor, layout=layout, schedule=schedule)
    stage_bytes = model.on_layout(query).bytes(schedule)
    return stage_bytes.weights + stage_bytes.transient


def _forbid_others(facts: Facts, counts: tuple[int, ...], admitted: list[int]) -> Iterator[Pin]:
    for count in counts:
        if count not in admitted:
            yield parse_pin(f"{GENERATE}.generation_slots!={count}", facts.graph)


_HEAD = """\
# From {source}, a configuration of {trainer}.
# Every prompt and response has the longest length that it allows: give median and p99 in place of fixed where they
# are known.
# Its engine is the trainer's: leave it out to plan for the one of Meshwright.
"""


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """The inputs of a job besides the configuration's fields.

    `path` is the configuration's file. `engine` is used where the configuration names none. `shapes` are the models'
    directories or config.json files by role; the one under the empty name is for every model that is not on this
    machine.
    """

    path: Path
    trainer: str
    engine: EngineName
    device: str
    network: str | None = None
    shapes: Mapping[str, Path] = field(default_factory=dict)

    def job(self, configured: ParsedConfig, directory: Path) -> Job:
        """The job, with paths relative to `directory`.

        Raises BadInput for a model that is not on this machine, and for a value that no job has, with the trainer's
        keys.
        """
        tree = json.dumps(self._tree(configured, directory))
        try:
            return parse(Job, tree, f"configuration {self.path}")
        except BadInput as error:
            raise BadInput(configured.with_keys(str(error))) from None

    def facts(self, configured: ParsedConfig, directory: Path) -> Facts:
        """The facts of the job. Raises BadInput as `job` does, and for facts that break a rule."""
        job = self.job(configured, directory)
        try:
            return resolve(job, directory)
        except BadInput as error:
            raise BadInput(configured.with_keys(str(error))) from None

    def text(self, configured: ParsedConfig, directory: Path) -> str:
        """The YAML of the job, with paths relative to `directory`.

        Raises BadInput for a model that is not on this machine.
        """
        tree = self._tree(configured, directory)
        return _HEAD.format(source=self.path, trainer=self.trainer) + yaml.safe_dump(tree, sort_keys=False)

    def _tree(self, configured: ParsedConfig, directory: Path) -> dict[str, Any]:
        values = configured.by_name
        prompt, response = int(values["workload.prompt"]), int(values["workload.response"])
        algorithm = configured.algorithm
        reward, adapter = _group(values, "reward"), _group(values, "adapter")
        graph = graph_of(algorithm, has_ref="models.ref" in values, has_reward=not reward, has_environment=bool(reward))
        roles, settings_key = graph.roles, SETTINGS_KEYS[algorithm]
        self._require_used(configured, roles)
        return {
            **({} if algorithm == "ppo" else {"algorithm": algorithm}),
            "models": {
                role.value: {
                    "path": os.path.relpath(self._model(role, configured), directory),
                    **({"adapter": adapter} if adapter and role == Role.ACTOR else {}),
                }
                for role in Role
                if role in roles
            },
            "cluster": {
                "device": self.device,
                "nodes": values["cluster.nodes"],
                "ranks_per_node": values["cluster.ranks_per_node"],
                "network": self.network or usual_network(self.device),
            },
            "precision": "bf16",
            "engine": values.get("engine", self.engine),
            **({"generation_weights": values["generation_weights"]} if "generation_weights" in values else {}),
            **({"old_logprobs": values["old_logprobs"]} if "old_logprobs" in values else {}),
            **({"rewards": [reward]} if reward else {}),
            "workload": {
                "batch_size": values["workload.batch_size"],
                "group_size": values.get("workload.group_size", 1),
                "prompt": {"max": prompt, "fixed": prompt},
                "response": {"max": response, "fixed": response},
                "num_minibatches": values["workload.num_minibatches"],
                "num_epochs": values.get("workload.num_epochs", 1),
            },
            "staleness": configured.steps_ahead,
            settings_key: _group(values, settings_key),
        }

    def _require_used(self, configured: ParsedConfig, roles: Collection[Role]) -> None:
        """Raise BadInput for shapes of a model that the job does not have."""
        for role, shape in self.shapes.items():
            if not role and all(needed in self.shapes or self._is_here(needed, configured) for needed in roles):
                raise BadInput(
                    f"--model {shape}: every model of configuration {self.path} is here or given by its role; leave it "
                    f"out, or give it in place of one as --model actor={shape}."
                )
            if role and role not in roles:
                role_names = ", ".join(known.value for known in Role if known in roles)
                reason = (
                    ", because a function scores"
                    if role == Role.REWARD and "reward.function" in configured.by_name
                    else ""
                )
                raise BadInput(
                    f"--model {role}={shape}: configuration {self.path} has no {role} model{reason}; its models are "
                    f"{role_names}."
                )

    def _is_here(self, role: Role, configured: ParsedConfig) -> bool:
        named = configured.by_name.get(f"models.{role}")
        return named is not None and (self.path.parent / str(named)).exists()

    def _model(self, role: Role, configured: ParsedConfig) -> Path:
        """The directory or config.json of a model.

        It is the one that the user gave for the role, else the configuration's if it is on this machine, else the one
        that the user gave for all other models.
        """
        if role.value in self.shapes:
            return self.shapes[role.value]
        named = configured.by_name.get(f"models.{role}")
        local = self.path.parent / str(named) if named else None
        if local is not None and local.exists():
            return local
        if "" in self.shapes and named is not None:
            return self.shapes[""]
        if named is None:
            raise BadInput(
                f"configuration {self.path} has no {role} model, and a job has one; give the shapes of one, as "
                f"--model {role}=PATH of a Hugging Face directory or a config.json."
            )
        raise BadInput(
            f"the {role} model {named} of configuration {self.path} is not here, and nothing is fetched; give its "
            "directory or its config.json as --model PATH."
        )


def _group(values: Mapping[str, FieldValue], group: str) -> dict[str, Any]:
    """The fields of a group as a nested mapping, a level for each further dot."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        prefix, *path = name.split(".")
        if prefix == group and path:
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
    return tree


_SLOTS = f"{GENERATE}.generation_slots"

_FEW_ROWS = 64
"""Micro-batch rows up to which every smaller number is tried; above it, powers of two only."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A trainer and the function that reads its configurations."""

    trainer: OtherTrainer
    read: Callable[..., ParsedConfig]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A configuration as a plan, and faster plans.

    `plan` is the configuration as it is, by our costs; None where it does not fit. `best_in_trainer` is the best plan
    that the trainer can express, `best` the fastest plan that was found, within the gap of the optimum; None where
    there is none. `timed_out` is true if a search reached its limit before it found a plan or excluded one.
    `deciding` are the fields that the plan depends on. `notes` are sentences on values that were replaced by the
    nearest legal ones. `named` are keys that may change a step but are not modelled, with the reason, and `unread` keys
    that a plan does not depend on.
    """

    plan: Plan | None
    best_in_trainer: Plan | None
    best: Plan | None
    deciding: tuple[ParsedField, ...]
    notes: tuple[str, ...]
    unread: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    timed_out: bool = False


def evaluate_config(
    reader: Reader,
    configured: ParsedConfig,
    facts: Facts,
    rebuild_cost_model: CostModelBuilder,
    *,
    limits: Limits | None = None,
    search_seconds: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Imported:
    """Cost the configuration as it is, and search for the best plan that the trainer can express and the best of all.

    Each search keeps within `limits` and takes at most `search_seconds`. `progress` is called with the name of the
    current search, the number of its parts that are done, and the number of all its parts.
    """
    model, new_limits = rebuild_cost_model(facts), partial(_limits_from_now, limits or Limits(), search_seconds)
    report = progress or _no_progress
    pins, notes = _legal_pins(facts, configured)
    bounds, bound_notes = slot_bounds(facts, model, configured.by_name)
    pins, notes = (*pins, *bounds), [*notes, *bound_notes, *image_notes(facts)]
    report("costing the configuration", 0, 1)
    plan = _as_configured(facts, model, pins, configured, new_limits())
    if plan is None:
        notes.append(_why_not(facts, model, pins, new_limits()))
    expressible = best_expressible_plan(
        reader.trainer,
        facts,
        model,
        limits=new_limits(),
        progress=lambda done, total: report(f"searching what {reader.trainer.name} can express", done, total),
    )
    report("searching all plans", 0, 1)
    best = best_plan(facts, model, limits=new_limits())
    within_trainer = _fastest(expressible.plan if expressible else None, plan)
    return Imported(
        plan=plan,
        best_in_trainer=within_trainer,
        best=_fastest(best if isinstance(best, Plan) else None, within_trainer),
        timed_out=best == "out_of_limit",
        deciding=tuple(parsed for parsed in configured.fields if parsed.what.partition(".")[0] not in DEFAULT_SETTINGS),
        notes=(*configured.notes, *notes),
        unread=configured.ignored,
        named=configured.unmodelled,
    )


def image_notes(facts: Facts) -> list[str]:
    """A sentence on the images of prompts, which no trainer's keys describe; none for a model of text."""
    actor = facts.models.actor
    if not actor.image_encoder or facts.workload.images:
        return []
    return [
        f"{actor.name} reads images, and no key gives their number and size: none is costed, and prompts are as long "
        "as configured. State them in the job under workload, such as images: {number: {max: 1, fixed: 1}, tokens: "
        "{max: 256, fixed: 256}}; their tokens are part of the prompts."
    ]


def _fastest(*plans: Plan | None) -> Plan | None:
    """The plan with the shortest step; None where there is none."""
    return min((plan for plan in plans if plan), key=lambda plan: plan.period_seconds, default=None)


def _limits_from_now(limits: Limits, seconds: float | None) -> Limits:
    """The limits of a search that starts now and takes at most this many seconds."""
    if seconds is None:
        return limits
    return replace(limits, max_deterministic_time=seconds, deadline=time.monotonic() + seconds)


def _as_configured(
    facts: Facts, model: CostModel, pins: tuple[Pin, ...], configured: ParsedConfig, limits: Limits
) -> Plan | None:
    ahead = pattern_ahead(facts.graph, configured.steps_ahead)
    plan = best_plan(facts, model, pins=pins, ahead=(ahead,), limits=limits)
    return plan if isinstance(plan, Plan) else None


def _why_not(facts: Facts, model: CostModel, pins: tuple[Pin, ...], limits: Limits) -> str:
    """A sentence on why the configuration has no plan."""
    answer = compile_plan(facts, model, pins=tuple(map(str, pins)), limits=limits)
    reasons = " ".join(limit.sentence for limit in answer.limits) if isinstance(answer, NoPlan) else ""
    if isinstance(answer, NoPlan) and answer.status == "out_of_limit":
        return f"it is not known how long a step of the configuration takes: {reasons}"
    return f"the cost model predicts out of memory for the configuration as it is: {reasons}"


def _legal_pins(facts: Facts, configured: ParsedConfig) -> tuple[tuple[Pin, ...], list[str]]:
    """The configuration as pins that are legal together, and notes on the values that were replaced."""
    pins: list[Pin] = []
    notes: list[str] = []
    for parsed in configured.fields:
        stage = parsed.what.partition(".")[0]
        if stage not in facts.graph.by_name or parsed.what == _SLOTS:
            continue
        stage_pins = [pin for pin in pins if pin.stage == stage]
        pin, problem = _first_legal(facts, stage_pins, _with_layout_budget(parsed, stage_pins, configured))
        if pin:
            pins.append(pin)
        if problem:
            notes.append(f"{', '.join(parsed.keys)}: {problem}")
    no_overlap = [parse_pin(f"{GENERATE}.{key}", facts.graph) for key in ("batches_in_flight=1", "overcommit=0")]
    unstreamed = [
        parse_pin(f"{name}.chunk_tokens=0", facts.graph)
        for name, stage in facts.graph.by_name.items()
        if not (stage.generates or stage.trains)
    ]
    return (*pins, *no_overlap, *unstreamed), notes


def _with_layout_budget(parsed: ParsedField, stage_pins: list[Pin], configured: ParsedConfig) -> ParsedField:
    """Adjust a stage's token budget to the layout that it is read with: the budget is per rank, and a smaller cp shards
    a sequence over fewer ranks."""
    stage, _, key = parsed.what.partition(".")
    layouts = [pin.value for pin in stage_pins if isinstance(pin.value, Layout)]
    if key != "micro_batch_tokens" or not layouts:
        return parsed
    configured_layout = Layout.parse(str(configured.by_name[f"{stage}.layout"]))
    return replace(parsed, value=int(parsed.value) * layouts[0].cp // configured_layout.cp)


def _first_legal(facts: Facts, stage_pins: list[Pin], parsed: ParsedField) -> tuple[Pin | None, str]:
    """The pin of a field, or of its nearest legal value, and a note where the value itself is not legal."""
    problem = ""
    for text in _pins_to_try(parsed, facts.workload):
        try:
            pin = parse_pin(text, facts.graph)
            check_pins(facts, (*stage_pins, pin))
        except BadInput as error:
            problem = problem or str(error)
            continue
        return pin, _read_as_note(parsed, pin, facts.workload) if problem else ""
    return None, f"{problem} It is left free."


def _read_as_note(parsed: ParsedField, pin: Pin, workload: Workload) -> str:
    """A sentence on a value that was replaced by the nearest legal one."""
    if parsed.what.endswith(".micro_batch_tokens") and pin.key == "micro_batch_size":
        return (
            f"{parsed.what}={parsed.value} is read as {pin.key}={pin.value}: this layout is costed by rows, and no "
            f"more sequences of {workload.mean_tokens:,.0f} tokens, their mean, fit into the budget and divide the "
            "rows of a replica."
        )
    if parsed.what.endswith(".layout"):
        return (
            f"{parsed.what}={parsed.value} is read as {pin.value}, the nearest layout that is costed: interleaved "
            "pipelines need equally many layers in each part; context parallelism needs a model without experts and at "
            "least 2,048 tokens of the longest sequence on each rank."
        )
    return f"{parsed.what}={parsed.value} is read as {str(pin).removeprefix(f'{parsed.what}=')}"


def _pins_to_try(parsed: ParsedField, workload: Workload) -> Iterator[str]:
    """The pins to try for a field, its own value first.

    A count is followed by smaller numbers, the largest first; a layout by ones with less interleaving, then with less
    context parallelism and more replicas. A token budget is followed by budgets of whole longest sequences and then,
    for layouts without a token budget, by the rows that it holds on average.
    """
    longest = workload.max_tokens
    stage, _, key = parsed.what.partition(".")
    if key == "layout":
        yield from (f"{parsed.what}={layout}" for layout in _simpler_layouts(Layout.parse(str(parsed.value))))
    elif key == "micro_batch_size":
        yield f"{parsed.what}={parsed.value}"
        yield from (f"{parsed.what}={number}" for number in _numbers_below(int(parsed.value)))
    elif key == "micro_batch_tokens":
        cap = int(parsed.value)
        rows = max(1, int(cap / workload.mean_tokens))
        yield f"{parsed.what}={cap}"
        yield from (f"{parsed.what}={number * longest}" for number in _powers_of_two_up_to(max(1, cap // longest)))
        yield from (f"{stage}.micro_batch_size={number}" for number in (rows, *_numbers_below(rows)))
    else:
        yield f"{parsed.what}={parsed.value}"


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    """A layout, then those with a smaller vpp, then those with a smaller cp and more replicas."""
    for cp in reversed(divisors(layout.cp)):
        for vpp in reversed(divisors(layout.vpp)):
            yield replace(layout, vpp=vpp, cp=cp, dp=layout.dp * layout.cp // cp)


def _numbers_below(number: int) -> Iterator[int]:
    """Numbers below a number of rows, the largest first: powers of two above `_FEW_ROWS`, then every number."""
    yield from (power for power in _powers_of_two_up_to(max(1, number - 1)) if power > _FEW_ROWS)
    yield from range(min(number - 1, _FEW_ROWS), 0, -1)


def _powers_of_two_up_to(number: int) -> Iterator[int]:
    """The powers of two up to a number, the largest first."""
    power = 1 << (number.bit_length() - 1)
    while power:
        yield power
        power //= 2


def _no_progress(_what: str, _done: int, _total: int) -> None: ...
