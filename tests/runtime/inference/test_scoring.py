"""Scoring in chunks answers what scoring whole sequences does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.cost_models.period_ends import FirstEnded
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.chunk_streaming import Chunk, Chunker, ChunkScorer
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt, Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs, forward_scalars
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

pytestmark = pytest.mark.slow

LENGTHS = (13, 5, 9, 11, 1)
MAX_ROWS = 3
TEMPERATURE = 0.8
LAYOUTS = ["tp1", "tp2", "pp2", "tp2,pp2,sp"]


def sequence(row: int) -> list[int]:
    return tokens(1, LENGTHS[row], seed=row)[0].tolist()


def in_chunks(directory: Path, layout: str, chunk_tokens: int) -> list[tuple[Tensor, Tensor]] | None:
    """For each row what it was scored in chunks and at once, on ranks of the last stage; elsewhere an empty list.

    Rows begin one after another, a later one in the slot that an earlier one leaves, and so are never equally far.
    """
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    scorer = ChunkScorer(
        model, mesh, max_rows=MAX_ROWS, max_tokens=max(LENGTHS), micro_batch_size=2, temperature=TEMPERATURE
    )
    waiting, remaining, answers = list(range(len(LENGTHS))), {}, {}
    while waiting or remaining:
        if waiting and len(remaining) < MAX_ROWS:
            row = waiting.pop(0)
            remaining[row] = sequence(row)
        scorer.extend({row: left[:chunk_tokens] for row, left in remaining.items()})
        remaining = {row: left[chunk_tokens:] for row, left in remaining.items()}
        for row in [row for row, left in remaining.items() if not left]:
            answers[row] = scorer.finish(row)
            del remaining[row]
    blocks = [MicroBatch.pack([torch.tensor(sequence(row))]) for row in range(len(LENGTHS))]
    if spec.scalar_head:
        whole = forward_scalars(model, mesh, blocks)
    else:
        whole = forward_logprobs(model, mesh, blocks, temperature=TEMPERATURE)
    return [(answers[row], expected) for row, expected in enumerate(whole)]


@cases("head", ["ForCausalLM", "ForSequenceClassification"], few=1)
def test_chunks_of_any_size_are_scored_as_whole_sequences(tmp_path: Path, head: str) -> None:
    directory = write_checkpoint(tmp_path / "model", head=head)
    for layout in LAYOUTS:
        for chunk_tokens in (1, 5, 64):
            found = [pairs for pairs in run_on_ranks(4, in_chunks, directory, layout, chunk_tokens) if pairs]
            assert len(found) == Layout.parse(layout).tp
            for pairs in found:
                assert [len(chunked) for chunked, _ in pairs] == list(LENGTHS)
                for chunked, whole in pairs:
                    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


Streamed = tuple[tuple[int, ...], Tensor | None]
"""A response as the stream told it, and what it was scored; None before the last stage."""


def while_generating(directory: Path, layout: str) -> list[tuple[Response, Streamed]]:
    """Each response that turns delivered, and what a scorer made of it that read the stream."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return []
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    scorer = ChunkScorer(model, mesh, max_rows=8, max_tokens=40, micro_batch_size=8)
    told: dict[int, tuple[int, ...]] = {}
    scored: dict[int, Streamed] = {}

    def read(chunks: Sequence[Chunk], _: int) -> None:
        scorer.extend({c.prompt.row: c.tokens if c.prompt.row in told else c.prompt.tokens + c.tokens for c in chunks})
        for chunk in chunks:
            row = chunk.prompt.row
            told[row] = told.get(row, ()) + chunk.tokens
            if chunk.finish is not None:
                scored[row] = told[row], scorer.finish(row)

    generator = Generator(
        model, spec, mesh, num_slots=5, max_tokens=40, max_response=30, eos_tokens=frozenset(), temperature=1.0, seed=3
    )
    prompts = [Prompt(row=r, sample_id=r, tokens=tuple(sequence(r % 4)[:6]), max_response=3 * r + 1) for r in range(6)]
    stream, rule = Chunker(4, read), FirstEnded(2, max_deferral=2)
    responses = [
        response
        for admitted in (prompts[:4], prompts[4:], [])
        for response in generator.run_period(admitted, version=0, delivery=rule, stream=stream)
    ]
    return [(response, scored[response.row]) for response in responses]


@cases("layout", ["tp1", "tp2", "pp2"], few=1)
def test_a_stream_is_scored_while_it_is_generated(tmp_path: Path, layout: str) -> None:
    directory = write_checkpoint(tmp_path / "model")
    answers = [answer for answer in run_on_ranks(4, while_generating, directory, layout) if answer]
    assert len(answers) == Layout.parse(layout).num_ranks
    for answer in answers:
        assert sorted(response.row for response, _ in answer) == list(range(6))
        assert all(response.tokens == streamed for response, (streamed, _) in answer)
    scored = [(r, logprobs) for answer in answers for r, (_, logprobs) in answer if logprobs is not None]
    assert len(scored) == 6 * Layout.parse(layout).tp
    for response, logprobs in scored:
        of_response = logprobs[len(response.prompt.tokens) - 1 : -1]
        torch.testing.assert_close(of_response, torch.tensor(response.logprobs), atol=1e-4, rtol=0)
