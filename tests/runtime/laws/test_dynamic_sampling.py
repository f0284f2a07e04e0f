"""A run of dynamic sampling learns from the first groups with a signal in dealt order, by `tests.reference`."""

from __future__ import annotations

import pytest

from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from meshwright.runtime.execution.request import RunRequest
from tests.reference.critic_free import CriticFreeReference
from tests.reference.ppo import Row, language_model, scalar_model, scalars, weights_of
from tests.runtime.compared import are_groups, compare_experience, compare_updates, settings_of
from tests.runtime.observed import Observed
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import Distances, Runs, requests_of
from tests.runtime.rewarded import lines
from tests.runtime.sampled import (
    DYNAMIC,
    NUM_GROUPS,
    Case,
    SampledAhead,
    is_short,
    paths,
    request,
    said,
    sampling,
    trained_on,
    write_two_scores,
)
from tests.seeds import cases

STEPS = 4
TOLERANCE = 1e-4
ROWS = Schedule(micro_batch_size=2)
APART = {"actor_generate": Where("0:1"), "reward_score": Where("1:1", schedule=ROWS)}
SLOTS = Where("0:1", schedule=Schedule(generation_slots=4))
HOSTED = {"rewards": ({"name": "short", "function": "tests.runtime.rewarding:is_short"},), "has_reward_model": False}

CASES = {
    "one rank": Case(1, {"other": Where("0:1", schedule=ROWS)}),
    "one rank, few slots": Case(
        1,
        {"other": Where("0:1", schedule=ROWS), "actor_generate": Where("0:1", schedule=Schedule(generation_slots=4))},
    ),
    "tp2, RLOO": Case(2, {"other": Where("0:2", "tp2,sp", ROWS), "actor_generate": Where("0:2", "tp2")}, "rloo"),
    "dp2": Case(2, {"other": Where("0:2", "dp2", ROWS)}, settings={"kl_coefficient": 0.1}),
    "pp2": Case(2, {"other": Where("0:2", "pp2", ROWS)}),
    "generation and scores apart": Case(2, {**APART, "other": Where("1:1", schedule=ROWS)}),
    "scores apart, paid after clip and penalties": Case(
        2,
        {**APART, "other": Where("1:1", schedule=ROWS)},
        settings={"reward_clip": 0.05, "missing_end_penalty": 0.1, "overlong_tokens": 4, "overlong_penalty": 0.2},
    ),
}
CASES |= {
    "one step ahead, scores apart": Case(2, {**APART, "other": Where("1:1", schedule=ROWS)}, steps_ahead=1),
    "one step ahead, scores beside generation": Case(
        2, {"actor_generate": SLOTS, "reward_score": Where("0:1"), "other": Where("1:1", schedule=ROWS)}, steps_ahead=1
    ),
    "two steps ahead": Case(2, {**APART, "other": Where("0:1", schedule=ROWS)}, "rloo", steps_ahead=2),
}
OF_THE_BEST = {**DYNAMIC, "batch_size": NUM_GROUPS * 2, "group_size": 2, "best_of": 4}
CASES |= {
    "dp2, groups of the best": Case(2, {"other": Where("0:2", "dp2", ROWS)}, workload=OF_THE_BEST),
    "groups of the best, one step ahead": Case(
        2, {**APART, "other": Where("1:1", schedule=ROWS)}, "rloo", workload=OF_THE_BEST, steps_ahead=1
    ),
    "tp2, groups of the best": Case(
        2,
        {"other": Where("0:2", "tp2,sp", ROWS), "actor_generate": Where("0:2", "tp2")},
        settings={"kl_coefficient": 0.1},
        workload=OF_THE_BEST,
    ),
}
FIXED = {"actor_learning_rate": 1e-12}
OF_HOSTS = {
    "hosts, one rank": Case(1, {"other": Where("0:1", schedule=ROWS)}, settings=FIXED, **HOSTED),  # type: ignore[arg-type]
    "hosts, dp2": Case(2, {"other": Where("0:2", "dp2", ROWS)}, settings=FIXED, **HOSTED),  # type: ignore[arg-type]
    "hosts, training apart": Case(
        2,
        {"actor_generate": Where("0:1"), "other": Where("1:1", schedule=ROWS)},
        settings=FIXED,
        **HOSTED,  # type: ignore[arg-type]
    ),
    "hosts, one step ahead": Case(
        2,
        {"actor_generate": Where("0:1"), "other": Where("1:1", schedule=ROWS)},
        settings=FIXED,
        steps_ahead=1,
        **HOSTED,  # type: ignore[arg-type]
    ),
    "hosts, dp2, groups of the best": Case(
        2,
        {"other": Where("0:2", "dp2", ROWS)},
        settings=FIXED,
        workload=OF_THE_BEST,
        **HOSTED,  # type: ignore[arg-type]
    ),
    "hosts and a reward model apart": Case(
        2,
        {**APART, "other": Where("1:1", schedule=ROWS)},
        settings=FIXED,
        rewards=HOSTED["rewards"],  # type: ignore[arg-type]
    ),
}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRequest]:
    """Of every case."""
    directory = tmp_path_factory.mktemp("job")
    found = requests_of(directory, CASES | OF_HOSTS, lambda *asked: request(*asked, steps=STEPS))
    write_two_scores(directory / "scores")
    return found


