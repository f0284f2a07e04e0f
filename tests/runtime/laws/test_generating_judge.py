"""A judge that generates scores each response by its verdict in every layout; an actor and a critic learn from it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.request import RunRequest, check
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.launch.rendezvous import Rendezvous
from tests.runtime.checkpoints import name_end_tokens, write_checkpoint
from tests.runtime.observed import observe
from tests.runtime.plans_by_hand import Where
from tests.runtime.refereed import request_of
from tests.runtime.rewarded import lines
from tests.runtime.small_job import EOS, VOCAB_SIZE, request, write_job

GENERATED = ["tokens", "prompt_lengths", "truncated", "behaviour_logprobs", "versions"]
BEFORE, AFTER = "w0 w1", "w2 w3 w4"
SCORES = {f"w{number}": float(number % 2) for number in range(VOCAB_SIZE - 2)}
JUDGE: dict[str, Any] = {
    "before": BEFORE,
    "after": AFTER,
    "template_tokens": 5,
    "verdict": {"max": 3, "fixed": 3},
    "scores": SCORES,
    "otherwise": 0.25,
}


def inference(name: str, role: str, field: str, **more: object) -> dict[str, Any]:
    return {"name": name, "kind": "inference", "role": role, "reads": ["tokens"], "writes": [field], **more}


def training(role: str) -> dict[str, Any]:
    reads = ["tokens", "scores", "values", "proximal_logprobs"]
    return {"name": f"{role}_train", "kind": "training", "role": role, "reads": reads}


STAGES: list[dict[str, Any]] = [
    {"name": "actor_generate", "kind": "generation", "role": "actor", "writes": GENERATED},
    inference("judged", "reward", "scores", judge=JUDGE),
    inference("critic_value", "critic", "values"),
    inference("actor_logprob", "actor", "proximal_logprobs"),
    training("actor"),
    training("critic"),
]


def write_judged(directory: Path, *, num_ranks: int, judge: dict[str, Any] | None = None) -> Path:
    """PPO without a reference, in a graph whose reward model is a language model that writes its verdict."""
    path = write_job(directory, num_ranks=num_ranks)
    if not (directory / "judge").exists():
        write_checkpoint(directory / "judge", vocab_size=VOCAB_SIZE, seed=5)
        name_end_tokens(directory / "judge", EOS)
    job = yaml.safe_load(path.read_text())
    job["models"] = {"actor": {"path": "actor"}, "critic": {"path": "reward"}, "reward": {"path": "judge"}}
    job["algorithm"] = {
        "stages": [{**one, "judge": judge or JUDGE} if one["name"] == "judged" else one for one in STAGES]
    }
    job["ppo"] = {"actor_learning_rate": 3e-3, "critic_learning_rate": 3e-3, "kl_coefficient": 0.0}
    path.write_text(yaml.safe_dump(job))
    return path


def verdict_of(model: Any, sequence: torch.Tensor) -> str:
    """The likeliest three tokens after a sequence between the judge's texts, by transformers."""
    before, after = ([int(word[1:]) + 2 for word in text.split()] for text in (BEFORE, AFTER))
    ids, words = [*before, *sequence.tolist(), *after], []
    for _ in range(3):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == EOS:
            break
        ids.append(token)
        words.append("<unk>" if token == 0 else f"w{token - 2}")
    return " ".join(words)


CASES = {
    "one rank": (1, {"other": Where("0:1", schedule=Schedule(micro_batch_size=4))}),
    "tp2": (2, {"other": Where("0:2", "tp2", Schedule(micro_batch_size=8))}),
    "dp2, a pool of its own": (
        4,
        {
            "other": Where("0:2", "dp2", Schedule(micro_batch_size=4)),
            "judged": Where("2:2", "dp2", Schedule(micro_batch_size=2)),
        },
    ),
}


def hand_planned(directory: Path, name: str) -> RunRequest:
    num_ranks, where = CASES[name]
    job = yaml.safe_load(write_judged(directory, num_ranks=num_ranks).read_text())
    return request_of(job, directory, name, where, steps=1)


@pytest.mark.check_all
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_score_of_a_response_is_read_off_what_the_judge_writes(tmp_path: Path, name: str) -> None:
    asked = hand_planned(tmp_path, name)
    [run] = observe(asked.plan.facts.cluster.num_ranks, [asked])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "judge", dtype=torch.float32)
    [held] = run.steps
    verdicts = {row: verdict_of(model, tokens) for row, tokens in held["tokens"].items()}
    spec = JudgeSpec(**{**JUDGE, "verdict": LengthSpec(max=3, fixed=3)})
    expected = {row: spec.parse(text) for row, text in verdicts.items()}
    found = {row: float(score) for row, score in held["scores"].items()}
    assert found == {row: 0.25 if score is None else score for row, score in expected.items()}
    assert len(set(verdicts.values())) > 1


@pytest.mark.check_all
def test_an_actor_and_a_critic_learn_what_a_generating_judge_rewards(tmp_path: Path) -> None:
    asked = request(write_judged(tmp_path, num_ranks=2), tmp_path / "run", steps=30)
    run_plan(asked)
    scores = [line["score"] for line in lines(tmp_path / "run")]
    assert statistics.fmean(scores[-5:]) > statistics.fmean(scores[:5]) + 0.2
    assert all({"policy_loss", "value_loss"} <= line.keys() for line in lines(tmp_path / "run"))


def test_a_template_of_more_tokens_than_planned_is_refused(tmp_path: Path) -> None:
    asked = request(write_judged(tmp_path, num_ranks=1, judge={**JUDGE, "template_tokens": 4}), tmp_path / "run")
    with pytest.raises(
        BadInput, match="the texts of the judge have 5 tokens, and template_tokens=4 is planned for; set"
    ):
        check(asked, Rendezvous())
    assert not asked.out.exists()
