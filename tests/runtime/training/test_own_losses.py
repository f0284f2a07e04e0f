"""Advantages and losses of a job's own are those of their functions; one that breaks its contract ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.planner.job.algorithm_settings import GRPO, RLOO
from meshwright.planner.job.graph_losses import StageLoss
from meshwright.planner.plan.plan import write_plan
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.function_paths import load_path
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload
from meshwright.runtime.execution.replay import replay_batch
from meshwright.runtime.messages.experience import StepExperience
from meshwright.runtime.records.run_directory import RunFile, write_run_file
from meshwright.runtime.training.bad_steps import SkippedBatch, write_skipped
from meshwright.runtime.training.own_losses import (
    AdvantageInputs,
    LossInputs,
    own_advantages,
    own_token_losses,
)
from meshwright.runtime.training.training_batch import TrainingBatch
from tests.runtime import own_functions
from tests.runtime.laws.test_own_losses import CASES, own_run
from tests.runtime.refereed import write_models
from tests.runtime.small_job import write_job

MODULE = "tests.runtime.own_functions"
READS = ("tokens", "scores", "proximal_logprobs", "ref_logprobs")
WORKLOAD = Workload(batch_size=4, group_size=2, prompt=LengthSpec(max=3, fixed=3), response=LengthSpec(max=4, fixed=3))


def batch_of(loss: StageLoss, settings: GRPO | RLOO | None = None) -> TrainingBatch:
    """Four samples of two prompts, with random log-probabilities, which learn by this loss."""
    batch, draw = StepExperience(step=0, rows=range(4)), torch.Generator().manual_seed(0)
    for row, num_response in enumerate((2, 3, 4, 1)):
        end = 3 + num_response
        batch.experience.put("tokens", row, torch.arange(end))
        batch.experience.put("prompt_lengths", row, torch.tensor([3]))
        batch.experience.put("truncated", row, torch.tensor([row == 2], dtype=torch.uint8))
        batch.experience.put("scores", row, torch.tensor([float(row)]))
        for name in ("proximal_logprobs", "ref_logprobs"):
            batch.experience.put(name, row, -torch.rand(end, generator=draw))
    return TrainingBatch(settings or GRPO(), batch, reads=READS, workload=WORKLOAD, loss=loss)


def test_advantages_of_a_function_are_those_of_its_equation_in_float64() -> None:
    block = batch_of(StageLoss(advantages=f"{MODULE}:above_the_mean")).micro_batch(range(4))
    mask, fields = block.fields["mask"].bool(), {name: x.double() for name, x in block.fields.items()}
    above = torch.tensor([-0.5, 0.5, -0.5, 0.5]).double().repeat_interleave(torch.tensor(block.lengths))
    expected = above - 0.05 * (fields["old_logprobs"] - fields["ref_logprobs"])
    assert torch.allclose(fields["advantages"][mask], expected[mask], atol=1e-6)
    assert not fields["advantages"][~mask].any()
    assert int(mask.sum()) == 2 + 3 + 4 + 1


def test_a_loss_of_a_function_has_its_gradient_and_the_rewards_of_its_rows() -> None:
    block = batch_of(StageLoss(function=f"{MODULE}:regressed_reward"), RLOO()).micro_batch(range(4))
    fields: dict[str, Any] = {name: values[None] for name, values in block.fields.items()}
    output = torch.zeros(1, len(block.tokens), dtype=torch.float64, requires_grad=True)
    mask = fields.pop("mask").bool()
    inputs = LossInputs(output=output, entropy=None, mask=mask, fields=fields)
    own_token_losses(f"{MODULE}:regressed_reward", inputs).sum().backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    rewards = torch.arange(4).double().repeat_interleave(torch.tensor(block.lengths))
    assert torch.equal(output.grad[0], -rewards)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("of_rows", r"own_functions:of_rows returned \[4\] torch.float64; let it return a tensor of numbers \[4, 7\]"),
        ("failing", "own_functions:failing failed with ValueError: no old_logprobs; mend it, and run again"),
    ],
)
def test_advantages_that_break_the_contract_end_a_run(name: str, sentence: str) -> None:
    with pytest.raises(RunFailed, match=sentence):
        batch_of(StageLoss(advantages=f"{MODULE}:{name}"))


def test_a_loss_without_a_gradient_ends_a_run() -> None:
    output = torch.zeros(1, 3, requires_grad=True)
    inputs = LossInputs(output=output, entropy=None, mask=torch.ones(1, 3).bool(), fields={})
    with pytest.raises(RunFailed, match="constant returned a loss that does not depend on"):
        own_token_losses(f"{MODULE}:constant", inputs)


def test_the_example_weighs_the_teachers_beside_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples" / "functions"))
    tokens = {"values": 0.25, "teacher_logprobs": -1.0, "teacher_2_logprobs": -3.0, "old_logprobs": -2.5}
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]).double(),
        truncated=torch.zeros(2).bool(),
        mask=torch.tensor([[True, True], [True, False]]),
        group_size=2,
        fields={name: torch.full((2, 2), value) for name, value in tokens.items()},
    )
    found = own_advantages("taught_and_paid:advantages", inputs)
    assert torch.allclose(found, torch.tensor([[0.8, 0.8], [-0.2, 0.0]]))


@pytest.mark.parametrize("path", ["no_such_module:loss", f"{MODULE}:no_such_loss"])
def test_a_function_that_cannot_be_loaded_is_refused(path: str) -> None:
    assert load_path(f"{MODULE}:constant") is own_functions.constant
    with pytest.raises(BadInput, match=f"function {path} cannot be loaded"):
        load_path(path)


def test_a_batch_that_a_function_of_the_job_trains_on_is_not_replayed(tmp_path: Path) -> None:
    write_job(tmp_path, num_ranks=1)
    write_models(tmp_path)
    asked = own_run(tmp_path, "one rank", CASES["one rank"])
    write_plan(asked.out / "plan.json", asked.plan)
    write_run_file(asked.out, RunFile(job=asked.job, directory=str(tmp_path), prompts="0" * 64))
    batch = StepExperience(step=0, rows=range(1))
    batch.experience.put("tokens", 0, torch.arange(3))
    path = write_skipped(
        asked.out,
        SkippedBatch(
            stage="actor_train",
            batch=batch,
            reasons=("planted",),
            settings=asked.job.settings,
            num_epochs=1,
            num_minibatches=1,
            importance_sampling=False,
        ),
    )
    with pytest.raises(BadInput, match=r"is a batch of actor_train, which trains with .*:above_the_mean, and a replay"):
        replay_batch(path)
