"""The generation benchmark compares like with like: the same tokens, as many as were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.generation.rivals import Engine, Transformers
from benchmarks.generation.work import BATCH, SHAPES, Work, draw_work, write_checkpoint
from tests.runtime.ranks import run_on_ranks

SHAPE, _ = next(iter(SHAPES["cpu"].values()))


def short_work(num_prompts: int) -> Work:
    """The benchmark's own prompts with a twentieth of their response lengths."""
    work = draw_work(num_prompts, SHAPE["vocab_size"], seed=1)
    return Work(work.prompts, tuple(1 + length // 20 for length in work.lengths))


def by_the_engine(checkpoint: Path, work: Work) -> tuple[list[list[int]], list[list[int]]]:
    engine = Engine(checkpoint, temperature=0.0, seed=0)
    return engine.refilled(work), engine.by_batches(work)


@pytest.mark.check_all
def test_both_sides_draw_the_same_tokens_when_nothing_is_left_to_chance(tmp_path: Path) -> None:
    checkpoint, work = write_checkpoint(tmp_path, SHAPE, seed=1), short_work(BATCH + 8)
    expected = Transformers(checkpoint, greedy=True).generate(work)
    assert [len(tokens) for tokens in expected] == list(work.lengths)
    refilled, by_batches = run_on_ranks(1, by_the_engine, checkpoint, work)[0]
    assert refilled == expected
    assert by_batches == expected


def test_lengths_are_long_tailed_and_the_seed_decides_them() -> None:
    work = draw_work(1000, 100, seed=3)
    assert work == draw_work(1000, 100, seed=3) != draw_work(1000, 100, seed=4)
    ordered = sorted(work.lengths)
    assert 28 < ordered[500] < 36
    assert ordered[995] == 256
    assert work.num_tokens / 1000 > 1.3 * ordered[500]
