"""Writes the page of which features of a job go together, by asking the rules of the program for every two of them:

python docs/combinations.py > docs/combinations.md

A pair is tried in several small jobs, which differ in what the pair leaves open. The rules are those of reading a job,
of the search under pins, and of `run` before it starts.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from meshwright.planner.compile import compile_plan
from meshwright.planner.job.graph_losses import own_graph_violations
from meshwright.planner.job.job import SETTINGS_KEYS, Job, resolve
from meshwright.planner.plan.cost_queries import cost_model_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.solver.result import Limits
from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_shape import run_violations

Axis: TypeAlias = Literal["algorithm", "time", "samples", "rollouts", "scores", "training", "logprobs", "mask", "model"]

VOCABULARY = 32
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
SCALAR = {**DENSE, "architectures": ["Qwen3ForSequenceClassification"]}
MODELS: Mapping[str, Mapping[str, Any]] = {"dense": DENSE, "experts": EXPERTS, "scalar": SCALAR}
"""The configurations of the models, by directory."""

_GENERATED = ["tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"]
_HOSTED = ["environment_scores", "environment_seconds", "environment_error"]
_JUDGE = {
    "after": "w2 w3",
    "template_tokens": 2,
    "verdict": {"max": 2, "fixed": 2},
    "scores": {f"w{number}": float(number % 2) for number in range(VOCABULARY - 2)},
}
HOST_FUNCTION = "tests.runtime.rewarding:third_word"


_REWARDS: Mapping[str, Mapping[str, Any]] = {
    "host": {"name": "third", "function": HOST_FUNCTION},
    "url": {"name": "asked", "url": "http://127.0.0.1:9/score", "failure_score": 0.5, "retry_seconds": 0},
}


@dataclass(frozen=True)
class Feature:
    """A feature of a job. Of one axis a job has one feature; `time` and `scores` may be met with themselves."""

    name: str
    axis: Axis
    title: str
    algorithm: str = ""
    workload: Mapping[str, Any] = field(default_factory=dict)
    pin: str = ""


FEATURES = (
    *(Feature(name, "algorithm", name, algorithm=name) for name in ("ppo", "grpo", "rloo", "reinforce++", "distill")),
    Feature("own", "algorithm", "own graph", algorithm="own"),
    Feature("ahead", "time", "staleness 1"),
    Feature("in_flight", "time", "batches in flight", pin="actor_generate.batches_in_flight=2"),
    Feature("overcommit", "time", "overcommit", pin="actor_generate.overcommit=4"),
    Feature("streaming", "time", "streaming", pin="chunk_tokens=128"),
    Feature("groups", "samples", "groups", workload={"group_size": 4}),
    Feature(
        "dynamic",
        "samples",
        "dynamic sampling",
        workload={"group_size": 4, "dynamic_sampling": {"acceptance": 0.6}},
    ),
    Feature("best_of", "samples", "best of n", workload={"group_size": 2, "best_of": 4}),
    Feature(
        "turns",
        "rollouts",
        "multi-turn",
        workload={"turns": {"number": {"max": 2, "fixed": 2}, "result": {"max": 4, "fixed": 2}, "max_tokens": 200}},
    ),
    Feature("model", "scores", "reward model"),
    Feature("host", "scores", "rewards on hosts"),
    Feature("url", "scores", "a judge behind a URL"),
    Feature("judge", "scores", "a judge that generates"),
    Feature("adapter", "training", "adapter"),
    Feature("generator", "logprobs", "old log-probabilities of the generator"),
    Feature("one_pass", "logprobs", "old log-probabilities of the training pass", workload={"num_minibatches": 1}),
    Feature("mask", "mask", "sampling mask", workload={"kept_tokens": 8}),
    Feature("experts", "model", "experts"),
)
BY_NAME = {one.name: one for one in FEATURES}

Combination: TypeAlias = frozenset[str]


@dataclass(frozen=True)
class Answer:
    """The outcome of a combination, and the sentence of a refusal."""

    outcome: Literal["runs", "planned only", "refused"]
    sentence: str = ""


def job_of(names: Combination) -> dict[str, Any]:
    """The job with these features; what they leave open is as plain as it can be."""
    algorithm = next((one.algorithm for one in FEATURES if one.algorithm and one.name in names), "reinforce++")
    scores = {one.name for one in FEATURES if one.axis == "scores" and one.name in names}
    if not scores and algorithm != "distill":
        scores = {"model"}
    workload: dict[str, Any] = {
        "batch_size": 16,
        "prompt": {"max": 8, "fixed": 6},
        "response": {"max": 160, "median": 30, "p99": 150},
        "num_minibatches": 2,
    }
    for one in FEATURES:
        if one.name in names:
            workload |= copy.deepcopy(dict(one.workload))
    stated = {"algorithm": algorithm} if algorithm != "own" else _own_graph(names, scores)
    rewards = [reward for name, reward in _REWARDS.items() if name in scores]
    return {
        **stated,
        "models": _models(names, algorithm, scores),
        "cluster": {"device": "local", "ranks_per_node": 2},
        "precision": "fp32",
        "workload": workload,
        "staleness": 1 if names & {"ahead", "in_flight", "overcommit"} else 0,
        "data": {"prompts": "prompts.jsonl", "tokenizer": "tokenizer"},
        **({"rewards": rewards} if rewards else {}),
        **({"tool": {"function": "calculator"}} if "turns" in names else {}),
        **_settings(names, algorithm),
        **_old_logprobs(names),
    }


def _old_logprobs(names: Combination) -> dict[str, Any]:
    """The source of the old log-probabilities."""
    if "one_pass" in names:
        return {"old_logprobs": "training"}
    return {"old_logprobs": "generator"} if "generator" in names else {}


def _settings(names: Combination, algorithm: str) -> dict[str, Any]:
    """The settings of a preset: PPO has no penalty in the reward where the old log-probabilities come with the update,
    and a sampling mask needs top_k."""
    settings: dict[str, Any] = {}
    if "one_pass" in names and algorithm == "ppo":
        settings["kl_coefficient"] = 0.0
    if "mask" in names:
        settings["top_k"] = 8
    return {SETTINGS_KEYS[algorithm]: settings} if settings and algorithm in SETTINGS_KEYS else {}


def _models(names: Combination, algorithm: str, scores: set[str]) -> dict[str, Any]:
    """The models of a job. With an adapter, a critic has one too."""
    policy = "experts" if "experts" in names else "dense"
    models: dict[str, Any] = {"actor": {"path": policy}}
    if "adapter" in names:
        models["actor"]["adapter"] = {"rank": 4, "alpha": 8.0}
    if algorithm == "ppo" or (algorithm == "own" and "dynamic" not in names):
        models["critic"] = {"path": "scalar"}
        if "adapter" in names:
            models["critic"]["adapter"] = {"rank": 4, "alpha": 8.0}
    if algorithm in ("ppo", "distill"):
        models["ref" if algorithm == "ppo" else "teacher"] = {"path": policy}
    if scores & {"model", "judge"}:
        models["reward"] = {"path": "dense" if "judge" in scores else "scalar"}
    return models


def _own_graph(names: Combination, scores: set[str]) -> dict[str, Any]:
    """A graph that no preset has, trained by the settings of PPO without a reference; with dynamic sampling, which only
    algorithms without a critic have, by those of GRPO."""
    kept = ["kept"] if "best_of" in names else []
    read = [*(["scores"] if scores & {"model", "judge"} else []), *(_HOSTED[:1] if scores & {"host", "url"} else [])]
    stages: list[dict[str, Any]] = [
        {"name": "actor_generate", "kind": "generation", "role": "actor", "writes": _GENERATED}
    ]
    if scores & {"host", "url"}:
        reads = ["tokens", "prompt_lengths"]
        stages.append({"name": "environment_score", "kind": "environment", "reads": reads, "writes": _HOSTED})
    if scores & {"model", "judge"}:
        score = {
            "name": "reward_score",
            "kind": "inference",
            "role": "reward",
            "reads": ["tokens"],
            "writes": ["scores"],
        }
        stages.append(score | ({"judge": _JUDGE} if "judge" in scores else {}))
    if kept:
        stages.append({"name": "keep_best", "kind": "filter", "reads": read, "writes": kept})
    passes = [("critic", "value", "values"), ("actor", "last_logprob", "proximal_logprobs")]
    waits = ["scores"] if "dynamic" in names and "scores" in read else []
    for role, name, output in passes[1:] if "dynamic" in names else passes:
        reads = ["tokens", *waits, *kept]
        may_stream = role == "critic" and not kept
        one = {"name": name, "kind": "inference", "role": role, "reads": reads, "writes": [output]}
        stages.append(one | ({"may_stream": True} if may_stream else {}))
    if "dynamic" in names:
        reads = ["tokens", "proximal_logprobs", *read, *kept]
        stages.append({"name": "actor_train", "kind": "training", "role": "actor", "reads": reads})
        return {"algorithm": {"stages": stages}, "grpo": {}}
    reads = ["tokens", "values", "proximal_logprobs", *read, *kept]
    stages += [
        {"name": f"{role}_train", "kind": "training", "role": role, "reads": reads} for role in ("actor", "critic")
    ]
    return {"algorithm": {"stages": stages}, "ppo": {}}


def pins_of(names: Combination, plain: Sequence[str]) -> tuple[str, ...]:
    """The pins of a combination, whose graph has these stages that may stream."""
    pins = [BY_NAME[name].pin for name in sorted(names) if BY_NAME[name].pin.startswith("actor_generate")]
    if names & {"ahead", "in_flight", "overcommit", "streaming"}:
        pins += ["actor_generate.pool=0:1", "actor_train.pool=1:1"]
    if "streaming" in names:
        stage = plain[0] if plain else "actor_train"
        pins += [f"{stage}.pool=1:1", f"{stage}.{BY_NAME['streaming'].pin}"]
    return tuple(pins)


@cache
def directory() -> Path:
    """A directory with the configurations of the models and no weights."""
    found = Path(tempfile.mkdtemp(prefix="combinations"))
    for name, config in MODELS.items():
        (found / name).mkdir()
        (found / name / "config.json").write_text(json.dumps(config))
    return found


def planned(names: Combination, place: Path) -> tuple[Job, Plan]:
    """The job of a combination and its plan; its models are below `place`. Raises BadInput if it is refused."""
    job = parse(Job, json.dumps(job_of(names)), "job")
    facts = resolve(job, place)
    pins = pins_of(names, facts.graph.streaming)
    gap = 0.01 if "ahead" in names else 0.2  # that a plan works ahead follows from its being faster
    plan = compile_plan(facts, cost_model_of(facts), pins=pins, limits=Limits(gap=gap))
    if not isinstance(plan, Plan):
        raise BadInput(" ".join(limit.sentence for limit in plan.limits) or "no plan was found.")
    return job, plan


@cache
def answer(names: Combination) -> Answer:
    """The answer of the program to a combination."""
    try:
        job, plan = planned(names, directory())
    except BadInput as error:
        return Answer("refused", str(error))
    sentences = [sentence for role in plan.graph.roles for sentence in run_violations(plan.facts.models.spec(role))]
    sentences += own_graph_violations(job)
    return Answer("planned only", sentences[0]) if sentences else Answer("runs")


def is_one_job(names: Combination) -> bool:
    """True if a job with these features can be written: one algorithm, one kind of reward model, one source of old
    log-probabilities, and a judge that generates only in an own graph."""
    axes = [BY_NAME[name].axis for name in names]
    if any(axes.count(axis) > 1 for axis in ("algorithm", "training", "logprobs", "model")):
        return False
    if "judge" in names and any(BY_NAME[name].axis == "algorithm" for name in names - {"own"}):
        return False
    return not {"model", "judge"} <= names


def completions(pair: Combination) -> Iterator[Combination]:
    """The pair with what it leaves open, the plainest first."""
    axes = {BY_NAME[name].axis for name in pair}
    algorithms = ("own",) if "judge" in pair else ("reinforce++", "grpo", "ppo", "distill", "own")
    for algorithm, groups, scores in itertools.product(algorithms, ((), ("groups",)), ("", "model", "host")):
        names = set(pair)
        if "algorithm" not in axes:
            names.add(algorithm)
        names |= set(groups)
        if "scores" not in axes and not scores and "distill" not in names:
            continue  # only teachers need nothing beside them that scores
        if "scores" not in axes and scores:
            names.add(scores)
        yield frozenset(names)


@cache
def pair_answer(pair: Combination) -> tuple[Answer, Combination]:
    """The best answer to a pair, and the job that has it; of refusals the one whose reason is the pair."""
    tried = list(dict.fromkeys(completions(pair)))
    for names in tried:
        if (found := answer(names)).outcome == "runs":
            return found, names
    for names in tried:
        if answer(names).outcome == "planned only":
            return answer(names), names
    for names in tried:
        if all(answer(names - {one}).outcome == "runs" for one in pair if BY_NAME[one].axis != "algorithm"):
            return answer(names), names
    return answer(tried[0]), tried[0]


def pairs() -> list[Combination]:
    """Every two features that one job can have."""
    found = (frozenset((one.name, other.name)) for one, other in itertools.combinations(FEATURES, 2))
    return [pair for pair in found if is_one_job(pair)]


@cache
def runs() -> tuple[Combination, ...]:
    """Combinations in which every two features that run together meet; a test runs each of them."""
    missing = [pair for pair in pairs() if pair_answer(pair)[0].outcome == "runs"]
    found: list[Combination] = []
    while missing:
        names = pair_answer(missing[0])[1]
        for one in FEATURES:
            more = names | {one.name}
            is_useful = any(pair <= more and not pair <= names for pair in missing)
            if is_useful and is_one_job(more) and answer(more).outcome == "runs":
                names = more
        found.append(names)
        missing = [pair for pair in missing if not pair <= names]
    return tuple(found)


def title(names: Combination) -> str:
    """The features of a combination in words."""
    return ", ".join(one.title for one in FEATURES if one.name in names)


_HEAD = """# What goes together

