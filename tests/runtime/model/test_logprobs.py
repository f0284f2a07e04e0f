"""The cut log-softmax agrees with torch's whole one, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright.runtime.model.logprobs as module
from meshwright.profiles.layout import Layout
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import build_mesh
from tests.runtime.ranks import run_on_ranks

LENGTH, ROWS, PADDED = 6, 3, 64


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole logits [S, B, V], targets [B, S], and weights [B, S] of two terms of a loss."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(LENGTH, ROWS, PADDED, generator=generator)
    targets = torch.randint(0, 30, (ROWS, LENGTH), generator=generator)
    return logits, targets, *torch.randn(2, ROWS, LENGTH, generator=generator)


def _cut(tp: int, vocab_size: int, temperature: float, by_kernel: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probabilities, entropies and this rank's gradient; three tokens at a time are held in fp32, or none."""
    mesh = build_mesh(Layout(tp=tp), 0)
    if not mesh.is_member:
        return None
    logits, targets, first, second = _inputs()
    shard = logits.chunk(tp, dim=-1)[mesh.tp_rank].clone().requires_grad_()
    before = module.CHUNK_ELEMENTS, module.runs_triton_kernels
    module.CHUNK_ELEMENTS, module.runs_triton_kernels = 3 * shard.shape[-1], lambda _: by_kernel
    logprobs, entropies = token_logprobs(
        shard, targets, mesh.groups.tp, vocab_size=vocab_size, temperature=temperature, with_entropy=True
    )
    assert entropies is not None
    (logprobs * first + entropies * second).sum().backward()
    module.CHUNK_ELEMENTS, module.runs_triton_kernels = before
    assert shard.grad is not None
    return logprobs.detach(), entropies.detach(), shard.grad


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("vocab_size", "temperature"), [(64, 1.0), (50, 0.7), (30, 1.3)])  # 30: two ranks only pad
def test_it_agrees_with_the_whole_softmax(tp: int, vocab_size: int, temperature: float, by_kernel: bool) -> None:
    logits, targets, first, second = _inputs()
    logits.requires_grad_()
    whole = (logits[..., :vocab_size] / temperature).log_softmax(-1).transpose(0, 1)
    logprobs = whole.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropies = -(whole.exp() * whole).sum(-1)
    (logprobs * first + entropies * second).sum().backward()
    assert logits.grad is not None
    answers = [answer for answer in run_on_ranks(4, _cut, tp, vocab_size, temperature, by_kernel) if answer]
    for cut_logprobs, cut_entropies, _ in answers:
        torch.testing.assert_close(cut_logprobs, logprobs.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cut_entropies, entropies.detach(), atol=1e-5, rtol=1e-5)
    gradient = torch.cat([answer[2] for answer in answers], dim=-1)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-5, rtol=1e-5)


def _in_bf16() -> tuple[torch.dtype, torch.dtype]:
    group = build_mesh(Layout(), dist.get_rank()).groups.tp
    logits, targets, *_ = _inputs()
    logits = logits.bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(logits, targets, group, vocab_size=PADDED)
    logprobs.sum().backward()
    assert logits.grad is not None
    return logprobs.dtype, logits.grad.dtype


def test_bf16_logits_give_fp32_logprobs_and_a_bf16_gradient() -> None:
    assert run_on_ranks(1, _in_bf16) == [(torch.float32, torch.bfloat16)]


KEPT_TEMPERATURE = 0.7


def _sets() -> Tensor:
    """Sampling masks [B, S, K] of 2 to 6 tokens with the target among them, and one empty set."""
    _, targets, *_ = _inputs()
    draw = torch.Generator().manual_seed(5)
    kept = torch.full((ROWS, LENGTH, 6), -1)
    for row in range(ROWS):
        for position in range(LENGTH):
            others = torch.randperm(PADDED, generator=draw)
            others = others[others != targets[row, position]][: int(torch.randint(1, 6, (), generator=draw))]
            of_position = torch.cat([targets[row, position, None], others]).sort().values
            kept[row, position, : len(of_position)] = of_position
    kept[1, 2] = -1
    return kept


def _cut_over_sets() -> dict[int, tuple[Tensor, Tensor, Tensor] | None]:
    """Log-probabilities, entropies and this rank's gradient, by tp."""
    found: dict[int, tuple[Tensor, Tensor, Tensor] | None] = {}
    for tp in (1, 2, 4):
        mesh = build_mesh(Layout(tp=tp), 0)
        if not mesh.is_member:
            continue
        logits, targets, first, second = _inputs()
        shard = logits.chunk(tp, dim=-1)[mesh.tp_rank].clone().requires_grad_()
        logprobs, entropies = token_logprobs(
            shard,
            targets,
            mesh.groups.tp,
            vocab_size=PADDED,
            temperature=KEPT_TEMPERATURE,
            with_entropy=True,
            kept=_sets(),
        )
        assert entropies is not None
        (logprobs * first + entropies * second).sum().backward()
        assert shard.grad is not None
        found[tp] = logprobs.detach(), entropies.detach(), shard.grad
    return found


def test_over_sampling_masks_it_agrees_with_the_softmax_of_masked_logits() -> None:
    """In float64, with minus infinity for the tokens outside the sets; where a set is empty all is zero."""
    logits, targets, first, second = _inputs()
    whole, kept = logits.double().requires_grad_(), _sets()
    is_kept = torch.zeros(ROWS, LENGTH, PADDED + 1, dtype=torch.bool).scatter_(-1, kept % (PADDED + 1), value=True)
    is_kept = is_kept[..., :PADDED]
    is_full = is_kept.any(-1)
    masked = (whole.transpose(0, 1) / KEPT_TEMPERATURE).masked_fill(~is_kept & is_full[..., None], -torch.inf)
    logp = masked.log_softmax(-1)
    logprobs = torch.where(is_full, logp.gather(-1, targets[..., None])[..., 0], 0.0)
    terms = torch.where(is_kept, logp.exp() * torch.where(is_kept, logp, 0.0), 0.0)
    entropies = -terms.sum(-1)
    (logprobs * first + entropies * second).sum().backward()
    assert whole.grad is not None
    answers = run_on_ranks(4, _cut_over_sets)
    for tp in (1, 2, 4):
        of_ranks = [answer[tp] for answer in answers if answer and tp in answer]
        for found in of_ranks:
            assert found is not None
            torch.testing.assert_close(found[0].double(), logprobs.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found[1].double(), entropies.detach(), atol=1e-5, rtol=1e-5)
        gradient = torch.cat([found[2] for found in of_ranks if found], dim=-1)
        torch.testing.assert_close(gradient.double(), whole.grad, atol=1e-5, rtol=1e-5)