@pytest.fixture(scope="module")
def runs(requests: dict[str, RunRequest]) -> dict[str, Observed]:
    return Runs(requests)


@pytest.mark.slow
@cases("name", CASES, few=1)
def test_a_run_draws_keeps_and_learns_what_the_reference_does(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked, found = runs[name], requests[name], Distances()
    own = paths(asked)
    judge = CriticFreeReference(own[Role.ACTOR], own[Role.REF], own[Role.REWARD], settings_of(asked))
    chosen, num_dropped = sampling(asked), 0

    def score(row: Row) -> float:
        return float(scalars(judge.reward, [row])[0][-1].detach())

    batches = SampledAhead(CASES[name].steps_ahead, STEPS, lambda version: chosen.batch(judge.actor, score, version))
    for step, line in enumerate(lines(asked.out)):
        batch = batches.batch(step)
        assert trained_on(run, step) == [row.ids.tolist() for row in batch.rows]
        assert {key: line[key] for key in said(batch)} == pytest.approx(said(batch))
        are_groups(batch.rows, asked.job.workload.group_size)
        if asked.job.workload.best_of:
            assert line["tied_prompts"] == pytest.approx(batch.tied / batch.num_drawn)
            assert line["generated_samples"] == batch.num_drawn * asked.job.workload.best_of
        compared = judge.step(step, batch.rows)
        compare_experience(found, run, step, batch.rows, compared)
        compare_updates(found, run, step, batch.rows, compared)
        num_dropped += batch.num_drawn - batch.num_with_signal
    found.add_all("weights", run.weights("actor"), weights_of(judge.actor))
    assert found.beyond(TOLERANCE) == {}
    assert num_dropped > 0


@pytest.mark.slow
@cases("name", OF_HOSTS, few=1)
def test_scores_of_hosts_choose_the_groups_that_the_reference_chooses(
    runs: dict[str, Observed], requests: dict[str, RunRequest], name: str
) -> None:
    run, asked = runs[name], requests[name]
    chosen = sampling(asked)
    own = paths(asked)
    policy = language_model(own[Role.ACTOR])
    reward = scalar_model(own[Role.REWARD]) if Role.REWARD in own else None

    def score(row: Row) -> float:
        return is_short(row) + (float(scalars(reward, [row])[0][-1].detach()) if reward else 0.0)

    for step, line in enumerate(lines(asked.out)):
        batch = chosen.batch(policy, score, step)
        assert trained_on(run, step) == [row.ids.tolist() for row in batch.rows]
        assert {key: line[key] for key in said(batch)} == pytest.approx(said(batch))
        assert line["reward_short"] == sum(map(is_short, batch.rows)) / len(batch.rows)
        assert line["score"] == pytest.approx(sum(map(score, batch.rows)) / len(batch.rows), rel=TOLERANCE)