Every two features of a job, by the program's own rules. `python docs/combinations.py` asks them and writes this page,
and `tests/docs/test_combinations.py` holds it current.

- A number: the two run together. It is a job of [the list below](combinations.md#the-jobs-that-run), which
  `tests/runtime/laws/test_combinations.py` runs for two steps on two CPU ranks.
- `P`: planned only. `R`: refused. The sentences are [below](combinations.md#the-refusals).
- `-`: no job can be written that has both.

A pair is tried with every algorithm and kind of reward that it leaves open; one job that runs is enough. 200 random
combinations of more features are accepted by `run`, or refused in one sentence before any rank starts; one in twenty of
the accepted runs two steps (the same test).
"""


def page() -> str:
    """Markdown."""
    jobs, refusals = runs(), []
    rows = [f"| | {' | '.join(one.title for one in FEATURES)} |", f"|---|{'---|' * len(FEATURES)}"]
    for one in FEATURES:
        cells = []
        for other in FEATURES:
            pair = frozenset((one.name, other.name))
            if one is other:
                cells.append("")
            elif not is_one_job(pair):
                cells.append("-")
            elif (found := pair_answer(pair)[0]).outcome == "runs":
                cells.append(str(next(number for number, names in enumerate(jobs, 1) if pair <= names)))
            else:
                cells.append("P" if found.outcome == "planned only" else "R")
        rows.append(f"| **{one.title}** | {' | '.join(cells)} |")
    for pair in pairs():
        found = pair_answer(pair)[0]
        if found.outcome != "runs":
            refusals.append(f"| {title(pair)} | {found.outcome} | {found.sentence.replace('|', ' ')} |")
    listed = [f"{number}. {title(names)}" for number, names in enumerate(jobs, 1)]
    return "\n".join(
        (
            *(_HEAD, *rows, "", "## The jobs that run", "", *listed, "", "## The refusals", ""),
            *("| features | | sentence |", "|---|---|---|", *refusals, ""),
        )
    )


if __name__ == "__main__":
    sys.stdout.write(page())
