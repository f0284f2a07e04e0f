"""Models whose vocabularies are padded differently: what only pads is never drawn and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.checkpoints import edit_config
from tests.runtime.execution.test_train import FIELDS, run_steps
from tests.runtime.small_job import OF_TIME, VOCAB_SIZE, request, write_job

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
PINS = (
    "actor_generate.layout=tp2",
    "actor_train.layout=tp2",
    "actor_logprob.layout=pp2",
    "ref_logprob.layout=tp2,sp",
    "critic_train.layout=tp2",
    "reward_score.layout=dp2",
)


def widen(directory: Path, num_rows: int) -> None:
    """Adds rows to the vocabulary that are as likely to be drawn as any others."""
    path, draw = directory / "model.safetensors", torch.Generator().manual_seed(7)
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = 0.1 * torch.randn(num_rows, tensors[name].shape[1], generator=draw)
        tensors[name] = torch.cat([tensors[name], rows])
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(directory, vocab_size=VOCAB_SIZE + num_rows)


def test_an_actor_with_more_rows_than_its_critic_trains_as_one_without_them(tmp_path: Path) -> None:
    narrow = run_steps(request(write_job(tmp_path / "narrow", num_ranks=1), tmp_path / "one", steps=2))
    path = write_job(tmp_path / "wide", num_ranks=2)
    widen(path.parent / "actor", 4)
    asked = request(path, tmp_path / "two", *PINS, steps=2)
    assert asked.plan.facts.models.actor.vocab_size == 4 + asked.plan.facts.models.critic.vocab_size
    wide = run_steps(asked)
    for one, two in zip(narrow[0], wide[0], strict=True):
        assert max(int(tokens.max()) for tokens in two["tokens"].values()) < VOCAB_SIZE
        for field in FIELDS:
            for row in range(16):
                torch.testing.assert_close(two[field][row], one[field][row], atol=TOLERANCE, rtol=0)
    for one, two in zip(narrow[1], wide[1], strict=True):
        for name in one.keys() - OF_TIME:
            assert two[name] == pytest.approx(one[name], abs=TOLERANCE), name
