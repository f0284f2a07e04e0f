"""Versions are measured: what a run is told of its weights is what they are, and what must not be is stopped."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.plan.steps_ahead import steps_ahead_patterns, synchronous
from meshwright.planner.program.program import Send
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import RunFailed
from meshwright.runtime.execution.megatron_device import MegatronDevice, StageRunner
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.messages.experience import Experience, ExperienceTransport, StepExperience
from meshwright.runtime.training.refit import RefitCopy
from meshwright.runtime.training.versions import Version, cache_gap, generator_gap, scores_by_age, staleness
from tests.runtime.carried_out import carried_out
from tests.runtime.execution.test_train import read_lines
from tests.runtime.laws.test_ahead import DISJOINT, working_ahead
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import RankError, run_on_ranks
from tests.runtime.small_job import OF_TIME, request, write_job
from tests.seeds import cases


def batch_of(step: int, rows: list[tuple[int, int, float]]) -> StepExperience:
    """Rows of two prompt and two response tokens: the versions that drew these, and how far the log-probability of the
    first lies from the proximal one."""
    batch = StepExperience(step=step, rows=range(len(rows)))
    for row, (first, then, apart) in enumerate(rows):
        proximal = torch.tensor([0.0, -1.0, -2.0, 0.0])
        fields = {
            "tokens": torch.tensor([5, 6, 7, 8]),
            "prompt_lengths": torch.tensor([2]),
            "versions": torch.tensor([0, first, then, 0], dtype=torch.int32),
            "behaviour_logprobs": proximal + torch.tensor([0.0, apart, 0.0, 0.0]),
            "proximal_logprobs": proximal,
        }
        for field, values in fields.items():
            batch.experience.put(field, row, values)
    return batch


def test_the_generator_is_compared_with_the_trainer_on_responses_of_the_same_weights() -> None:
    batch = batch_of(3, [(3, 3, 0.25), (2, 2, 9.0), (2, 3, 9.0)])
    assert generator_gap(batch, batch.rows, 3).metrics("gap") == {"gap": 0.125, "max_gap": 0.25}
    assert generator_gap(batch, (1, 2), 3).metrics("gap") == {}
    assert generator_gap(batch, (), 3).metrics("gap") == {}


def test_the_mismatch_has_the_estimators_of_the_field() -> None:
    # Two tokens: log p - log q is 0.25 of the one, 0 of the other.
    found = generator_gap(batch_of(3, [(3, 3, 0.25)]), [0], 3).mismatch()
    assert found["token_mult_prob_error"] == pytest.approx((math.exp(0.25) + 1) / 2)
    assert found["gen_kl_error"] == pytest.approx((math.exp(-0.25) - (-0.25) - 1) / 2)


@given(st.lists(st.floats(0.05, 0.95), min_size=2, max_size=2), st.lists(st.floats(0.05, 0.95), min_size=2, max_size=2))
def test_the_estimate_of_kl_is_right_on_average_over_what_the_generator_draws(p: list[float], q: list[float]) -> None:
    p, q = ([share / sum(weights) for share in weights] for weights in (p, q))
    drawn = [generator_gap(batch_of(3, [(3, 3, math.log(a / b))]), [0], 3).kl_sum for a, b in zip(p, q, strict=True)]
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert sum(a * estimate for a, estimate in zip(p, drawn, strict=True)) == pytest.approx(exact, abs=1e-6)


def test_what_kept_keys_and_values_change_is_seen_on_new_tokens_of_older_responses() -> None:
    batch = batch_of(3, [(3, 3, 9.0), (2, 2, 9.0), (2, 3, 9.0)])
    later = torch.tensor([0.0, 0.0, 0.5, 0.0])
    batch.experience.put("behaviour_logprobs", 2, batch.experience.get("proximal_logprobs", 2) + later)
    assert cache_gap(batch, batch.rows, 3).metrics("gap") == {"gap": 0.5, "max_gap": 0.5}


def test_a_response_is_as_old_as_the_policy_that_began_it_whoever_ended_it() -> None:
    batch = batch_of(3, [(3, 3, 0.0), (2, 3, 0.0), (2, 2, 0.0)])
    for row, score in enumerate((1.0, 2.0, 4.0)):
        batch.experience.put("scores", row, torch.tensor([score]))
    found = scores_by_age(batch, 3, 2)
    assert found == {
        "rows_of_age_0": 1,
        "rows_of_age_1": 2,
        "rows_of_age_2": 0,
        "score_of_age_0": 1,
        "score_of_age_1": 3,
    }


def test_staleness_is_the_distance_of_the_versions() -> None:
    assert staleness(batch_of(3, [(3, 3, 0.0), (1, 2, 0.0)]), 3, 2).tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize(
    ("version", "bound", "sentence"),
    [
        (
            0,
            0,
            "step 3: a token was sampled by version 0 of the policy, 3 updates before .* the plan allows 0; .*--resume",
        ),
        (
            0,
            2,
            "step 3: a token was sampled by version 0 of the policy, 3 updates before .* the plan allows 2; .*--resume",
        ),
        (4, 2, "step 3: a token was sampled by version 4 of the policy and version 3 is to be trained; .* most 2 upd"),
    ],
)
def test_a_token_of_a_version_that_the_plan_does_not_allow_is_refused(version: int, bound: int, sentence: str) -> None:
    with pytest.raises(RunFailed, match=sentence):
        staleness(batch_of(3, [(3, 3, 0.0), (3, version, 0.0)]), 3, bound)


def test_weights_that_come_mixed_or_out_of_order_are_refused() -> None:
    version = Version("actor_generate", None)
    with pytest.raises(RunFailed, match="step 0: actor_logprob has weights that no refit has filled and needs version"):
        version.require("actor_logprob", 0)
    version.set_version([2, 2])
    assert version.number == 2
    version.set_version([2])  # once more changes nothing
    with pytest.raises(RunFailed, match="brought weights of versions 2 and 3 together"):
        version.set_version([2, 3])
    with pytest.raises(RunFailed, match="brought version 1 after version 2"):
        version.set_version([1])


Fault = Callable[[pytest.MonkeyPatch], None]


def lose_refits(patch: pytest.MonkeyPatch) -> None:
    """All but the first of each."""
    run = RefitCopy.run
    done: set[RefitCopy] = set()

    def once(refit: RefitCopy) -> None:
        if refit not in done:
            done.add(refit)
            run(refit)

    patch.setattr(RefitCopy, "run", once)
    patch.setattr(RefitCopy, "start_send", lambda _: None)


def lose_refits_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 of the generator throws away what comes after the first turn."""
    arrive = Version.set_version

    def keep(version: Version, found: Iterable[int]) -> None:
        if dist.get_rank() != 1 or version.number is None:
            arrive(version, found)

    patch.setattr(Version, "set_version", keep)


