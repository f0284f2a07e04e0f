"""Rows that take one call of a variable-length kernel attend as those that take a call for each run of equal ones.

Torch's kernel runs on a GPU alone; here one of the same interface computes what that is documented to, row by row.
"""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.runtime.model.attention import CoreAttention, VarlenKernel, torch_varlen_kernel
from tests.runtime.model.test_attention import trained
from tests.runtime.model.test_equal_rows import alike_here_and_there, seeded
from tests.runtime.model.test_kv_cache import SPEC, attend, continued, random_rows, used_cache


def row_by_row(  # noqa: PLR0917 - as torch has it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Causal attention of each row, by the equation, in which the oldest key is this many before the query."""
    before, after = window_size
    assert after == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert all(heads.is_contiguous() for heads in (query, key, value))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert [int(ends[-1]) for ends in (cu_seq_q, cu_seq_k)] == [len(query), len(key)]
    assert [int(ends.diff().max()) for ends in (cu_seq_q, cu_seq_k)] == [max_q, max_k]
    per_group = query.shape[1] // key.shape[1]
    outputs = []
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        own = (heads[begin:end].transpose(0, 1) for heads in (query, key, value))
        queries, keys, values = next(own), *(heads.repeat_interleave(per_group, 0) for heads in own)
        scores = queries @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        hidden = later | torch.ones_like(later).tril(-1 - before) if before >= 0 else later
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


VARLEN = CoreAttention(first_layer=2, layer_number=4, spec=SPEC, varlen=row_by_row)


@seeded
def test_rows_of_any_lengths_answer_and_learn_as_by_plain_calls(seed: int) -> None:
    draw = random.Random(seed)
    rows, tail = random_rows([length for _, _, length in alike_here_and_there(draw)], seed), draw.randint(0, 3)
    for found, expected in zip(trained(rows, tail=tail, attention=VARLEN), trained(rows, tail=tail), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_window_is_handed_to_the_kernel() -> None:
    spec = replace(SPEC, window=SlidingWindow(num_tokens=3))
    plain, by_kernel = (
        CoreAttention(first_layer=2, layer_number=4, spec=spec, varlen=varlen) for varlen in (None, row_by_row)
    )
    rows = random_rows([9, 2, 5], 0)
    for found, expected in zip(trained(rows, attention=by_kernel), trained(rows, attention=plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_pads_the_rows_is_zero() -> None:
    assert (attend(random_rows([3, 5], 0), tail=4, attention=VARLEN)[8:] == 0).all()


def test_what_the_kernel_answers_is_not_copied_where_nothing_pads_the_rows() -> None:
    answers: list[Tensor] = []

    def kept(*inputs: Any, **options: Any) -> Tensor:
        answers.append(row_by_row(*inputs, **options))
        return answers[-1]

    attention = CoreAttention(first_layer=2, layer_number=4, spec=SPEC, varlen=kept)
    for tail, is_copied in ((0, False), (4, True)):
        found = attend(random_rows([3, 5], 0), tail=tail, attention=attention)
        assert (found.data_ptr() != answers[-1].data_ptr()) == is_copied


def test_rows_that_begin_are_kept_and_those_that_go_on_take_plain_calls() -> None:
    rows = random_rows([6, 6], 0)
    answers = []
    for attention in (CoreAttention(first_layer=2, layer_number=4, spec=SPEC), VARLEN):
        cache = used_cache()
        begun = attend([row.chunk(0, 4) for row in rows], continued(cache, [0, 2], [0, 0], [4, 4]), attention=attention)
        gone_on = attend(
            [row.chunk(4, 2) for row in rows], continued(cache, [0, 2], [4, 4], [2, 2]), attention=attention
        )
        answers.append(torch.cat((begun, gone_on)))
    torch.testing.assert_close(*answers, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_torchs_kernel_takes_what_it_is_given() -> None:
    asked = inspect.signature(VarlenKernel.__call__).parameters
    taken = inspect.signature(torch_varlen_kernel()).parameters
    assert [name for name in asked if name != "self"][:7] == list(taken)[:7]
    assert {name: taken[name].kind for name in list(asked)[8:]} == {name: asked[name].kind for name in list(asked)[8:]}
