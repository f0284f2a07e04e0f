"""A small job whose models run in every layout, and the plans that runs of it are stopped and resumed under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
import yaml

from benchmarks.small_worlds import END, VOCAB_SIZE, write_words
from meshwright.planner.compile import compile_plan
from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.evaluate import evaluate
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.steps_ahead import staleness_of, steps_ahead_patterns
from meshwright.planner.plan.verify import require_valid
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.execution.request import RunRequest

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": END,
    "num_labels": 1,
}

_NETWORK = {"seconds": 100e-6, "bytes_per_second": 1.25e9}
"""Between nodes, which are of one machine."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan: its ranks, on how many nodes, what is pinned, the bound on staleness, steps by which generation works
    ahead, what is set in the schedules of stages that no search offers, and the learning rate of what is trained."""

    name: str
    num_ranks: int
    nodes: int = 1
    pins: Sequence[str] = ()
    staleness: int = 0
    ahead: int = 0
    schedules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    learning_rate: float = 3e-4
    longest_prompt: int = 8
    """That is allowed; all have six tokens."""
    longest_response: int = 10


def write_models(directory: Path, *, hidden_size: int = 64, has_experts: bool = False) -> None:
    """An untrained policy, a critic and a reward model alike, and prompts."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    shape = {**_SHAPE, "hidden_size": hidden_size, "intermediate_size": 3 * hidden_size // 2}
    config = transformers.LlamaConfig(**shape)
    policy = transformers.LlamaForCausalLM(config)
    if has_experts:
        policy = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
        )
    policy.save_pretrained(directory / "actor")
    transformers.LlamaForSequenceClassification(config).save_pretrained(directory / "reward")
    write_words(directory)


def write_job(directory: Path, case: Case) -> Path:
    """The job of a case, on the models of `write_models` beside it."""
    document: Mapping[str, object] = {
        "models": {role: {"path": "reward"} for role in ("critic", "reward")}
        | {role: {"path": "actor"} for role in ("actor", "ref")},
        "cluster": {
            "device": "local",
            "nodes": case.nodes,
            "ranks_per_node": case.num_ranks // case.nodes,
            **({"network": _NETWORK} if case.nodes > 1 else {}),
        },
        "precision": "fp32",
        "workload": {
            "batch_size": 8,
            "prompt": {"max": case.longest_prompt, "fixed": 6},
            "response": {
                "max": case.longest_response,
                "median": case.longest_response // 2,
                "p99": case.longest_response,
            },
            "num_minibatches": 2,
        },
        "staleness": case.staleness,
        "ppo": {"actor_learning_rate": case.learning_rate, "critic_learning_rate": case.learning_rate},
        "data": {"prompts": "prompts.jsonl", "tokenizer": "tokenizer.json"},
    }
    path = directory / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def request_of(directory: Path, case: Case, out: Path, steps: int) -> RunRequest:
    """What to run: the best plan under the pins, by analytic costs, which change no result."""
    job, plan = planned_ahead(write_job(directory, case), case)
    return RunRequest(plan=plan, job=job, directory=directory, out=out, steps=steps)


def planned_ahead(path: Path, case: Case) -> tuple[Job, Plan]:
    """A job and its plan, with generation as many steps ahead as the case says, and its schedules."""
    job, plan = planned(path, case.pins)
    return job, _moved(plan, case) if case.ahead or case.schedules else plan


def planned(path: Path, pins: Sequence[str]) -> tuple[Job, Plan]:
    """A job and its plan."""
    job = read_job(path)
    facts = resolve(job, path.parent)
    plan = compile_plan(facts, cost_model_of(facts), pins=pins)
    assert isinstance(plan, Plan), plan
    return job, plan


def _moved(plan: Plan, case: Case) -> Plan:
    """The plan with generation so many steps ahead and with these schedules, in the graph's order, timed again."""
    ahead, position = steps_ahead_patterns(plan.graph, case.ahead)[case.ahead], plan.graph.position
    placements = {
        p.stage: p.model_copy(
            update={
                "steps_ahead": ahead[p.stage],
                "schedule": replace(p.schedule, **case.schedules.get(p.stage, {})),
                "start_seconds": position[p.stage],
            }
        )
        for p in plan.placements
    }
    refits = tuple(refit.model_copy(update={"start_seconds": position[refit.target]}) for refit in plan.refits)
    used = staleness_of(case.ahead, placements[GENERATE].schedule, case.staleness)
    changes = {"placements": tuple(placements.values()), "refits": refits, "staleness": used}
    moved = evaluate(plan.model_copy(update=changes))
    solver = {"status": "pinned", "objective_seconds": moved.period_seconds, "bound_seconds": 0.0, "gap": 1.0}
    moved = moved.model_copy(update={"solver": moved.solver.model_copy(update=solver)})
    require_valid(moved)
    return moved
