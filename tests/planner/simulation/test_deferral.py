"""Overcommit grows so slowly that batches stay what is drawn; controllers follow the scores and not the deferral."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import numpy as np
import pytest

from meshwright.cost_models.period_ends import FirstEnded
from meshwright.planner.program.controllers import Controllers, OvercommitTuner, StepObservation
from meshwright.planner.simulation.pacing import num_deferred, ramp_up_steps
from meshwright.planner.simulation.simulated_flight import PeriodResult, SimulatedFlight, SimulatedSequence
from tests.planner.drawn import carrying_over
from tests.planner.simulation.test_controlled import controlled
from tests.planner.simulation.test_simulated_flight import TIMES

ROWS, DEFERRAL, MEAN = 48, 8, 64.0


def lengths(num_steps: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[step, row]: responses that end with the same probability after every token, as those of the measured job; each
    batch has the middles of equally likely parts, so that all batches are alike."""
    parts = (np.arange(ROWS) + 0.5) / ROWS
    alike = np.ceil(-MEAN * np.log(1 - parts)).astype(np.int64)
    return np.array([np.random.default_rng([seed, step]).permutation(alike) for step in range(num_steps)])


def play(num_steps: int, most: int, *, grows: bool, seed: int = 0) -> list[PeriodResult]:
    drawn, flight = lengths(2 * num_steps, seed), SimulatedFlight(2 * ROWS, 1, TIMES)
    arriving = (
        SimulatedSequence(step=step, row=row, prompt_tokens=8, response_tokens=int(tokens))
        for step, of_step in enumerate(drawn)
        for row, tokens in enumerate(of_step)
    )
    turns, admitted = [], 0
    for step in range(num_steps):
        ahead = num_deferred(step, admitted - step * ROWS, most, ROWS) if grows else most
        new = list(itertools.islice(arriving, max(0, (step + 1) * ROWS + ahead - admitted)))
        admitted += len(new)
        turns.append(flight.run_period(new, FirstEnded(ROWS, DEFERRAL)))
    return turns


def delivered_tokens(turns: list[PeriodResult]) -> list[float]:
    return [statistics.fmean(one.response_tokens for one in turn.delivered) for turn in turns]


@pytest.mark.parametrize("most", [ROWS // 2, ROWS])
def test_the_first_batches_are_within_a_tenth_of_what_is_drawn(most: int) -> None:
    """On average over three runs; what is left out at first is a sequence or two, now longer and now shorter."""
    drawn = float(lengths(1, 0).mean())
    played = [delivered_tokens(play(80, most, grows=True, seed=seed)) for seed in range(3)]
    shares = np.mean(played, axis=0) / drawn
    assert all(0.88 < share < 1.1 for share in shares[:10])
    assert 0.93 < shares[:10].mean() < 1
    assert shares[40:].mean() == pytest.approx(1.0, abs=0.02)
    at_once = np.array(delivered_tokens(play(80, most, grows=False))) / drawn
    assert at_once[0] < 0.55  # what it is for
    assert at_once[40:].mean() == pytest.approx(1.0, abs=0.02)


def test_the_overcommit_reaches_what_is_allowed_and_follows_it_down_at_once() -> None:
    for num_rows, most in itertools.product((1, 8, 24, 100), (1, 7, 100)):
        before, needed = 0, ramp_up_steps(most, num_rows)
        for step in range(needed):
            before = num_deferred(step, before, most, num_rows)
        assert before == most
        assert num_deferred(needed, before, most, num_rows) == most
        assert num_deferred(needed, before, most // 2, num_rows) == most // 2


def score_of(one: SimulatedSequence) -> float:
    """A policy that gets better step by step, where a long response is the better one."""
    return 0.002 * one.step + one.response_tokens / MEAN


def test_the_controller_does_not_follow_what_deferral_does_to_the_scores() -> None:
    """A policy that gets worse holds nothing back in the end, though deferral alone lets delivered scores rise."""
    plan = controlled(carrying_over(overcommits=True)[0]).model_copy(update={"staleness": DEFERRAL})
    turns = play(24, ROWS, grows=False)
    worse = [[score_of(one) - 0.012 * one.step for one in turn.delivered] for turn in turns]
    means = [statistics.fmean(scores) for scores in worse]
    assert statistics.linear_regression(range(10), means[:10]).slope > 0
    tuner = OvercommitTuner(increment=1, largest=8, overcommit=4)
    for mean in means[:10]:
        tuner = tuner.after(mean)
    assert tuner.overcommit == 5  # what following the delivered scores would do
    controllers, largest = Controllers(plan), plan.placement("actor_generate").schedule.overcommit
    for step, (turn, scores) in enumerate(zip(turns, worse, strict=True)):
        ages = Counter(step - one.first_period for one in turn.delivered)
        of_age = {
            age: statistics.fmean(
                score for one, score in zip(turn.delivered, scores, strict=True) if step - one.first_period == age
            )
            for age in ages
        }
        begun = tuple((ages[age], of_age.get(age, 0.0)) for age in range(plan.staleness + 1))
        controllers.observe(StepObservation(step=step, seconds=1.0, scores_by_age=begun))
    found = [controllers.setting(turn).overcommit for turn in range(len(turns) + controllers.delay)]
    assert found[0] == largest
    assert found[-1] < largest
