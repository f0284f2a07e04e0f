"""Turns: whatever a turn delivers, nobody is lost, met twice, starved, or older than the bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.cost_models.period_ends import FirstEnded
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.scheduler import PrefillPart, ScheduledBatch
from meshwright.runtime.inference.slots import LiveGroup, Numbers, Prompt, Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

NUM_TURNS, BATCH, OVERCOMMIT = 500, 8, 5
LONGEST = 60


class Counting(Generator):
    """Draws 0, 1, 2, ... for every sequence; all else is the generator's own, messages between stages too."""

    last: Tensor
    """What was drawn in the round before."""

    def sample_next(
        self, group: LiveGroup, _continuing: Numbers, _admitted: ScheduledBatch, _parts: Sequence[Sequence[PrefillPart]]
    ) -> Tensor | None:
        if not self._mesh.is_last_stage:
            return None
        self.last = torch.from_numpy(np.stack([group.records.num_sampled[group.rows], np.zeros(len(group.rows))]))
        return self.last

    def _sample(self, _output: Tensor, _numbers: Tensor) -> Tensor:
        """In rounds that are drawn one behind the other."""
        self.last = self.last + torch.tensor([[1.0], [0.0]])
        return self.last


def long_tailed(draw: int) -> int:
    return min(LONGEST, max(1, int(random.Random(draw).lognormvariate(1.5, 1.0))))


def prompt(draw: int) -> Prompt:
    step, row = divmod(draw, BATCH)
    return Prompt(row=row, step=step, sample_id=draw, tokens=(1, 2), max_response=long_tailed(draw))


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
        delivered.append(generator.run_period(prompts, version=turn, delivery=FirstEnded(BATCH, max_deferral)))
        admitted = until
    assert not generator.in_flight
    return delivered


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor")


@pytest.mark.slow
@cases(("layout", "num_slots", "max_deferral"), [("tp1", 13, 1), ("tp1", 5, 2), ("tp2,pp2", 6, 3)], few=1)
def test_in_500_overcommitted_turns_no_sequence_is_lost_duplicated_starved_or_too_old(
    directory: Path, layout: str, num_slots: int, max_deferral: int
) -> None:
    answers = [a for a in run_on_ranks(4, overcommitted, directory, layout, num_slots, max_deferral) if a]
    assert len(answers) == Layout.parse(layout).num_ranks
    assert all(answer == answers[0] for answer in answers)
    met = Counter(r.prompt.sample_id for turn in answers[0] for r in turn)
    assert met == Counter(range(NUM_TURNS * BATCH))
    deferred = Counter(version - r.versions[0] for version, turn in enumerate(answers[0]) for r in turn)
    assert set(deferred) == set(range(max_deferral + 1))
    for turn in answers[0]:
        assert len(turn) == BATCH
        for r in turn:
            assert r.tokens == tuple(range(long_tailed(r.prompt.sample_id)))
            assert list(r.versions) == sorted(r.versions)
            assert r.versions[-1] - r.first_period <= max_deferral
