"""Messages of a pipeline: hidden states go to the next stage, what was drawn goes to all before the last, in order."""

from __future__ import annotations

import torch

from meshwright.profiles.layout import Layout
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.stage_passes import PipelineLink
from tests.runtime.ranks import run_on_ranks

ROUNDS = 5


def _relayed(layout: str) -> tuple[int, list[float], list[list[float]]]:
    """This rank's stage, and what it got of each kind: each stage adds one to what comes, which begins as the round."""
    mesh = build_mesh(Layout.parse(layout), 0)
    relay, hidden, drawn = PipelineLink(mesh, torch.device("cpu")), [], []
    for number in range(ROUNDS):
        coming = torch.full((number + 1, 4), float(number))
        if not mesh.is_first_stage:
            coming = relay.receive_hidden((number + 1, 4), torch.float32)
        assert (coming == coming[0, 0]).all()
        hidden.append(float(coming[0, 0]))
        if mesh.is_last_stage:
            relay.send_sampled(torch.stack([coming[:, 0], -coming[:, 0]]).double())
        else:
            relay.send_hidden((coming + 1).T.contiguous().T)  # not contiguous, as parts of larger tensors are
    if not mesh.is_last_stage:
        drawn = [relay.receive_sampled(number + 1)[:, 0].tolist() for number in range(ROUNDS)]
    relay.flush()
    return mesh.pp_rank, hidden, drawn


def test_every_stage_gets_what_the_one_before_sent_and_what_the_last_drew() -> None:
    for stage, hidden, drawn in run_on_ranks(4, _relayed, "pp4"):
        assert hidden == [float(number + stage) for number in range(ROUNDS)]
        assert drawn == ([] if stage == 3 else [[number + 3.0, -number - 3.0] for number in range(ROUNDS)])


def test_tensor_parallel_ranks_have_pipelines_of_their_own() -> None:
    assert [(stage, hidden[0]) for stage, hidden, _ in run_on_ranks(4, _relayed, "tp2,pp2")] == [
        (0, 0.0),
        (0, 0.0),
        (1, 1.0),
        (1, 1.0),
    ]
