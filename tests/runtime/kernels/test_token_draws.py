"""Tokens drawn by kernels, and their log-probabilities, are those that torch's operations give."""

from __future__ import annotations

import pytest
import torch

from meshwright.runtime.inference.sampling import Sampling
from meshwright.runtime.kernels import vocabulary
from tests.runtime.kernels.where import DEVICE

NUM_ROWS, WIDTH = 24, 700


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_SAMPLING_TILE", 64)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_the_same_tokens_are_drawn(temperature: float) -> None:
    torch.manual_seed(0)
    padded = torch.randn(NUM_ROWS, WIDTH + 20) * 3
    logits, uniform = padded[:, :WIDTH], torch.rand(NUM_ROWS, dtype=torch.float64)
    expected, of_expected = Sampling(temperature=temperature).sample(logits, uniform)
    found, of_found = vocabulary.sample_tokens(padded.to(DEVICE)[:, :WIDTH], uniform.to(DEVICE), temperature)
    assert torch.equal(found.cpu(), expected)
    torch.testing.assert_close(of_found.cpu(), of_expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_what_cannot_be_drawn_is_never_drawn(number: float) -> None:
    logits = torch.full((3, WIDTH), -torch.inf)
    logits[0, 333] = logits[1, 64] = logits[1, 640] = 0.0
    logits[2, 5:70] = 1.0
    uniform = torch.full((3,), number, dtype=torch.float64)
    found, logprobs = vocabulary.sample_tokens(logits.to(DEVICE), uniform.to(DEVICE), 1.0)
    assert logits.gather(1, found.cpu()[:, None]).isfinite().all()
    assert found[0] == 333
    torch.testing.assert_close(logprobs.cpu(), -torch.tensor([1.0, 2.0, 65.0]).log(), atol=1e-6, rtol=1e-6)
