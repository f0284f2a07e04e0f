"""The reward command: made-up responses are scored before anything starts, and what would teach nothing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.command import Call
from tests.runtime.rewarded import write_rewarded

EXACT = {"name": "exact", "function": "exact_match"}


def test_reference_answers_and_prompts_are_scored(call: Call, tmp_path: Path) -> None:
    job = write_rewarded(tmp_path, EXACT, {"name": "half", "function": "exact_match", "weight": 0.5})
    outcome = call("reward", "try", job, "--rows", 2, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert [one["is_answer"] for one in found["samples"]] == [True, False] * 2
    for sample in found["samples"]:
        scores = {score["reward"]: score["score"] for score in sample["scores"]}
        assert scores == dict.fromkeys(("exact", "half"), float(sample["is_answer"]))
        assert sample["total"] == (1.5 if sample["is_answer"] else 0.0)
    assert found["notes"] == []


def test_a_reward_that_teaches_nothing_and_one_that_fails_are_named(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poor.py").write_text(
        "def same(samples):\n    return [sample['id'] is None for sample in samples]\n"
        "def wrong(samples):\n    return [0.0 if sample.response == sample.answer else 1.0 for sample in samples]\n"
        "def broken(samples):\n    return [sample.text for sample in samples]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("same", "wrong", "broken")
    job = write_rewarded(tmp_path, *({"name": name, "function": f"poor:{name}"} for name in names))
    refused = call("reward", "try", job)
    assert refused.code == 2
    assert "give --allow-module poor if you trust it" in refused.err
    outcome = call("reward", "try", job, "--rows", 1, "--allow-module", "poor")
    assert outcome.code == 4
    assert "same scores every response 0: a group whose scores are equal teaches nothing." in outcome.out
    assert "wrong does not score reference answers above the prompts themselves" in outcome.out
    assert "AttributeError: 'RewardSample' object has no attribute 'text'" in outcome.out


def test_a_job_without_rewards_has_nothing_to_try(call: Call, job: Path) -> None:
    outcome = call("reward", "try", job)
    assert outcome.code == 2
    assert "the job has no rewards to try; add rewards" in outcome.err
