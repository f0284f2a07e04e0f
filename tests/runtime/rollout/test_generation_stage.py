"""The generation stage: what it puts into a batch, and that one which takes up another's sequences goes on as it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.trace import NUM_LIVE
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.in_flight import GenerationState
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.rollout.stage import GenerationStage
from tests.runtime.one_rank import one_rank
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import EOS, NUM_HELD_OUT, write_job

FIELDS = ("tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions")
BATCH, MAX_RESPONSE = 16, 24
STEPS = range(4)

Held = dict[str, dict[int, Tensor]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=1)


def batch(step: int, *, held_out: bool = False) -> StepExperience:
    return StepExperience(
        step=step, rows=range(NUM_HELD_OUT if held_out else BATCH), held_out="held_out" if held_out else ""
    )


def held(found: StepExperience) -> Held:
    return {field: {row: found.experience.get(field, row) for row in found.experience.rows(field)} for field in FIELDS}


def _one_batch(path: Path) -> tuple[Held, list[tuple[int, ...]], dict[str, float], list[GenerationState], int]:
    """What a turn puts into its batch; its prompts, its facts, where generation stands before and after held-out
    prompts are drawn, and how many of these were answered."""
    rank, found, aside = one_rank(path), batch(0), batch(0, held_out=True)
    stage = rank.generating(STEPS)
    stage.begin_period(None)
    facts = stage.run(found)
    before = stage.snapshot()
    stage.run(aside)
    prompts = [prompt.tokens for prompt in rank.data.batch(0)]
    return held(found), prompts, facts, [before, stage.snapshot()], len(aside.experience.rows("tokens"))


def test_a_row_has_its_prompt_its_response_and_numbers_where_a_token_is_predicted(path: Path) -> None:
    [(found, prompts, facts, stands, num_held_out)] = run_on_ranks(1, _one_batch, path)
    num_tokens = num_truncated = 0
    for row, prompt in enumerate(prompts):
        tokens, response = found["tokens"][row], found["tokens"][row][len(prompt) :]
        assert tuple(tokens[: len(prompt)].tolist()) == prompt
        assert found["prompt_lengths"][row].tolist() == [len(prompt)]
        assert bool(found["truncated"][row]) == (len(response) == MAX_RESPONSE and response[-1] != EOS)
        predicted = torch.zeros(len(tokens), dtype=torch.bool)
        predicted[len(prompt) - 1 : -1] = True
        assert torch.equal(found["behaviour_logprobs"][row] < 0, predicted)
        assert not found["versions"][row].any()
        num_tokens += len(response)
        num_truncated += int(found["truncated"][row])
    assert (facts["num_tokens"], facts["num_truncated"]) == (num_tokens, num_truncated)
    assert 0 < facts[NUM_LIVE] <= 8  # the slots
    assert stands[0] == stands[1]  # held-out prompts are drawn beside the run
    assert stands[0].in_flight is None
    assert stands[0].num_admitted == BATCH
    assert num_held_out == NUM_HELD_OUT


def _in_two_parts(path: Path, generation: dict[str, int]) -> tuple[list[Held], list[Held], int]:
    """All turns of one stage; the last two of another that took over from it; the sequences in flight between."""
    rank = one_rank(path, staleness=2, **generation)
    whole, parts = rank.generating(STEPS), rank.generating(STEPS[2:])
    found = _turns(whole, STEPS[:2])
    kept = copy.deepcopy(whole.snapshot())  # as a checkpoint keeps it: what goes on changes what it has
    parts.restore(kept)
    assert kept.in_flight is not None
    in_flight = sum(map(len, kept.in_flight.live)) + len(kept.in_flight.waiting) + len(kept.in_flight.ended)
    return found + _turns(whole, STEPS[2:]), _turns(parts, STEPS[2:]), in_flight


def _round_by_round_and_together(path: Path) -> list[tuple[Held, float]]:
    """The batch of a step and its mean number of live sequences: first with every round passed on before the next, then
    with rounds run together."""
    rank, found = one_rank(path), []
    for each in (True, False):
        stage, one = rank.generating(STEPS), batch(0)
        stage.begin_period(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("meshwright.runtime.rollout.stage._Rounds.needs_each_round", each)
            live = stage.run(one)[NUM_LIVE]
        found.append((held(one), live))
    return found


def test_rounds_that_are_run_together_count_and_sample_as_others(path: Path) -> None:
    [((each, live_of_each), (together, live_of_together))] = run_on_ranks(1, _round_by_round_and_together, path)
    assert live_of_each == live_of_together
    assert all(torch.equal(each["tokens"][row], together["tokens"][row]) for row in range(BATCH))


def _with_and_without_a_kept_generator(path: Path) -> tuple[list[Held], list[Held], int]:
    """Two steps of a stage that keeps its generator and of one that makes a new one, the weights of both halved between
    them; and how many generators the first one has made."""
    rank, made = one_rank(path), list[Generator]()
    new, replays = Generator.__init__, Generator.replays

    def counted(self: Generator, *given: object, **named: object) -> None:
        made.append(self)
        new(self, *given, **named)  # type: ignore[arg-type]

    try:
        fresh = _with_halved_weights(rank.generating(STEPS))
        Generator.__init__, Generator.replays = counted, property(lambda _: True)  # type: ignore[method-assign,assignment]
        kept = _with_halved_weights(rank.generating(STEPS))
    finally:
        Generator.__init__, Generator.replays = new, replays  # type: ignore[method-assign]
    return fresh, kept, len(made)


def _with_halved_weights(stage: GenerationStage) -> list[Held]:
    """One step, and one with half of each weight, which are whole again afterwards."""
    parameters = list(stage._copy.decoder.parameters())
    found = _turns(stage, STEPS[:1])
    for factor in (0.5, 2.0):
        for parameter in parameters:
            parameter.data *= factor
        found += _turns(stage, STEPS[1:2]) if factor < 1 else []
        stage._copy.version.increment()
    return found


def test_a_generator_that_is_kept_samples_what_a_new_one_would_have(path: Path) -> None:
    """Nothing that it cached of a prompt under other weights is read."""
    [(fresh, kept, num_made)] = run_on_ranks(1, _with_and_without_a_kept_generator, path)
    assert num_made == 1
    for one, other in zip(fresh, kept, strict=True):
        for field in ("tokens", "behaviour_logprobs"):
            assert all(torch.equal(one[field][row], other[field][row]) for row in range(BATCH)), field
    before, after = (one["tokens"] for one in fresh)
    assert any(not torch.equal(before[row], after[row]) for row in range(BATCH))


def _turns(stage: GenerationStage, steps: range) -> list[Held]:
    found = []
    for step in steps:
        stage.begin_period(None)
        stage.run(one := batch(step))
        found.append(held(one))
    return found


@pytest.mark.parametrize("generation", [{"batches_in_flight": 2}, {"overcommit": 8, "generation_slots": 16}])
def test_a_stage_that_takes_over_what_is_in_flight_draws_what_the_other_would_have(
    path: Path, generation: dict[str, int]
) -> None:
    [(whole, later, in_flight)] = run_on_ranks(1, _in_two_parts, path, generation)
    assert in_flight == (BATCH if "batches_in_flight" in generation else 1)  # of an overcommit that has begun to grow
    for one, other in zip(whole[2:], later, strict=True):
        for field in FIELDS:
            assert sorted(one[field]) == sorted(other[field]) == list(range(BATCH))
            assert all(torch.equal(one[field][row], other[field][row]) for row in range(BATCH))
