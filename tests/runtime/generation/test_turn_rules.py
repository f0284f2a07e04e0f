"""Turns: whatever a turn delivers, nobody is lost, met twice, starved, or older than the bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.generation.engine import Generator
from meshwright.runtime.generation.slots import Finish, LiveSequence, Prompt, Response, SlotGroup
from meshwright.runtime.generation.turn_rules import Everything, FirstEnded, Flight, WholeStep
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks

NUM_TURNS, BATCH, OVERCOMMIT = 500, 8, 5
LONGEST = 60


def response(row: int, *, step: int = 0, first_turn: int = 0) -> Response:
    prompt = Prompt(row=row, draw=row, tokens=(1,), step=step)
    return Response(
        prompt=prompt, tokens=(2,), logprobs=(0.0,), versions=(0,), finish=Finish.LENGTH, first_turn=first_turn
    )


def flight(*, ended: Sequence[Response] = (), live: Sequence[LiveSequence] = (), turn: int = 0) -> Flight:
    group = SlotGroup(0, 8)
    group.live.extend(live)
    found = Flight([group])
    found.ended.extend(ended)
    found.turn = turn
    return found


def rows(delivered: Sequence[Response] | None) -> list[int] | None:
    return None if delivered is None else [r.row for r in delivered]


def test_a_synchronous_turn_waits_for_everything() -> None:
    waits = flight(ended=[response(0)], live=[LiveSequence(prompt=response(1).prompt)])
    assert waits.deliver(Everything()) is None
    assert rows(flight(ended=[response(1), response(0)]).deliver(Everything())) == [0, 1]


def test_a_turn_for_a_step_leaves_later_steps_in_flight() -> None:
    found = flight(
        ended=[response(3, step=1), response(0)], live=[LiveSequence(prompt=response(4, step=1).prompt)], turn=0
    )
    assert rows(found.deliver(WholeStep(0))) == [0]
    assert found.deliver(WholeStep(1)) is None
    assert rows(found.ended) == [3]


def test_a_prompt_that_waits_for_a_slot_holds_its_step_back() -> None:
    found = flight(ended=[response(0)])
    found.begin([response(1).prompt])
    assert found.deliver(WholeStep(0)) is None


def test_those_that_ended_first_are_delivered_first_but_due_ones_before_them() -> None:
    ended = [response(5, first_turn=3), response(6, first_turn=3), response(7, first_turn=2)]
    found = flight(ended=ended, turn=3)
    assert rows(found.deliver(FirstEnded(2, max_deferral=1))) == [5, 7]
    assert rows(found.ended) == [6]


def test_a_turn_does_not_end_before_a_due_sequence_has() -> None:
    late = LiveSequence(prompt=response(9).prompt, first_turn=2)
    found = flight(ended=[response(row, first_turn=3) for row in range(4)], live=[late], turn=3)
    assert found.deliver(FirstEnded(2, max_deferral=1)) is None
    assert rows(found.deliver(FirstEnded(2, max_deferral=2))) == [0, 1]


def test_the_last_turns_deliver_what_is_left() -> None:
    assert rows(flight(ended=[response(0)], turn=9).deliver(FirstEnded(4, max_deferral=1))) == [0]
    assert rows(flight(turn=9).deliver(FirstEnded(4, max_deferral=1))) == []


def test_more_due_sequences_than_a_batch_holds_get_a_sentence() -> None:
    found = flight(ended=[response(row) for row in range(3)], turn=1)
    with pytest.raises(BadInput, match="3 sequences are due in one turn that delivers 2"):
        found.deliver(FirstEnded(2, max_deferral=1))


class Counting(Generator):
    """Draws 0, 1, 2, ... for every sequence; all else is the generator's own, messages between stages too."""

    def prefill(self, _first_slot: int, admitted: Sequence[LiveSequence]) -> Tensor:
        return torch.tensor([[len(sequence.tokens) for sequence in admitted], [0] * len(admitted)]).double()

    def decode(self, first_slot: int, live: Sequence[LiveSequence]) -> Tensor:
        return self.prefill(first_slot, live)


def long_tailed(draw: int) -> int:
    return min(LONGEST, max(1, int(random.Random(draw).lognormvariate(1.5, 1.0))))


def prompt(draw: int) -> Prompt:
    step, row = divmod(draw, BATCH)
    return Prompt(row=row, step=step, draw=draw, tokens=(1, 2), max_response=long_tailed(draw))


def overcommitted(directory: Path, layout: str, num_slots: int, max_deferral: int) -> list[tuple[Response, ...]] | None:
    """What each of 500 turns delivers, and one more of what is left at their end."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    generator = Counting(
        build_model(spec, mesh),
        spec,
        mesh,
        num_slots=num_slots,
        max_tokens=LONGEST + 2,
        max_response=LONGEST,
        eos_tokens=frozenset(),
        temperature=1.0,
        seed=0,
    )
    delivered, admitted = [], 0
    for turn in range(NUM_TURNS):
        until = min((turn + 1) * BATCH + OVERCOMMIT, NUM_TURNS * BATCH)
        prompts = [prompt(draw) for draw in range(admitted, until)]
        delivered.append(generator.turn(prompts, version=turn, delivery=FirstEnded(BATCH, max_deferral)))
        admitted = until
    assert not generator.in_flight
    return delivered


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_slots", "max_deferral"), [("tp1", 13, 1), ("tp1", 5, 2), ("tp2,pp2", 6, 3)])
def test_in_500_overcommitted_turns_no_sequence_is_lost_duplicated_starved_or_too_old(
    directory: Path, layout: str, num_slots: int, max_deferral: int
) -> None:
    answers = [a for a in run_on_ranks(4, overcommitted, directory, layout, num_slots, max_deferral) if a]
    assert len(answers) == Layout.parse(layout).num_ranks
    assert all(answer == answers[0] for answer in answers)
    met = Counter(r.prompt.draw for turn in answers[0] for r in turn)
    assert met == Counter(range(NUM_TURNS * BATCH))
    deferred = Counter(version - r.versions[0] for version, turn in enumerate(answers[0]) for r in turn)
    assert set(deferred) == set(range(max_deferral + 1))
    for turn in answers[0]:
        assert len(turn) == BATCH
        for r in turn:
            assert r.tokens == tuple(range(long_tailed(r.prompt.draw)))
            assert list(r.versions) == sorted(r.versions)
            assert r.versions[-1] - r.first_turn <= max_deferral
