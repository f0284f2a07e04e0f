"""A stage that scores what streams: answers are those of whole sequences, whatever turn ends or delivers them."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.profiles.layout import Layout
from meshwright.runtime.inference.chunk_streaming import ChunkedStage, ChunkScorer, Scored
from meshwright.runtime.messages.streaming import ChunkReader, ChunkSender, TokenChunk
from meshwright.runtime.messages.transport import ProcessRanks, Transport
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.planner.jobs import model_spec
from tests.runtime.ranks import run_on_ranks

PROMPTS = {10: (1, 2, 3), 11: (4,), 12: (5, 6)}
RESPONSES = {10: (20, 21, 22, 23), 11: (30, 31, 32), 12: (40, 41)}


def chunk(sequence: int, first: int, end: int) -> TokenChunk:
    return TokenChunk(sequence, RESPONSES[sequence][first:end], is_last=end == len(RESPONSES[sequence]))


TURNS = [
    ([[TokenChunk(n, PROMPTS[n]) for n in PROMPTS], [chunk(10, 0, 2), chunk(12, 0, 2)], [chunk(10, 2, 4)]], {10: 7}),
    ([[chunk(11, 0, 2)], [chunk(11, 2, 3)]], {11: 0, 12: 1}),
    ([], {}),
]
"""What streams in each turn, and what each delivers in which rows. Sequence 12 ends a turn before it is delivered, and
sequence 11 stays in flight."""


def _scored() -> tuple[list[Scored], list[int], dict[int, Tensor]]:
    """What each turn scored, the scorers that were built by its end, and the answers for whole sequences."""
    mesh = build_mesh(Layout(), dist.get_rank())
    model = build_model(model_spec("actor"), mesh)
    assert isinstance(model, Decoder)
    process, nobody = ProcessRanks(2), cast(dist.ProcessGroup, None)
    owner, reader = (Transport(nobody, rank=rank, process=process) for rank in range(2))
    built: list[ChunkScorer] = []

    def build() -> ChunkScorer:
        built.append(ChunkScorer(model, mesh, max_rows=3, max_tokens=7, micro_batch_size=2))
        return built[-1]

    sender = ChunkSender((1,), owner, channel=0)
    stage, found, numbers = ChunkedStage(ChunkReader((0,), (1,), reader, channel=0), build), [], []
    for messages, delivered in TURNS:
        for chunks in messages:
            sender.send(chunks)
        sender.end(delivered)
        found.append(stage.run())
        numbers.append(len(built))
    blocks = [MicroBatch.pack([torch.tensor(PROMPTS[n] + RESPONSES[n])]) for n in PROMPTS]
    return found, numbers, dict(zip(PROMPTS, forward_logprobs(model, mesh, blocks), strict=True))


def test_sequences_are_answered_in_their_rows_when_they_are_delivered() -> None:
    [(found, built, whole)] = run_on_ranks(1, _scored)
    assert [set(scored.values) for scored in found] == [{7}, {0, 1}, set()]
    answers = {row: answer for scored in found for row, answer in scored.values.items()}
    for row, sequence in {7: 10, 0: 11, 1: 12}.items():
        answer = answers[row]
        assert answer is not None
        torch.testing.assert_close(answer, whole[sequence], atol=1e-5, rtol=1e-5)
    assert sum(scored.num_tokens for scored in found) == sum(map(len, whole.values()))
    assert all(scored.starved_seconds >= 0 for scored in found)
    assert built == [1, 1, 2]  # what is kept for a sequence in flight goes on; with none in flight it is given back
