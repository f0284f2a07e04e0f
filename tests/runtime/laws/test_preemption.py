"""Sequences that give way to others: every one ends, with the tokens that it would have drawn had it never waited."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.cost_models.period_ends import FirstEnded
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.packing import num_blocks_for
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.scheduler import PrefillPart, ScheduledBatch
from meshwright.runtime.inference.slots import LiveGroup, Numbers, Prompt, Response
from meshwright.runtime.model import padded_attention
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

MAX_TOKENS, MAX_RESPONSE, NUM_SLOTS, GROUP = 200, 160, 6, 3
THIRD = NUM_SLOTS * num_blocks_for(MAX_TOKENS) // 3


def storm(seed: int) -> tuple[Prompt, ...]:
    """Prompts in groups of samples, whose responses are long or short."""
    draw = random.Random(seed)
    prompts = [tuple(draw.choices(range(24), k=draw.randint(1, MAX_TOKENS - MAX_RESPONSE))) for _ in range(4)]
    return tuple(
        Prompt(
            row=row, sample_id=1000 * seed + row, tokens=prompts[row // GROUP], max_response=draw.choice((5, 60, 150))
        )
        for row in range(GROUP * len(prompts))
    )


def opened(
    directory: Path,
    layout: str,
    num_blocks: int | None,
    group_size: int,
    temperature: float,
    *,
    kind: type[Generator] = Generator,
) -> Generator | None:
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    return kind(
        model,
        spec,
        mesh,
        num_slots=NUM_SLOTS,
        num_blocks=num_blocks,
        max_tokens=MAX_TOKENS,
        max_response=MAX_RESPONSE,
        eos_tokens=frozenset(),
        temperature=temperature,
        seed=3,
        group_size=group_size,
    )


def both(
    directory: Path, layout: str, seeds: Sequence[int], group_size: int = 1, temperature: float = 1.0
) -> tuple[list[tuple[Response, ...]], list[tuple[Response, ...]], int, int] | None:
    """What is drawn with blocks for all and with a third of them; how many sequences gave way, and blocks left over."""
    plenty = opened(directory, layout, None, group_size, temperature)
    little = opened(directory, layout, THIRD, group_size, temperature)
    if plenty is None or little is None:
        return None
    drawn, same = ([one.generate(storm(seed)) for seed in seeds] for one in (plenty, little))
    assert little.scheduler.peak_blocks <= THIRD
    return drawn, same, little.scheduler.num_preempted, little._cache.tables.num_used


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor", vocab_size=24)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a token for every number that is counted to."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor", vocab_size=MAX_RESPONSE)


@pytest.mark.slow
@cases(
    ("layout", "num_cases", "group_size", "temperature"),
    [("tp1", 8, 1, 1.0), ("tp1", 4, GROUP, 1.0), ("tp1", 3, 1, 0.0), ("pp2", 4, 1, 1.0), ("tp2,pp2", 2, GROUP, 1.0)],
    few=1,
)
def test_with_blocks_for_a_third_of_the_rows_the_same_tokens_are_drawn(
    directory: Path, layout: str, num_cases: int, group_size: int, temperature: float
) -> None:
    seeds = range(num_cases)
    answers = [a for a in run_on_ranks(4, both, directory, layout, seeds, group_size, temperature) if a]
    assert len(answers) == Layout.parse(layout).num_ranks
    for plenty, little, num_preempted, num_left in answers:
        assert num_preempted >= num_cases
        assert num_left == 0
        for one, other in zip(plenty, little, strict=True):
            assert [r.tokens for r in other] == [r.tokens for r in one]


def in_place(
    directory: Path, layout: str, seeds: Sequence[int], group_size: int
) -> tuple[list[tuple[Response, ...]], list[tuple[Response, ...]], int] | None:
    """What is drawn from rows side by side, and from blocks where they lie; how many of these were moved."""
    generator = opened(directory, layout, THIRD, group_size, 1.0)
    if generator is None:
        return None
    side_by_side, tables = [generator.generate(storm(seed)) for seed in seeds], generator._cache.tables
    moved, compact = list[int](), tables.compact

    def counted() -> tuple[Numbers, Numbers]:
        found = compact()
        moved.append(len(found[0]))
        return found

    tables.compact, padded_attention._CACHED_BYTES = counted, 0  # type: ignore[method-assign]
    return side_by_side, [generator.generate(storm(seed)) for seed in seeds], sum(moved)


@pytest.mark.slow
@cases(("layout", "group_size"), [("tp1", 1), ("tp1", GROUP), ("pp2", 1), ("tp2,pp2", GROUP)], few=1)
def test_of_blocks_that_are_moved_the_same_tokens_are_drawn(directory: Path, layout: str, group_size: int) -> None:
    answers = [a for a in run_on_ranks(4, in_place, directory, layout, range(3), group_size) if a]
    assert len(answers) == Layout.parse(layout).num_ranks
    for side_by_side, moving, num_moved in answers:
        assert num_moved
        for one, other in zip(side_by_side, moving, strict=True):
            assert [r.tokens for r in other] == [r.tokens for r in one]


class Counting(Generator):
    """Draws 0, 1, 2, ... for every sequence; all else is the generator's own, messages between stages too."""

    last: Tensor
    """What was drawn in the round before."""

    def _sample(self, _output: Tensor, _numbers: Tensor) -> Tensor:
        """In rounds that are drawn one behind the other."""
        self.last = self.last + torch.tensor([[1.0], [0.0]])
        return self.last

    def sample_next(
        self, group: LiveGroup, _continuing: Numbers, _admitted: ScheduledBatch, _parts: Sequence[Sequence[PrefillPart]]
    ) -> Tensor | None:
        rows, records = group.rows, group.records
        for slot, cached in zip((group.first_slot + rows).tolist(), records.cached(rows).tolist(), strict=True):
            assert len(self._cache.tables.blocks_of_row(slot)) >= num_blocks_for(cached + 1)
        if not self._mesh.is_last_stage:
            return None
        self.last = torch.from_numpy(np.stack([records.num_sampled[rows], np.zeros(len(rows))]))
        return self.last


