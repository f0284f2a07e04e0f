"""Models with experts are loaded, trained, generated from, moved and saved as dense ones are."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file

from meshwright.profiles.errors import BadInput
from meshwright.runtime.train import run_plan
from tests.runtime import small_job
from tests.runtime.checkpoints import edit_config, expected_logprobs, tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import request, write_job
from tests.runtime.test_bodies import How, _train, _written
from tests.runtime.test_checkpoint import Run, _merge
from tests.runtime.test_generation import VOCAB_SIZE, generate
from tests.runtime.test_refit import _check as check_refit
from tests.runtime.test_weights import _check as check_logprobs

pytestmark = pytest.mark.slow

FAMILIES: dict[str, dict[str, int | bool]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
}


def mixture(directory: Path, family: str = "Mixtral", **changes: int | bool) -> Path:
    return write_checkpoint(directory, family, **FAMILIES[family], **changes)


@pytest.mark.parametrize("layout", ["tp1", "pp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_agree_with_transformers(tmp_path: Path, family: str, layout: str) -> None:
    directory = mixture(tmp_path / "model", family)
    check_logprobs(directory, layout, expected_logprobs(directory, tokens()))


def test_weights_of_a_tokens_experts_need_not_sum_to_one(tmp_path: Path) -> None:
    changes = FAMILIES["Qwen3Moe"] | {"norm_topk_prob": False}
    directory = write_checkpoint(tmp_path / "model", "Qwen3Moe", **changes)
    check_logprobs(directory, "tp1", expected_logprobs(directory, tokens()))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_of_experts_is_the_same_however_it_is_computed(tmp_path: Path, family: str) -> None:
    directory = mixture(tmp_path / "model", family)
    hows = [How("tp1", 4), How("dp2", 1), How("pp2,dp2", 1, "full")]
    seen = [run_on_ranks(4, _train, how, directory, False, tmp_path / str(i)) for i, how in enumerate(hows)]
    known = seen[0][0]
    assert known is not None
    expected, before = _written(tmp_path / "0"), load_file(directory / "model.safetensors")
    assert expected.keys() == before.keys()
    assert all((expected[name] != before[name]).any() for name in expected)
    for number, answers in enumerate(seen):
        for metrics in answers:
            for update, first in zip(metrics or [], known, strict=metrics is not None):
                assert update == pytest.approx(first, rel=1e-4, abs=1e-6), hows[number]
        for name, tensor in _written(tmp_path / str(number)).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_a_generator_with_experts_draws_what_its_trainer_scores(tmp_path: Path) -> None:
    directory = mixture(tmp_path / "actor", vocab_size=VOCAB_SIZE)
    alone = run_on_ranks(4, generate, directory, "tp1", 1)[0]
    assert alone is not None
    assert max(alone[1]) < 1e-4
    for answer in run_on_ranks(4, generate, directory, "pp2", 4):
        assert answer is None or [r.tokens for r in answer[0]] == [r.tokens for r in alone[0]]


def write_mixture_job(directory: Path) -> Path:
    """The small job on two ranks with a Mixtral for its actor and reference."""
    path = write_job(directory, num_ranks=2)
    rmtree(directory / "actor")
    mixture(directory / "actor", vocab_size=small_job.VOCAB_SIZE)
    edit_config(directory / "actor", eos_token_id=small_job.EOS)
    return path


WHOLE = tuple(f"{stage}.layout=dp2" for stage in ("actor_generate", "ref_logprob", "actor_logprob", "actor_train"))


def test_a_job_whose_actor_has_experts_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = run_plan(request(write_mixture_job(tmp_path), out, *WHOLE, steps=2))
    assert summary is not None
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["generator_gap"] < 1e-4 for line in lines)


@pytest.mark.parametrize("layout", ["dp2,ep2", "tp2"])
def test_divided_experts_are_refused_before_anything_starts(tmp_path: Path, layout: str) -> None:
    pins = (f"ref_logprob.layout={layout}", *(pin for pin in WHOLE if "ref" not in pin))
    asked = request(write_mixture_job(tmp_path), tmp_path / "out", *pins)
    with pytest.raises(BadInput, match=r"plan: ref_logprob: layout .* divides the experts of actor, which a run keeps"):
        run_plan(asked)
    assert not asked.out.exists()


def test_experts_are_moved_with_their_layers(tmp_path: Path) -> None:
    check_refit(mixture(tmp_path / "model"), ("pp2,dp2", 0), ("dp2", 1))


def test_a_saved_trainer_of_experts_goes_on_where_it_was(tmp_path: Path) -> None:
    mixture(tmp_path / "actor", "Qwen3Moe")
    first, then = ({"actor": (layout, 0)} for layout in ("dp2", "pp2"))
    whole = _merge(tmp_path, Run(places=first, num_updates=3))
    start = _merge(tmp_path, Run(places=first, num_updates=1, written=tmp_path / "saved"))
    rest = _merge(tmp_path, Run(places=then, num_updates=2, read=tmp_path / "saved"))
    assert start["actor"] + rest["actor"] == pytest.approx(whole["actor"], rel=1e-4)
