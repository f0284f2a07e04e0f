"""Distributions cut to a teacher's likeliest tokens are those of the whole vocabulary, however it is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import meshwright.runtime.model.distributions as module
from meshwright.planner.job.algorithm_settings import Divergence
from meshwright.profiles.layout import Layout
from meshwright.runtime.model.distributions import LEAST_LOGPROB, VocabShard, logprobs_of_tokens, top_distributions
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.training.distillation import divergence
from tests.runtime.ranks import run_on_ranks

VOCAB, PADDED, ROWS, TEMPERATURE = 35, 48, 9, 0.7  # of four ranks, the last one has no token
POSITIONS = torch.tensor([0, 2, 3, 7, 8])


def logits_of(seed: int) -> Tensor:
    """In steps of 1/2, so that many are equal; the columns that pad the vocabulary are the largest."""
    drawn = (3 * torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(seed)) * 2).round() / 2
    drawn[:, VOCAB:] = 50.0
    return drawn


def whole(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens and of the rest, in float64 from all columns."""
    log_p = (logits[POSITIONS, :VOCAB].double() / TEMPERATURE).log_softmax(-1)
    rest = log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, tokens), rest], dim=-1)


def weights_of(logprobs: Tensor) -> Tensor:
    return torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)


def _cut(tp: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """A teacher's distributions, a student's log-probabilities of their tokens, and its gradient, by two rows each."""
    mesh = build_mesh(Layout(tp=tp), 0)
    if not mesh.is_member:
        return None
    teacher, student = (logits_of(seed).chunk(tp, dim=-1)[mesh.tp_rank].clone() for seed in (1, 2))
    before, module.CHUNK_ELEMENTS = module.CHUNK_ELEMENTS, 4 * teacher.shape[-1]
    shard = VocabShard.of(teacher, mesh.groups.tp, VOCAB, TEMPERATURE)
    tokens, of_teacher = top_distributions(teacher, POSITIONS, shard, top_k)
    found = logprobs_of_tokens(student.requires_grad_(), POSITIONS, tokens.long(), shard)
    found.backward(weights_of(found))  # type: ignore[no-untyped-call]
    module.CHUNK_ELEMENTS = before
    assert student.grad is not None
    return tokens, of_teacher, found.detach(), student.grad


@pytest.mark.parametrize("top_k", [4, 20])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tokens_log_probabilities_and_gradients_are_those_of_the_whole_vocabulary(tp: int, top_k: int) -> None:
    teacher, student = logits_of(1), logits_of(2).double().requires_grad_()
    order = teacher[POSITIONS, :VOCAB].argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    expected = whole(student, order)
    expected.backward(weights_of(expected))  # type: ignore[no-untyped-call]
    answers = [answer for answer in run_on_ranks(4, _cut, tp, top_k) if answer]
    for tokens, of_teacher, of_student, _ in answers:
        assert torch.equal(tokens.long(), order)
        torch.testing.assert_close(of_teacher.double(), whole(teacher, order), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(of_student.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.cat([answer[3] for answer in answers], dim=-1)
    assert student.grad is not None
    torch.testing.assert_close(gradient.double(), student.grad, atol=1e-5, rtol=1e-5)


def _nothing_left() -> tuple[Tensor, Tensor]:
    logits = logits_of(2).requires_grad_()
    shard = VocabShard.of(logits, build_mesh(Layout(), 0).groups.tp, VOCAB, TEMPERATURE)
    tokens, _ = top_distributions(logits.detach(), POSITIONS, shard, VOCAB)
    found = logprobs_of_tokens(logits, POSITIONS, tokens.long(), shard)
    found[:, -1].sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return found.detach(), logits.grad


def test_beside_all_tokens_the_rest_has_the_least_probability_and_no_gradient() -> None:
    [(found, gradient)] = run_on_ranks(1, _nothing_left)
    assert (found[:, -1] == LEAST_LOGPROB).all()
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_cut_divergence_grows_with_the_tokens_up_to_that_of_the_whole_distributions(kind: Divergence) -> None:
    """The data-processing inequality: merging outcomes never makes distributions differ more."""
    teacher, student = logits_of(1), logits_of(2)
    order = teacher[POSITIONS, :VOCAB].argsort(dim=-1, descending=True, stable=True)
    found = [
        divergence(whole(student, order[:, :k]), whole(teacher, order[:, :k]), kind) for k in (1, 4, 12, VOCAB - 1)
    ]
    p, q = (whole(logits, order)[:, :-1] for logits in (teacher, student))
    exact = (q.exp() * (q - p)).sum(-1) if kind == "reverse" else (p.exp() * (p - q)).sum(-1)
    assert (found[0] >= 0).all()
    assert all((more >= less - 1e-12).all() for less, more in zip(found, [*found[1:], exact], strict=True))
    torch.testing.assert_close(found[-1], exact, atol=1e-9, rtol=1e-9)
    assert not divergence(p, p, kind).any()
