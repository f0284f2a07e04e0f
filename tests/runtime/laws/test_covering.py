"""Ten runs in which every two of algorithm, kind of layout, way of working, reward and adapter meet.

Each is compared with an independent float64 reference over two steps: what it samples, scores, weighs and trains. The
same references are met one feature at a time, over more steps, by the tests of each algorithm (`make check-all`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeAlias

import pytest
import yaml

from meshwright.planner.job.job import SETTINGS_KEYS
from meshwright.planner.plan import layout_and_schedule_rules
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference import low_rank
from tests.reference.critic_free import CriticFreeReference
from tests.reference.distillation import DistilledReference
from tests.reference.ppo import Reference, Scorer, weights_of
from tests.runtime.adapting import compare_adapter, started
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.compared import compare_experience, compare_updates, settings_of
from tests.runtime.laws.test_reference import compare_experience_of_ppo, compare_updates_of_ppo, settings_of_ppo
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, drawn_in, request_of, requests_of
from tests.runtime.rewarded import lines
from tests.runtime.sampled import is_short
from tests.runtime.small_job import VOCAB_SIZE, write_job

STEPS, BATCH, GROUP, MAX_RESPONSE, NUM_RANKS = 2, 16, 4, 12, 4
TOLERANCE = 1e-4
AXES = ("tp", "pp", "dp", "cp")
WAYS = ("synchronous", "streaming", "ahead")
SHORT = {"name": "short", "function": "tests.runtime.rewarding:is_short"}
ADAPTER = {"rank": 4, "alpha": 6.0, "targets": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}

SETTINGS: dict[str, Any] = {
    "actor_learning_rate": 1e-3,
    "adam_beta2": 0.98,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "entropy_coefficient": 0.01,
    "temperature": 0.8,
    "top_k": 24,
    "top_p": 0.9,
    "seed": 3,
}
OF_PPO = {
    "critic_learning_rate": 1e-3,
    "actor_schedule": {"warmup_steps": 3, "decay": "cosine", "decay_steps": 24},
    "reward_scale": 1.5,
    "reward_clip": 0.8,
    "kl_coefficient": 0.2,
    "gamma": 0.98,
    "truncation": "bootstrap",
}

Reward: TypeAlias = Literal["model", "function", "teacher"]


@dataclass(frozen=True)
class Case:
    """A plan on four ranks: generation on the first two, `trains` on the last two."""

    algorithm: Algorithm
    reward: Reward
    has_adapter: bool
    is_ahead: bool
    where: Mapping[str, Where]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> list[tuple[str, str]]:
        """Every feature of the case, with its kind."""
        layouts = [Layout.parse(place.layout) for place in self.where.values()]
        streams = any(place.schedule.chunk_tokens for place in self.where.values())
        ways = ["ahead"] if self.is_ahead else ["synchronous"]
        return [
            ("algorithm", self.algorithm),
            ("reward", self.reward),
            ("adapter", str(self.has_adapter)),
            *(("way", way) for way in [*ways, *(["streaming"] if streams else [])]),
            *(("axis", axis) for axis in AXES if any(getattr(layout, axis) > 1 for layout in layouts)),
        ]


def rows(number: int, **schedule: Any) -> Schedule:
    return Schedule(micro_batch_size=number, **schedule)


def generating(layout: str, **schedule: Any) -> Where:
    """Generation on the first two ranks."""
    return Where("0:2", layout, Schedule(**schedule))


def second(layout: str, number: int = 4, **schedule: Any) -> Where:
    """A stage on the last two ranks; sequences that are sharded are taken one at a time."""
    return Where("2:2", layout, rows(1 if "cp" in layout else number, **schedule))


IN_FLIGHT = {"generation_slots": 8, "batches_in_flight": 2}

CASES = {
    "PPO": Case(
        "ppo",
        "model",
        has_adapter=False,
        is_ahead=False,
        where={
            "actor_generate": generating("tp2"),
            "reward_score": second("dp2", 8, chunk_tokens=5),
            "ref_logprob": second("tp2", 8, chunk_tokens=3),
            "critic_train": second("pp2", 2),
            "actor_train": second("tp2,sp", recompute=Recompute.FULL),
            "other": second("dp2"),
        },
        settings=OF_PPO,
    ),
    "PPO ahead": Case(
        "ppo",
        "function",
        has_adapter=True,
        is_ahead=True,
        where={
            "actor_generate": generating("dp2", **IN_FLIGHT),
            "ref_logprob": Where("0:2", "pp2", rows(8)),
            "actor_train": second("cp2"),
            "critic_train": second("tp2", offload=Offload.OPTIMIZER),
            "other": second("dp2"),
        },
        settings={**OF_PPO, "importance_cap": 1.1},
    ),
    "GRPO": Case(
        "grpo",
        "function",
        has_adapter=True,
        is_ahead=False,
        where={
            "actor_generate": generating("pp2"),
            "ref_logprob": second("tp2", 8, chunk_tokens=4),
            "actor_train": second("cp2", recompute=Recompute.SELECTIVE),
            "other": second("dp2"),
        },
        settings={"kl_coefficient": 0.1},
    ),
    "GRPO ahead": Case(
        "grpo",
        "model",
        has_adapter=False,
        is_ahead=True,
        where={
            "actor_generate": generating("dp2", **IN_FLIGHT),
            "reward_score": Where("0:2", "tp2", rows(16)),
            "actor_train": second("pp2", 2),
            "other": second("cp2"),
        },
        settings={"loss_mean": "token", "clip_ratio_high": 0.28, "overlong_tokens": 6, "overlong_penalty": 0.5},
    ),
    "RLOO": Case(
        "rloo",
        "model",
        has_adapter=True,
        is_ahead=False,
        where={
            "actor_generate": generating("tp2"),
            "reward_score": second("pp2", 8, chunk_tokens=5),
            "actor_train": second("dp2"),
            "other": second("cp2"),
        },
        settings={"kl_coefficient": 0.1},
    ),
    "RLOO ahead": Case(
        "rloo",
        "function",
        has_adapter=False,
        is_ahead=True,
        where={
            "actor_generate": generating("tp2", generation_slots=16),
            "actor_train": second("tp2,sp", recompute=Recompute.SELECTIVE),
            "other": second("dp2"),
        },
        settings={"missing_end_penalty": 0.5},
    ),
    "REINFORCE++": Case(
        "reinforce++",
        "function",
        has_adapter=False,
        is_ahead=False,
        where={
            "actor_generate": generating("dp2"),
            "ref_logprob": second("pp2", 8, chunk_tokens=4),
            "actor_train": second("cp2", 2),
            "other": second("tp2,sp"),
        },
        settings={"kl_coefficient": 0.1},
    ),
    "REINFORCE++ ahead": Case(
        "reinforce++",
        "model",
        has_adapter=True,
        is_ahead=True,
        where={
            "actor_generate": generating("pp2", generation_slots=16),
            "actor_train": second("tp2", offload=Offload.OPTIMIZER),
            "other": second("cp2"),
        },
        settings={"kl_coefficient": 0.1, "group_baseline": True},
    ),
    "distillation": Case(
        "distill",
        "teacher",
        has_adapter=False,
        is_ahead=False,
        where={
            "actor_generate": generating("dp2"),
            "teacher_logprob": second("tp2", 8, chunk_tokens=4),
            "actor_train": second("pp2", 2),
            "other": second("cp2"),
        },
    ),
    "distillation ahead": Case(
        "distill",
        "teacher",
        has_adapter=True,
        is_ahead=True,
        where={
            "actor_generate": generating("dp2", **IN_FLIGHT),
            "teacher_logprob": Where("0:2", "pp2", rows(16)),
            "actor_train": second("tp2,sp"),
            "other": second("cp2"),
        },
    ),
}


def pairs(case: Case) -> Iterator[frozenset[tuple[str, str]]]:
    """Every two features of a case that are of different kinds."""
    for one, other in itertools.combinations(case.features, 2):
        if one[0] != other[0]:
            yield frozenset((one, other))


def test_every_two_features_meet_in_a_case() -> None:
    """A student has no reward but its teacher here (`test_distillation_reference` has others beside it), and a teacher
    no other student."""
    kinds = {
        "algorithm": [*SETTINGS_KEYS],
        "reward": ["model", "function", "teacher"],
        "adapter": ["True", "False"],
        "way": WAYS,
        "axis": AXES,
    }
    features = [(kind, name) for kind, names in kinds.items() for name in names]
    wanted = {frozenset((a, b)) for a, b in itertools.combinations(features, 2) if a[0] != b[0]}
    distilled, taught = ("algorithm", "distill"), ("reward", "teacher")
    impossible = {pair for pair in wanted if (distilled in pair and ("reward", "model") in pair)}
    impossible |= {pair for pair in wanted if (distilled in pair and ("reward", "function") in pair)}
    impossible |= {
        pair for pair in wanted if taught in pair and any(n != "distill" for k, n in pair if k == "algorithm")
    }
    met = {pair for case in CASES.values() for pair in pairs(case)}
    assert sorted(map(sorted, wanted - impossible - met)) == []


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """The run of every case; the teacher is deeper and wider than its student."""
    directory = tmp_path_factory.mktemp("job")
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4}
    write_checkpoint(directory / "large", "Qwen2", seed=7, tie_word_embeddings=True, **shape)
    with pytest.MonkeyPatch.context() as patch:  # a plan would not cut sequences as short as these
        patch.setattr(layout_and_schedule_rules, "MIN_CONTEXT_TOKENS", 1)
        return requests_of(directory, CASES, _request)


def _request(directory: Path, name: str, case: Case) -> RunRequest:
    job = yaml.safe_load(write_job(directory, num_ranks=NUM_RANKS).read_text())
    del job["ppo"]
    paths = {"actor": "policy", "ref": "policy" if case.has_adapter else "ref"}
    if case.reward == "model":
        paths["reward"] = "scores"
    if case.algorithm == "ppo":
        paths["critic"] = "values"
    if case.algorithm == "distill":
        paths = {"actor": "policy", "teacher": "large"}
    job["models"] = {role: {"path": path} for role, path in paths.items()}
    if case.has_adapter:
        job["models"]["actor"]["adapter"] = ADAPTER
    if case.reward == "function":
        job["rewards"] = [SHORT]
    job["workload"] |= {"response": {"max": MAX_RESPONSE, "fixed": 8}, "batch_size": BATCH}
    if case.algorithm != "ppo":
        job["workload"]["group_size"] = GROUP
    job |= {"algorithm": case.algorithm, SETTINGS_KEYS[case.algorithm]: {**SETTINGS, **case.settings}}
    job["staleness"] = 2 if case.is_ahead else 0
    return request_of(job, directory, name, case.where, steps=STEPS, steps_ahead=int(case.is_ahead))


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_samples_and_trains_as_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    case, run, asked, found = CASES[name], runs[name], requests[name], Distances()
    judge = reference_of(case, asked)
    for step in range(STEPS):
        samples = drawn_in(run, step, BATCH)
        computed = judge.step(step, samples)
        line = lines(asked.out)[step]
        assert line.get("reward_short") == (mean(map(is_short, samples)) if case.reward == "function" else None)
        if isinstance(judge, Reference):
            compare_experience_of_ppo(found, run, step, samples, computed)
            compare_updates_of_ppo(found, run, step, samples, computed)
        else:
            compare_experience(found, run, step, samples, computed)
            compare_updates(found, run, step, samples, computed)
    assert ("scores" in run.steps[0]) == (case.reward == "model")
    if case.has_adapter:
        compare_adapter(found, run, asked.directory / "policy", judge.actor)
    else:
        found.add_all("weights", run.weights("actor"), weights_of(judge.actor))
    if isinstance(judge, Reference):
        found.add_all("critic weights", run.weights("critic"), weights_of(judge.critic))
    assert found.beyond(TOLERANCE) == {}


def reference_of(case: Case, asked: RunRequest) -> Reference | CriticFreeReference:
    """The reference of a case, from the same directories."""
    paths = {role: asked.directory / asked.job.models.source(role).path for role in asked.job.models.roles}
    reward: Path | Scorer | None = is_short if case.reward == "function" else paths.get(Role.REWARD)
    judge: Reference | CriticFreeReference
    if case.algorithm == "ppo":
        assert reward is not None
        judge = Reference(paths[Role.ACTOR], paths[Role.CRITIC], paths[Role.REF], reward, settings_of_ppo(asked))
    elif case.algorithm == "distill":
        judge = DistilledReference(paths[Role.ACTOR], [asked.directory / "large"], settings_of(asked))
    else:
        judge = CriticFreeReference(paths[Role.ACTOR], paths[Role.REF], reward, settings_of(asked))
    if adapter := asked.job.models.actor.adapter:
        judge.start_from(low_rank.adapted(judge.actor, started(asked), adapter.scale))
    return judge
