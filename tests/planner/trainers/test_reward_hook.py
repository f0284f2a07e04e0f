"""A reward that is a function goes to a trainer by its own hook, and comes back from there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.job import Facts, RoleModels
from meshwright.planner.job.rewards_and_tools import Reward
from meshwright.planner.solver.result import Limits
from meshwright.planner.trainers.exporter import Exported, best_expressible_plan, export
from meshwright.planner.trainers.registry import READERS, TRAINERS
from meshwright.profiles.errors import BadInput
from tests.planner.drawn import model_of
from tests.planner.trainers.plans import facts_of

HOOKED = ("verl", "openrlhf", "slime")


def paid_by_a_function(*rewards: Reward) -> Facts:
    """A small job of GRPO without a reward model."""
    facts = facts_of(algorithm="grpo")
    rewards = rewards or (Reward(name="verifier", function="reward:score"),)
    models, loads = RoleModels(actor=facts.models.actor), tuple(reward.load for reward in rewards)
    return facts.model_copy(update={"models": models, "rewards": loads})


def exported_to(name: str) -> Exported:
    trainer = TRAINERS[name]
    facts = trainer.with_engine(paid_by_a_function())
    best = best_expressible_plan(trainer, facts, model_of(facts), limits=Limits(gap=0.3))
    assert best is not None
    found = export(trainer, best.plan, model_of)
    assert found is not None
    return found


@pytest.mark.parametrize("name", HOOKED)
def test_a_function_goes_to_a_trainer_and_comes_back(tmp_path: Path, name: str) -> None:
    found = exported_to(name)
    assert found.unsaid == ()
    for file, text in found.files.items():
        (tmp_path / file).write_text(text)
    again = READERS[name].read(tmp_path / "run.sh")
    assert again.by_name["algorithm"] == "grpo"
    assert again.by_name["reward.function"] == "reward:score"
    assert "models.reward" not in again.by_name
    assert again.unmodelled == {}


def test_the_hook_of_verl_and_slime_gives_the_function_a_sample_and_the_trainer_its_score() -> None:
    @dataclass
    class Drawn:
        prompt: str
        response: str
        label: object

    for name in ("verl", "slime"):
        own: dict[str, Any] = {}
        exec(exported_to(name).files["reward_hook.py"], own)
        with pytest.raises(NotImplementedError, match=r"rewards\.function"):
            own["score"]([])
        own["score"] = lambda samples: [len(samples[0].response) + (samples[0].answer == "4")]
        hook = own["compute_score"]
        if name == "verl":
            assert hook("maths", "abc", 4, {"prompt": "2 + 2"}) == 4.0
        else:
            assert asyncio.run(hook(None, Drawn("2 + 2", "abc", "4"))) == 4.0


def test_what_no_hook_can_say_is_refused() -> None:
    judge = Reward(name="judge", url="https://judge.example/score")
    two = (Reward(name="one", function="a:b"), Reward(name="two", function="a:c"))
    for name in HOOKED:
        with pytest.raises(BadInput, match=r"judges behind a URL \(judge\)"):
            TRAINERS[name].require_expressible(paid_by_a_function(judge))
        with pytest.raises(BadInput, match=r"several rewards together \(one, two\)"):
            TRAINERS[name].require_expressible(paid_by_a_function(*two))
