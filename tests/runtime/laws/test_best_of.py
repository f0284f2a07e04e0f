"""A run that trains on the best of several samples learns from those that score best, by `tests.reference`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.best_of import BestOf, Kept
from tests.reference.critic_free import CriticFreeReference, CriticFreeSettings, paid_for
from tests.reference.ppo import Reference, Row, Settings, language_model, rewards_of, scalar_model, scalars, weights_of
from tests.runtime.compared import are_groups, compare_experience, compare_updates, settings_of
from tests.runtime.laws.test_reference import PPO, compare_experience_of_ppo, compare_updates_of_ppo, settings_of_ppo
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, requests_of
from tests.runtime.rewarded import lines
from tests.runtime.sampled import Case, SampledAhead, is_short, paths, prompts_of, request, trained_on, write_two_scores
from tests.seeds import cases

STEPS = 4
TOLERANCE = 1e-4
NUM_PROMPTS = 4
ROWS = Schedule(micro_batch_size=2)
SHORT = {"name": "short", "function": "tests.runtime.rewarding:is_short"}


def best(kept: int, drawn: int) -> dict[str, int]:
    return {"batch_size": NUM_PROMPTS * kept, "group_size": kept, "best_of": drawn}


def case(num_ranks: int, where: dict[str, Where], kept: int = 2, drawn: int = 5, **changes: Any) -> Case:
    return Case(num_ranks, where, **{"workload": best(kept, drawn), **changes})


APART = {"actor_generate": Where("0:1"), "reward_score": Where("1:1", schedule=ROWS)}
CASES = {
    "one rank": case(1, {"other": Where("0:1", schedule=ROWS)}),
    "one rank, ties": case(1, {"other": Where("0:1", schedule=ROWS)}, 2, 6, reward="two_scores"),
    "dp2, ties, minibatches": case(
        2,
        {"other": Where("0:2", "dp2", ROWS)},
        2,
        6,
        reward="two_scores",
        workload={**best(2, 6), "num_minibatches": 2},
    ),
    "tp2, RLOO": case(
        2, {"other": Where("0:2", "tp2,sp", ROWS), "actor_generate": Where("0:2", "tp2")}, 3, algorithm="rloo"
    ),
    "pp2, REINFORCE++ of the best": case(2, {"other": Where("0:2", "pp2", ROWS)}, 1, 3, algorithm="reinforce++"),
    "generation and scores apart": case(
        2, {**APART, "other": Where("1:1", schedule=ROWS)}, settings={"kl_coefficient": 0.1}
    ),
}
CASES |= {
    "one step ahead, scores beside training": case(
        2, {**APART, "other": Where("1:1", schedule=ROWS)}, 2, 6, reward="two_scores", steps_ahead=1
    ),
}
OF_PPO = {
    "one rank, PPO": case(1, {"other": Where("0:1", schedule=ROWS)}, 1, 3, algorithm="ppo", settings=PPO),
    "dp2, PPO": case(2, {"other": Where("0:2", "dp2", ROWS)}, 2, 4, algorithm="ppo", settings=PPO),
}
OF_HOSTS = {
    "hosts, dp2": case(2, {"other": Where("0:2", "dp2", ROWS)}, rewards=(SHORT,), has_reward_model=False),
    "hosts and a reward model apart": case(2, {**APART, "other": Where("1:1", schedule=ROWS)}, rewards=(SHORT,)),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case."""
    directory = tmp_path_factory.mktemp("job")

    def asked(where: Path, name: str, one: Case) -> RunRequest:
        if not (where / "two_scores").exists():
            shutil.copytree(where / "scores", where / "two_scores")
            write_two_scores(where / "two_scores")
        return request(where, name, one, steps=STEPS)

    return requests_of(directory, CASES | OF_PPO | OF_HOSTS, asked)


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


def chosen_of(asked: RunRequest, settings: Any) -> BestOf:
    """What the reference keeps of the prompts of a run."""
    workload = asked.job.workload
    assert workload.best_of
    return BestOf(
        prompts_of(asked), settings, num_prompts=NUM_PROMPTS, drawn=workload.best_of, kept=workload.group_size
    )


