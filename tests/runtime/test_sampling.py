"""Sampling: the draw depends on seed, row and position, and follows the distribution."""

import torch

from meshwright.runtime.sampling import sample, uniforms


def test_a_draw_does_not_depend_on_its_batch() -> None:
    rows, positions = torch.arange(50), torch.arange(50) % 7
    whole = uniforms(3, rows, positions)
    assert torch.equal(whole[10:20], uniforms(3, rows[10:20], positions[10:20]))


def test_seed_row_and_position_each_change_the_draw() -> None:
    one = torch.tensor([1])
    draws = {float(uniforms(s, one * r, one * p)) for s in range(4) for r in range(-2, 4) for p in range(4)}
    assert len(draws) == 4 * 6 * 4


def test_uniforms_are_uniform() -> None:
    draws = uniforms(0, torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert (counts - 2000).abs().max() < 5 * 2000**0.5


def test_tokens_follow_the_tempered_distribution_and_carry_its_log_probabilities() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    expected = torch.softmax(logits / 0.7, dim=-1)
    draws = uniforms(1, torch.arange(40_000), torch.ones(40_000, dtype=torch.int64))
    tokens, logprobs = sample(logits.expand(40_000, 4), draws, temperature=0.7)
    shares = torch.bincount(tokens, minlength=4) / 40_000
    assert torch.allclose(shares, expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(1000, 3)
    tokens, _ = sample(logits, torch.linspace(0, 1 - 1e-12, 1000, dtype=torch.float64), temperature=1.0)
    assert set(tokens.tolist()) == {1}