def reorder(patch: pytest.MonkeyPatch) -> None:
    """The generator's first batch is sent behind its second."""
    send, held = ExperienceTransport.send, []

    def late(exchange: ExperienceTransport, instruction: Send, experience: Experience, tag: int, step: int) -> int:
        if instruction.producer == "actor_generate" and step == 0:
            held.append((instruction, experience, tag, step))
            return 0
        sent = send(exchange, instruction, experience, tag, step)
        if instruction.producer == "actor_generate" and held and held[0][2] == tag:
            sent += send(exchange, *held.pop(0))
        return sent

    patch.setattr(ExperienceTransport, "send", late)


def delay(rank: int, patch: pytest.MonkeyPatch) -> None:
    """A rank comes late to all that it does, by as long as chance will have it."""
    draw = random.Random(rank)

    def late(do: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*args: Any) -> Any:
            if dist.get_rank() == rank:
                time.sleep(draw.uniform(0.0, 0.1))
            return do(*args)

        return slowly

    for owner, name in (
        (StageRunner, "run"),
        (MegatronDevice, "refit"),
        (RefitCopy, "start_send"),
        (ExperienceTransport, "send"),
    ):
        patch.setattr(owner, name, late(getattr(owner, name)))


def run_with(asked: RunRequest, fault: Fault | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        carried_out(asked)


def run_all(requests: list[tuple[RunRequest, Fault | None]]) -> None:
    for asked, fault in requests:
        run_with(asked, fault)


def stops(asked: RunRequest, fault: Fault) -> str:
    """The sentence that stops the run."""
    asked.out.mkdir(parents=True)
    with pytest.raises(RankError) as found:
        run_on_ranks(asked.plan.facts.cluster.num_ranks, run_with, asked, fault, timeout=120)
    lines = [line for line in str(found.value).splitlines() if "RunFailed: " in line]
    assert lines, str(found.value)
    return lines[-1].partition("RunFailed: ")[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def two_ranks(directory: Path, name: str, steps: int) -> RunRequest:
    return request(write_job(directory, num_ranks=2), directory / name, *DISJOINT, steps=steps)


@pytest.mark.slow
@cases(("steps_ahead", "bound"), [(0, 0), (2, 2)], few=1)
def test_a_run_whose_refits_are_lost_stops_at_the_bound(directory: Path, steps_ahead: int, bound: int) -> None:
    asked = working_ahead(
        two_ranks(directory, f"lost-{steps_ahead}", bound + 3), steps_ahead_patterns(PPO_GRAPH, 2)[steps_ahead], bound
    )
    sentence = stops(asked, lose_refits)
    assert sentence.startswith(
        f"step {bound + 1}: a token was sampled by version 0 of the policy, {bound + 1} updates before the one that "
        f"uses it, and the plan allows {bound};"
    )
    assert sentence.endswith("run again with --resume to go on from the last checkpoint.")


@pytest.mark.slow
def test_values_and_proximal_log_probabilities_of_older_weights_are_refused(directory: Path) -> None:
    where = {"other": Where("0:1"), "actor_train": Where("1:1"), "critic_train": Where("1:1")}
    asked = two_ranks(directory, "values", 3)
    facts = asked.plan.facts.model_copy(update={"staleness": 1})
    ahead = {**synchronous(PPO_GRAPH), "actor_generate": 1}
    sentence = stops(replace(asked, plan=plan_by_hand(facts, where, ahead)), lose_refits)
    assert "has weights of version 0 and needs version 1; a refit was lost" in sentence


@pytest.mark.slow
def test_ranks_of_one_replica_must_hold_one_version(directory: Path) -> None:
    where = {"other": Where("0:2", "dp2"), "actor_generate": Where("0:2", "tp2")}
    asked = two_ranks(directory, "torn", 3)
    sentence = stops(replace(asked, plan=plan_by_hand(asked.plan.facts, where)), lose_refits_of_one_rank)
    assert sentence.startswith("step 1: the ranks of one replica of actor_generate hold versions 0 to 1 of its weights")


@pytest.mark.slow
def test_experience_that_comes_in_another_order_is_refused(directory: Path) -> None:
    asked = working_ahead(two_ranks(directory, "reordered", 4), steps_ahead_patterns(PPO_GRAPH, 2)[2], 2)
    sentence = stops(asked, reorder)
    assert sentence.startswith("step 0: rank 0 sent the output of actor_generate for step 1;")


def delay_the_generator(patch: pytest.MonkeyPatch) -> None:
    delay(0, patch)


def delay_the_trainer(patch: pytest.MonkeyPatch) -> None:
    delay(1, patch)


@pytest.mark.slow
def test_a_rank_that_is_late_changes_nothing_but_the_time(directory: Path) -> None:
    faults: Mapping[str, Fault | None] = {
        "in time": None,
        "late generator": delay_the_generator,
        "late trainer": delay_the_trainer,
    }
    ahead = steps_ahead_patterns(PPO_GRAPH, 2)[2]
    asked = [
        working_ahead(two_ranks(directory, name, 4), ahead, 3, batches_in_flight=2, generation_slots=8)
        for name in faults
    ]
    for one in asked:
        one.out.mkdir(parents=True)
    run_on_ranks(2, run_all, list(zip(asked, faults.values(), strict=True)), timeout=200)
    known, *others = [read_lines(one.out / "metrics.jsonl") for one in asked]
    assert max(line["max_staleness"] for line in known) == 3
    for lines in others:
        for line, also in zip(known, lines, strict=True):
            assert {**line, **dict.fromkeys(OF_TIME)} == {**also, **dict.fromkeys(OF_TIME)}
