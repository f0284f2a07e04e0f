"""Speculative decoding: drafts change how many rounds a generation takes, and nothing of what is sampled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2_contingency

from meshwright.cost_models.period_ends import FirstEnded
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.drafts import ResponseHistory
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt, Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import WINDOWS, tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

pytestmark = pytest.mark.slow

VOCAB_SIZE, EOS, MAX_RESPONSE = 24, 7, 24
PROMPTS = tuple(
    Prompt(row=row, sample_id=row, tokens=tuple((tokens(1, 4 + row // 2, seed=row // 2)[0] % VOCAB_SIZE).tolist()))
    for row in range(8)
)
"""Four prompts, each for a group of two."""


def open_generator(directory: Path, layout: str, draft_tokens: int, **settings: Any) -> Generator | None:
    """A generator on this rank; None on a rank that the layout leaves out."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    chosen = {
        "num_slots": 4,
        "max_tokens": 64,
        "max_response": MAX_RESPONSE,
        "eos_tokens": frozenset({EOS}),
        "temperature": 0.8,
        "seed": 5,
        "group_size": 2,
        **settings,
    }
    return Generator(model, spec, mesh, draft_tokens=draft_tokens, **chosen)


def tokens_of(responses: tuple[Response, ...]) -> list[tuple[int, tuple[int, ...], str]]:
    return [(response.row, response.tokens, response.finish) for response in responses]


def sampled_twice(
    directory: Path, layout: str, draft_tokens: int, settings: dict[str, Any]
) -> tuple[list[tuple[Response, ...]], list[int], list[int]] | None:
    """The responses of two periods with the same prompts, their decode rounds, and how many drafted tokens were
    accepted."""
    generator = open_generator(directory, layout, draft_tokens, **settings)
    if generator is None:
        return None
    responses, rounds = [], []
    for _ in range(2):
        responses.append(generator.generate(PROMPTS))
        rounds.append(generator._flight.num_rounds)
    return responses, rounds, generator.acceptance.accepted.tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor", vocab_size=VOCAB_SIZE)


@cases(
    ("layout", "settings"),
    [
        ("tp1", {}),
        ("tp1", {"temperature": 0.0}),
        ("tp1", {"top_k": 5, "top_p": 0.8, "keeps_mask": True, "num_slots": 3}),
        ("pp2", {}),
        ("tp2", {}),
        ("tp2,pp2", {"num_slots": 5}),
        ("tp1", {"num_blocks": 4, "num_slots": 8}),
    ],
    few=4,
)
def test_drafts_change_no_token_and_save_rounds(directory: Path, layout: str, settings: dict[str, Any]) -> None:
    """The second period has the responses of the first as history, which are its own: every draft is accepted."""
    plain = run_on_ranks(4, sampled_twice, directory, layout, 0, settings)[0]
    assert plain is not None
    for drafted in filter(None, run_on_ranks(4, sampled_twice, directory, layout, 3, settings)):
        for one, other in zip(plain[0], drafted[0], strict=True):
            assert tokens_of(one) == tokens_of(other)
            for response, expected in zip(other, one, strict=True):
                assert response.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
                assert response.kept == expected.kept
                assert bool(response.kept) == settings.get("keeps_mask", False)
        assert drafted[1][1] < 0.7 * plain[1][1]
        assert all(count > 0 for count in drafted[2])


@pytest.mark.check_all
def test_windows_and_capped_scores_verify_alike(tmp_path: Path) -> None:
    for family, options in WINDOWS.items():
        directory = write_checkpoint(tmp_path / family, family, **{**options, "vocab_size": VOCAB_SIZE})
        plain, drafted = (run_on_ranks(1, sampled_twice, directory, "tp1", count, {})[0] for count in (0, 3))
        assert plain is not None
        assert drafted is not None
        assert list(map(tokens_of, plain[0])) == list(map(tokens_of, drafted[0]))


def sample_many(directory: Path, draft_tokens: int, seed: int) -> tuple[Counter[tuple[int, ...]], float] | None:
    """The counts of the last two tokens of 10,000 responses of three tokens, and the mean number of
    drafted tokens that were accepted in one."""
    generator = open_generator(
        directory, "tp1", draft_tokens, num_slots=1000, max_response=3, max_tokens=12, seed=seed, group_size=1000
    )
    assert generator
    prompt = replace(PROMPTS[0], tokens=PROMPTS[0].tokens[:4])
    prompts = [replace(prompt, row=row, sample_id=row) for row in range(10_000)]
    responses = generator.generate(prompts)
    accepted = int(generator.acceptance.accepted.sum())
    return Counter(response.tokens[1:] for response in responses), accepted / len(prompts)


def test_ten_thousand_responses_with_drafts_are_distributed_as_without(directory: Path) -> None:
    """Other random numbers, so that nothing but the distribution can agree."""
    (plain, _), (drafted, accepted) = (
        run_on_ranks(1, sample_many, directory, draft_tokens, seed)[0] for draft_tokens, seed in ((0, 1), (2, 2))
    )
    assert accepted > 0.02
    common = [pair for pair in plain if plain[pair] + drafted[pair] >= 10]
    table = [
        [*(counts[pair] for pair in common), counts.total() - sum(counts[p] for p in common)]
        for counts in (plain, drafted)
    ]
    assert len(common) > 50
    assert chi2_contingency(table).pvalue > 0.01


def run_in_periods(directory: Path, layout: str, resumes_at: int) -> tuple[list[Any], list[int]] | None:
    """The responses that periods with an overcommit deliver, and the rounds of each; before period `resumes_at` another
    generator takes over from a snapshot and the history."""
    history = ResponseHistory()
    generator = open_generator(directory, layout, 3, history=history)
    if generator is None:
        return None
    delivered, rounds = [], []
    batches = [PROMPTS, *(tuple(replace(p, sample_id=p.sample_id + 8 * n, step=n) for p in PROMPTS) for n in (1, 2))]
    admitted = [(*batches[0], *batches[1][:4]), (*batches[1][4:], *batches[2][:4]), batches[2][4:]]
    for period, prompts in enumerate(admitted):
        if period == resumes_at:
            snapshot, entries = generator.snapshot(), list(history.entries())
            history = ResponseHistory()
            for prompt, step, response in entries:
                history.add(prompt, response, step)
            generator = open_generator(directory, layout, 3, history=history)
            assert generator
            generator.restore(snapshot)
        delivered.append(generator.run_period(prompts, version=period, delivery=FirstEnded(8, 1)))
        rounds.append(generator._flight.num_rounds)
    return delivered, rounds


@cases("layout", ["tp1", "pp2"], few=1)
def test_a_resumed_generator_delivers_the_same_in_the_same_rounds(directory: Path, layout: str) -> None:
    whole = run_on_ranks(2, run_in_periods, directory, layout, -1)
    for resumes_at in (1, 2):
        assert run_on_ranks(2, run_in_periods, directory, layout, resumes_at) == whole
    assert whole[0] is not None
    assert any(len(set(response.versions)) > 1 for period in whole[0][0] for response in period)