def counted(directory: Path, layout: str, num_cases: int) -> tuple[list[tuple[Response, ...]], int, int] | None:
    generator = opened(directory, layout, THIRD, GROUP, 1.0, kind=Counting)
    if generator is None:
        return None
    found = [generator.generate(storm(seed)) for seed in range(num_cases)]
    return found, generator.scheduler.num_preempted, generator._cache.tables.num_used


@pytest.mark.check_all
@pytest.mark.parametrize(("layout", "num_cases"), [("tp1", 200), ("pp2", 20)])
def test_in_200_storms_every_sequence_ends_once_with_all_of_its_tokens(wide: Path, layout: str, num_cases: int) -> None:
    for answer in filter(None, run_on_ranks(2, counted, wide, layout, num_cases)):
        found, num_preempted, num_left = answer
        assert num_preempted > num_cases
        assert num_left == 0
        for seed, responses in enumerate(found):
            assert [r.prompt for r in responses] == list(storm(seed))
            assert all(r.tokens == tuple(range(r.prompt.max_response or 0)) for r in responses)
            assert all(len(r.tokens) == len(r.logprobs) == len(r.versions) for r in responses)


def kept_and_resumed(directory: Path) -> tuple[tuple[Response, ...], tuple[Response, ...]]:
    """The rest of a flight, by who began it and by another one that took it over with some of it paused."""
    one, other = (opened(directory, "tp1", THIRD, GROUP, 1.0) for _ in range(2))
    assert one is not None
    assert other is not None
    one.run_period(storm(0), version=0, delivery=FirstEnded(1, 9))
    while not one.snapshot().paused:
        one.run_period((), version=0, delivery=FirstEnded(1, 9))
    kept = one.snapshot()
    assert any(kept.live)
    other.restore(kept)
    assert other.in_flight == one.in_flight
    rest = FirstEnded(len(one.in_flight), 9)
    return one.run_period((), version=1, delivery=rest), other.run_period((), version=1, delivery=rest)


def test_what_is_taken_over_goes_on_bit_for_bit_paused_or_not(directory: Path) -> None:
    [(one, other)] = run_on_ranks(1, kept_and_resumed, directory)
    assert one == other
