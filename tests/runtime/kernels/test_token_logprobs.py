"""Sums and gradients by kernels are those of the softmax over the columns that are tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.runtime.kernels import vocabulary
from tests.runtime.kernels.where import DEVICE

NUM_ROWS, WIDTH, REAL = 17, 500, 470
ELSEWHERE = 3, 4
"""Rows whose targets are columns of other ranks."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_LOGPROB_TILE", 128)


def asked() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits, targets = torch.randn(NUM_ROWS, WIDTH) * 3, torch.randint(REAL, (NUM_ROWS,))
    targets[list(ELSEWHERE)] = torch.tensor([-7, 9999])
    return logits, targets


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_log_probabilities_and_entropies_come_from_the_sums(temperature: float) -> None:
    logits, targets = asked()
    highest, (total, target, weighted) = vocabulary.softmax_sums(
        logits.to(DEVICE), targets.to(DEVICE), REAL, temperature
    )
    expected = (logits[:, :REAL] / temperature).log_softmax(-1)
    mine = torch.tensor([row for row in range(NUM_ROWS) if row not in ELSEWHERE])
    found = (target - total.log()).cpu()
    close(found[mine], expected[mine, targets[mine]])
    close((total.log() - weighted / total).cpu(), -(expected.exp() * expected).sum(-1))
    close((highest + total.log()).cpu(), (logits[:, :REAL] / temperature).logsumexp(-1))
    assert (target.cpu()[list(ELSEWHERE)] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradients_are_those_of_log_probabilities_and_entropies(temperature: float) -> None:
    logits, targets = asked()
    logits.requires_grad_()
    scaled = logits[:, :REAL] / temperature
    normalizers, logprobs = scaled.logsumexp(-1), scaled.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    is_mine = (targets >= 0) & (targets < REAL)
    of_target = torch.where(is_mine, scaled.gather(1, targets.clamp(0, REAL - 1)[:, None]).squeeze(1), 0.0)
    weights = torch.randn(2, NUM_ROWS)
    (weights[0] * (of_target - normalizers) + weights[1] * entropies).sum().backward()
    of_rows = tuple(one.detach().to(DEVICE) for one in (*weights, normalizers, entropies))
    found = vocabulary.logits_gradient(logits.detach().to(DEVICE), targets.to(DEVICE), REAL, temperature, of_rows)
    close(found.cpu(), logits.grad)


def close(found: Tensor, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)
