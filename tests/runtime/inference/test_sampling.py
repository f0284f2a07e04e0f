"""Sampling: the draw depends on seed, row and position, and follows the distribution."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.runtime.inference.sampling import Sampling, Uniforms, uniforms


def many(logits: list[float], sampling: Sampling, count: int = 40_000) -> tuple[Tensor, Tensor]:
    """Share of each token among `count` draws, and the log-probability that was said of it, 1 if it never was drawn."""
    uniform = torch.from_numpy(uniforms(1, np.arange(count), np.ones(count, dtype=np.int64)))
    tokens, logprobs = sampling.sample(torch.tensor(logits).expand(count, len(logits)), uniform)
    said = torch.ones(len(logits)).scatter(0, tokens, logprobs)
    assert torch.equal(said[tokens], logprobs)
    return torch.bincount(tokens, minlength=len(logits)) / count, said


def test_a_draw_does_not_depend_on_its_batch() -> None:
    rows, positions = np.arange(50), np.arange(50) % 7
    whole = uniforms(3, rows, positions)
    assert (whole[10:20] == uniforms(3, rows[10:20], positions[10:20])).all()


def test_seed_row_and_position_each_change_the_draw() -> None:
    one = np.array([1])
    draws = {uniforms(s, one * r, one * p).item() for s in range(4) for r in range(-2, 4) for p in range(4)}
    assert len(draws) == 4 * 6 * 4


def test_a_run_that_is_resumed_draws_by_the_numbers_it_began_with() -> None:
    found = uniforms(2**63 + 5, np.array([[-3], [9]]), np.array([0, 200])).ravel().tolist()
    assert found == [0.39324307441146356, 0.8908815153733696, 0.7363896299370687, 0.8965727007508393]


def test_numbers_that_are_hashed_together_are_those_of_each_position() -> None:
    kept, rows = Uniforms(3, 6), np.array([4, 1, 2])
    for draws, positions in (([9, 8, 7], [0, 100, 3]), ([9, 5, 7], [1, 120, 90]), ([9, 5, 6], [200, 128, 250])):
        count = Uniforms.num_hashed(np.array(positions))
        ahead = kept.ahead(rows, np.array(draws), np.array(positions), count)
        expected = uniforms(3, np.array(draws), np.array(positions) + np.arange(count)[:, None])
        assert (ahead.numpy() == expected).all()
        assert torch.equal(kept.at(rows, np.array(draws), np.array(positions)), ahead[0])


def test_uniforms_are_uniform() -> None:
    draws = uniforms(0, np.arange(20_000), np.zeros(20_000, dtype=np.int64))
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.abs(counts - 2000).max() < 5 * 2000**0.5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_tokens_follow_the_tempered_distribution_and_carry_its_log_probabilities(temperature: float) -> None:
    logits = [2.0, 0.0, 1.0, -1.0]
    expected = torch.softmax(torch.tensor(logits) / temperature, dim=-1)
    shares, logprobs = many(logits, Sampling(temperature=temperature))
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, expected.log(), atol=1e-6, rtol=0)


PROBABILITIES = [0.1, 0.4, 0.05, 0.3, 0.15]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [1]),
        (Sampling(top_k=3), [1, 3, 4]),
        (Sampling(top_k=9), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.3), [1]),
        (Sampling(top_p=0.65), [1, 3]),
        (Sampling(top_p=0.75), [1, 3, 4]),
        (Sampling(top_k=3, top_p=0.5), [1, 3]),  # of 0.4, 0.3, 0.15 over 0.85 the first reaches only 0.47
        (Sampling(top_k=2, top_p=0.5), [1]),  # of 0.4 and 0.3 over 0.7 the first reaches 0.57
    ],
)
def test_filters_choose_what_is_drawn_and_log_probabilities_stay_those_of_the_policy(
    sampling: Sampling, kept: list[int]
) -> None:
    probabilities = torch.tensor(PROBABILITIES)
    expected = torch.zeros(5).index_copy(0, torch.tensor(kept), probabilities[kept] / probabilities[kept].sum())
    shares, logprobs = many(probabilities.log().tolist(), sampling)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs[kept], probabilities[kept].log(), atol=1e-6, rtol=0)


@given(st.integers(0, 1000), st.floats(0.3, 3.0), st.integers(0, 12), st.floats(0.05, 1.0))
@settings(max_examples=50)
def test_what_is_said_of_a_token_does_not_depend_on_the_filters(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(64, 12, generator=torch.Generator().manual_seed(seed)) * 3
    uniform = torch.from_numpy(uniforms(seed, np.arange(64), np.zeros(64, dtype=np.int64)))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = sampling.sample(logits, uniform)
    policy = (logits / temperature).log_softmax(dim=-1)
    torch.testing.assert_close(logprobs, policy.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


def test_the_temperature_comes_before_the_nucleus() -> None:
    # At temperature 1/2 the five are as 1, 16, 1/4, 9, 2.25: two of them reach 0.85.
    shares, _ = many(torch.tensor(PROBABILITIES).log().tolist(), Sampling(temperature=0.5, top_p=0.85))
    assert shares.nonzero().flatten().tolist() == [1, 3]


def test_tokens_that_tie_at_the_cut_are_all_kept() -> None:
    shares, _ = many([0.0, 1.0, 1.0, 1.0], Sampling(top_k=2))
    torch.testing.assert_close(shares, torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3]), atol=0.01, rtol=0)


def test_temperature_zero_takes_the_likeliest_token_with_certainty() -> None:
    shares, logprobs = many([0.0, 3.0, 1.0], Sampling(temperature=0.0), count=10)
    assert shares.tolist() == [0.0, 1.0, 0.0]
    assert logprobs[1] == 0.0


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(1000, 3)
    tokens, _ = Sampling().sample(logits, torch.linspace(0, 1 - 1e-12, 1000, dtype=torch.float64))
    assert set(tokens.tolist()) == {1}


@given(st.integers(0, 1000), st.floats(0.3, 3.0), st.integers(1, 16), st.floats(0.05, 1.0))
@settings(max_examples=50)
def test_the_kept_set_is_what_the_filters_leave_and_the_token_is_the_one_of_the_filters_alone(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(64, 12, generator=torch.Generator().manual_seed(seed)) * 3
    uniform = torch.from_numpy(uniforms(seed, np.arange(64), np.zeros(64, dtype=np.int64)))
    plain = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    keeping = replace(plain, keeps_mask=True)
    tokens, logprobs, kept = keeping.sample_kept(logits, uniform)
    assert torch.equal(tokens, plain.sample(logits, uniform)[0])
    assert kept.shape == (64, min(top_k, 12))
    scaled = logits.double() / temperature
    for row in range(64):
        of_row = kept[row][kept[row] >= 0]
        assert of_row.tolist() == sorted(scaled[row].topk(len(of_row)).indices.tolist())
        assert int(tokens[row]) in of_row.tolist()
        expected = scaled[row, int(tokens[row])] - scaled[row, of_row].logsumexp(-1)
        assert float(logprobs[row]) == pytest.approx(float(expected), abs=1e-5)


def test_of_tokens_that_tie_only_as_many_are_kept_as_top_k_says() -> None:
    sampling = Sampling(top_k=2, keeps_mask=True)
    tokens, logprobs, kept = sampling.sample_kept(torch.ones(1000, 5), torch.rand(1000))
    assert kept.shape == (1000, 2)
    assert (kept == tokens[:, None]).any(dim=1).all()
    torch.testing.assert_close(logprobs, torch.full((1000,), 0.5).log())


def test_a_greedy_token_is_alone_in_its_set() -> None:
    sampling = Sampling(temperature=0.0, top_k=3, keeps_mask=True)
    tokens, logprobs, kept = sampling.sample_kept(torch.tensor([[0.0, 2.0, 1.0, 0.5]]), torch.zeros(1))
    assert (tokens.tolist(), logprobs.tolist(), kept.tolist()) == ([1], [0.0], [[1, -1, -1]])
