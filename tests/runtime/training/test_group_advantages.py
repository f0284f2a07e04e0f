"""Samples are judged by the others of their prompt or of their step, whatever lies outside the mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.planner.job.algorithm_settings import GRPO, RLOO, CriticFreeSettings, Reinforce
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.advantages import (
    compute_rewards,
    critic_free_advantages,
    leave_one_out,
    relative_to_group,
    response_mask,
    returns_to_go,
    share_with_signal,
)
from meshwright.runtime.training.trainer import MicroBatch, forward_scalars
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.updates import HEADS

GROUP, WIDTH, MAX_RESPONSE = 4, 12, 8
PROMPTS, RESPONSES = torch.full((8,), 3), torch.tensor([1, 8, 3, 5, 2, 8, 4, 6])
MASK = response_mask(PROMPTS, RESPONSES, WIDTH)
NOT_CUT = torch.zeros(8)
ALL: list[CriticFreeSettings] = [
    GRPO(),
    GRPO(normalise_by_std=False, loss_mean="constant"),
    RLOO(),
    Reinforce(),
    Reinforce(group_baseline=True),
]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def advantages(
    settings: CriticFreeSettings, *, scores: Tensor, ref: Tensor | None = None, logprobs: Tensor | None = None
) -> Tensor:
    return critic_free_advantages(
        response_rewards=compute_rewards(scores, NOT_CUT, settings, num_tokens=RESPONSES, max_response=MAX_RESPONSE),
        logprobs=noise(1, 8, WIDTH) if logprobs is None else logprobs,
        ref_logprobs=ref,
        mask=MASK,
        settings=settings,
        group_size=GROUP,
    )


def test_a_group_has_mean_zero_and_deviation_one() -> None:
    found = relative_to_group(noise(0, 8), GROUP, by_std=True).view(-1, GROUP)
    assert torch.allclose(found.mean(1), torch.zeros(2).double())
    assert torch.allclose(found.std(1), torch.ones(2).double(), atol=1e-5)


def test_without_the_deviation_distances_stay_what_they_are() -> None:
    scores = noise(0, 8)
    found = relative_to_group(scores, GROUP, by_std=False)
    assert torch.allclose(found[0] - found[3], scores[0] - scores[3])


def test_leaving_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert leave_one_out(rewards, 4).tolist() == pytest.approx([1 - 11 / 3, 2 - 10 / 3, 3 - 3, 6 - 2])


def test_leaving_one_out_is_the_distance_to_the_mean_times_n_over_n_less_one() -> None:
    rewards = noise(2, 8)
    apart = relative_to_group(rewards, GROUP, by_std=False)
    assert torch.allclose(leave_one_out(rewards, GROUP), apart * GROUP / (GROUP - 1))


def test_a_return_is_what_is_paid_from_a_token_on() -> None:
    rewards = torch.where(MASK, noise(3, 8, WIDTH), 0.0)
    found = returns_to_go(rewards, MASK)
    assert torch.allclose(found[1, 2:10], rewards[1, 2:10].flip(0).cumsum(0).flip(0))
    assert not found[~MASK].any()


def test_groups_of_equal_scores_teach_nothing() -> None:
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    assert share_with_signal(compute_rewards(scores, NOT_CUT, GRPO()), GROUP) == 0.5
    assert not advantages(GRPO(), scores=scores)[:4].any()


def equal_groups(number: int, group_size: int, draw: np.random.Generator) -> Tensor:
    """Scores [number x group_size] in float32, alike in each group, of all sizes and both signs."""
    known = draw.choice([10.1, 3.3, 0.35, 100.1, 1e-8, 1e8, 0.1, 0.0], number)
    sized = draw.choice([-1.0, 1.0], number) * 10.0 ** draw.uniform(-8, 8, number)
    return torch.tensor(np.where(draw.random(number) < 0.3, known, sized), dtype=torch.float32).repeat_interleave(
        group_size
    )


def test_ten_thousand_groups_of_equal_scores_have_advantages_of_exactly_nothing() -> None:
    draw = np.random.default_rng(0)
    for group_size in range(2, 65):
        scores = equal_groups(160, group_size, draw)
        for by_std in (True, False):
            assert not relative_to_group(scores, group_size, by_std=by_std).any()
        assert not leave_one_out(scores, group_size).any()


def test_groups_that_differ_by_rounding_have_advantages_of_exactly_nothing() -> None:
    """Scores of the same responses in other micro-batches are a few units in the last place apart."""
    draw = np.random.default_rng(1)
    for group_size in range(2, 65, 3):
        scores = equal_groups(40, group_size, draw)
        off = torch.tensor(draw.integers(-4, 5, len(scores))) * 2.0**-24
        scores = (scores * (1 + off)).float()
        for by_std in (True, False):
            assert not relative_to_group(scores, group_size, by_std=by_std).any()
        assert not leave_one_out(scores, group_size).any()


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_a_batch_of_equal_scores_teaches_exactly_nothing_by_any_algorithm(settings: CriticFreeSettings) -> None:
    """Nor does one whose scores are the rounding of one score apart."""
    draw = np.random.default_rng(2)
    for _ in range(50):
        scores = equal_groups(1, 8, draw)
        assert not advantages(settings, scores=scores).any()
        scores[3] = torch.nextafter(scores[3], torch.tensor(torch.inf))
        assert not advantages(settings, scores=scores).any()


@pytest.mark.parametrize("settings", ALL[:3], ids=str)
def test_a_group_of_equal_scores_teaches_exactly_nothing_beside_one_that_differs(settings: CriticFreeSettings) -> None:
    scores = torch.tensor([10.1, 10.1, 10.1, 10.1, 0.0, 0.0, 1.0, 0.0])
    found = advantages(settings, scores=scores)
    assert not found[:4].any()
    assert found[4:][MASK[4:]].all()


def test_a_group_of_equal_scores_has_nothing_but_the_mean_of_the_batch_taken_off_by_whitening() -> None:
    """REINFORCE++ whitens over all tokens, as verl and OpenRLHF do: a group whose distance to its own mean is nothing
    has the same number at all its tokens, and exactly 0 where its batch has the mean 0."""
    scores = torch.tensor([10.1, 10.1, 10.1, 10.1, 0.0, 0.0, 1.0, 0.0])
    found = advantages(Reinforce(group_baseline=True), scores=scores)[:4]
    assert len(set(found[MASK[:4]].tolist())) == 1


@pytest.mark.parametrize("settings", ALL, ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_what_is_learned_does_not_depend_on_the_unit_of_scores(settings: CriticFreeSettings, size: float) -> None:
    """But for an advantage in that unit, and for what keeps the variance of a whitened batch from nothing."""
    scores = noise(6, 8)
    unit = size if isinstance(settings, RLOO) or settings == ALL[1] else 1.0
    if isinstance(settings, Reinforce) and size < 1:
        pytest.skip("1e-8 is added to the variance of a whitened batch, as TRL and verl do")
    assert torch.allclose(
        advantages(settings, scores=scores * size), advantages(settings, scores=scores) * unit, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_rounding_of_scores_moves_advantages_no_further_than_rounding(settings: CriticFreeSettings) -> None:
    """A group in which the same response stands several times, scored in two packings."""
    one = torch.tensor([0.3, 0.3, 0.3, 0.9, -1.2, 4.0, 4.0, 4.0])
    other = (one * (1 + 1e-7 * noise(7, 8))).float()
    assert not torch.equal(one, other)
    found = advantages(settings, scores=one)
    assert torch.allclose(advantages(settings, scores=other), found, rtol=0, atol=1e-6 * max(1.0, float(found.max())))


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_nothing_outside_the_mask_counts(settings: CriticFreeSettings) -> None:
    scores, logprobs, ref = noise(4, 8), noise(1, 8, WIDTH), noise(5, 8, WIDTH)
    odd = torch.where(MASK, logprobs, torch.nan)
    found = advantages(settings, scores=scores, ref=ref, logprobs=logprobs)
    assert torch.equal(found, advantages(settings, scores=scores, ref=torch.where(MASK, ref, torch.inf), logprobs=odd))
    assert not found[~MASK].any()


@pytest.mark.parametrize("settings", ALL, ids=str)
def test_a_better_sample_of_a_group_has_the_larger_advantage(settings: CriticFreeSettings) -> None:
    scores = torch.arange(8.0).double()
    found = advantages(settings, scores=scores)[:, 2]  # the first token of every response
    assert all(found[row] < found[row + 1] for row in (0, 1, 2, 4, 5, 6))


@pytest.mark.parametrize("settings", [RLOO(), Reinforce()], ids=str)
def test_going_away_from_the_reference_costs_advantage_where_it_is_part_of_the_reward(
    settings: CriticFreeSettings,
) -> None:
    scores, logprobs, away = noise(4, 8), noise(1, 8, WIDTH), torch.zeros(8, WIDTH).double()
    away[3, 2:7] = 1.0
    near, far = (advantages(settings, scores=scores, ref=logprobs - x, logprobs=logprobs) for x in (0 * away, away))
    assert far[3, 2] < near[3, 2]
    assert torch.equal(
        advantages(GRPO(), scores=scores, ref=logprobs, logprobs=logprobs),
        advantages(GRPO(), scores=scores, ref=logprobs - away, logprobs=logprobs),
    )


def test_without_a_reference_nothing_is_charged() -> None:
    scores, logprobs = noise(4, 8), noise(1, 8, WIDTH)
    same = advantages(RLOO(), scores=scores, ref=logprobs, logprobs=logprobs)
    assert torch.equal(advantages(RLOO(), scores=scores, logprobs=logprobs), same)


def _scores_in_packings(directory: Path, rows: list[Tensor], packings: list[list[list[int]]]) -> list[Tensor]:
    """What a reward model says of rows in micro-batches of these: [len(rows)] for each packing."""
    mesh = build_mesh(Layout.parse("tp1"), 0)
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    found = []
    for packing in packings:
        blocks = [MicroBatch.pack([rows[row] for row in group]) for group in packing]
        scores = torch.zeros(len(rows))
        for group, block, output in zip(packing, blocks, forward_scalars(model, mesh, blocks), strict=True):
            for row, values in zip(group, block.split_rows(output), strict=True):
                scores[row] = values[-1]
        found.append(scores)
    return found


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_how_a_reward_model_packs_its_rows(tmp_path: Path) -> None:
    """20 groups of one response four times, and 20 of two responses, scored in five packings."""
    directory = write_checkpoint(tmp_path / "model", "Llama", head=HEADS[True])
    drawn = tokens(60, 21)
    lengths = [5 + index % 17 for index in range(60)]
    one, other = ([drawn[index, : lengths[index]] for index in numbers] for numbers in (range(0, 40), range(20, 60)))
    rows = [row for group in range(40) for row in (one[group],) * 3 + ((one if group < 20 else other)[group],)]
    order, draw = list(range(160)), np.random.default_rng(0)
    packings = [[[row] for row in order], [order], *([order[i : i + n] for i in range(0, 160, n)] for n in (3, 7))]
    shuffled = draw.permutation(160).tolist()
    packings.append([shuffled[i : i + 5] for i in range(0, 160, 5)])
    (said,) = run_on_ranks(1, _scores_in_packings, directory, rows, packings)
    assert any(not torch.equal(scores.view(40, 4)[:20, :1].expand(20, 4), scores.view(40, 4)[:20]) for scores in said)
    found = []
    for scores in said:
        batch = StepExperience(step=0, rows=range(160))
        for row in batch.rows:
            batch.experience.put("tokens", row, rows[row])
            batch.experience.put("scores", row, scores[row : row + 1])
        batch.share_scores_of_duplicates()
        paid = compute_rewards(torch.cat([batch.score(row) for row in batch.rows]), torch.zeros(160), GRPO())
        found.append(relative_to_group(paid.amounts, 4, by_std=True))
        assert share_with_signal(paid, 4) == 0.5
        assert not found[-1][:80].any()
        assert not relative_to_group(scores, 4, by_std=True)[:80].any()  # by the threshold alone
    assert max(float((advantages - found[0]).abs().max()) for advantages in found) < 1e-6