def is_kept(run: Observed, asked: RunRequest, line: dict[str, Any], kept: Kept) -> None:
    """A step trained on what the reference keeps, and says of how many it was chosen."""
    assert trained_on(run, line["step"]) == [row.ids.tolist() for row in kept.rows]
    are_groups(kept.rows, asked.job.workload.group_size)
    num_drawn, num_kept = len(kept.scores), len(kept.rows)
    told = {"generated_samples": num_drawn, "trained_samples": num_kept, "dropped_samples": num_drawn - num_kept}
    assert {key: line[key] for key in told} == told
    assert line["sampled_score"] == pytest.approx(sum(kept.scores) / num_drawn, rel=TOLERANCE, abs=TOLERANCE)
    assert line["tied_prompts"] == kept.tied / NUM_PROMPTS


def scored_by(model: Any) -> Callable[[Row], float]:
    return lambda row: float(scalars(model, [row])[0][-1].detach())


def paid_by(settings: CriticFreeSettings) -> Callable[[Row, float], float]:
    return lambda row, score: float(paid_for(torch.tensor(score, dtype=torch.float64), row, settings))


def paid_in_ppo(settings: Settings) -> Callable[[Row, float], float]:
    """What PPO adds to the reward of the last token of a response with a score."""

    def paid(row: Row, score: float) -> float:
        nothing = torch.zeros(1, dtype=torch.float64)
        return float(rewards_of(nothing[0] + score, nothing, nothing, row.is_cut(settings), settings))

    return paid


@pytest.mark.slow
@cases("name", CASES, few=2)
def test_a_run_keeps_and_learns_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, found = runs[name], requests[name], Distances()
    own = paths(asked)
    judge = CriticFreeReference(own[Role.ACTOR], own[Role.REF], own[Role.REWARD], settings_of(asked))
    chosen, tied = chosen_of(asked, settings_of(asked)), 0
    batches = SampledAhead(
        CASES[name].steps_ahead,
        STEPS,
        lambda version: chosen.batch(judge.actor, scored_by(judge.reward), version, paid_by(settings_of(asked))),
    )
    for step, line in enumerate(lines(asked.out)):
        kept = batches.batch(step)
        is_kept(run, asked, line, kept)
        compared = judge.step(step, kept.rows)
        compare_experience(found, run, step, kept.rows, compared)
        compare_updates(found, run, step, kept.rows, compared)
        tied += kept.tied
    found.add_all("weights", run.weights("actor"), weights_of(judge.actor))
    assert found.beyond(TOLERANCE) == {}
    assert (tied > 0) == (CASES[name].reward == "two_scores")


@pytest.mark.slow
@cases("name", OF_PPO, few=1)
def test_ppo_learns_of_the_best_samples_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, found = runs[name], requests[name], Distances()
    settings, own = settings_of_ppo(asked), paths(asked)
    judge = Reference(*(own[role] for role in asked.job.models.roles), settings)
    chosen = chosen_of(asked, settings)
    for step, line in enumerate(lines(asked.out)):
        kept = chosen.batch(judge.actor, scored_by(judge.reward), step, paid_in_ppo(settings))
        is_kept(run, asked, line, kept)
        learnt = judge.step(step, kept.rows)
        compare_experience_of_ppo(found, run, step, kept.rows, learnt)
        compare_updates_of_ppo(found, run, step, kept.rows, learnt)
    for role, model in (("actor", judge.actor), ("critic", judge.critic)):
        found.add_all(f"{role} weights", run.weights(role), weights_of(model))
    assert found.beyond(TOLERANCE) == {}


@pytest.mark.slow
@cases("name", OF_HOSTS, few=1)
def test_scores_of_hosts_keep_the_samples_that_the_reference_keeps(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked = runs[name], requests[name]
    own = paths(asked)
    policy, settings = language_model(own[Role.ACTOR]), settings_of(asked)
    of_model = scored_by(scalar_model(own[Role.REWARD])) if Role.REWARD in own else None
    line = lines(asked.out)[0]
    kept = chosen_of(asked, settings).batch(
        policy, lambda row: is_short(row) + (of_model(row) if of_model else 0.0), 0, paid_by(settings)
    )
    is_kept(run, asked, line, kept)
    assert line["reward_short"] == sum(map(is_short, kept.rows)) / len(kept.rows)
