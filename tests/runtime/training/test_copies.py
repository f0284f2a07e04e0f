"""Copies of weights: one for each pool and layout of a role, and the versions that training and refits give them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.runtime.model.kernel_choice import PLAIN
from meshwright.runtime.rollout.prompts import read_data
from meshwright.runtime.training.weight_copies import DTYPES, build_copies, build_refits, restore_versions
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import VOCAB_SIZE, write_job

WHERE = {
    "other": Where("0:1"),
    "actor_train": Where("1:1"),
    "actor_logprob": Where("1:1"),
    "reward_score": Where("1:1"),
}
"""The actor is trained on rank 1 and generates on rank 0; the reference and the critic are on rank 0 alone."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=2)


def plan_of(path: Path) -> Plan:
    return plan_by_hand(resolve(read_job(path), path.parent), WHERE)


@dataclass(frozen=True)
class Seen:
    """A copy as a rank sees it: whether it has the model and the trainer, and its version when it is built, after a
    refit, and after it was resumed at step 7."""

    has_model: bool
    has_trainer: bool
    built: int | None
    refit: int | None
    resumed: int | None


def _seen(path: Path) -> tuple[dict[str, Seen], dict[str, Tensor], list[tuple[str, str]]]:
    """The copies, a sum over the weights of each that is here once refits have run, and the refits."""
    plan, job = plan_of(path), read_job(path)
    copies = build_copies(plan, job, path.parent, read_data(job, path.parent).num_tokens, PLAIN)
    refits = build_refits(plan, copies)
    built = {name: copy.version.number for name, copy in copies.items()}
    for refit in refits.values():
        refit.run()
    refit_to = {name: copy.version.number for name, copy in copies.items()}
    restore_versions(copies, 7)
    seen = {
        name: Seen(copy.model is not None, copy.trainer is not None, built[name], refit_to[name], copy.version.number)
        for name, copy in copies.items()
    }
    sums = {
        name: torch.stack([parameter.detach().double().sum() for parameter in copy.model.parameters()])
        for name, copy in copies.items()
        if copy.model is not None
    }
    assert all(copy.spec.scalar_head or copy.spec.vocab_size == VOCAB_SIZE for copy in copies.values())
    return seen, sums, list(refits)


def test_a_copy_is_where_its_stages_are_and_trained_where_its_role_is(path: Path) -> None:
    plan, answers = plan_of(path), run_on_ranks(2, _seen, path)
    for rank, (seen, _, _) in enumerate(answers):
        assert set(seen) == {plan.copy_of(placement.stage) for placement in plan.placements}
        for name, copy in seen.items():
            assert copy.has_model == (rank in plan.pool_of(name).ranks), name
            assert copy.has_trainer == (copy.has_model and name in PPO_GRAPH.train_stage.values()), name
    assert plan.copy_of("actor_logprob") == "actor_train"
    assert plan.copy_of("critic_value") == "critic_train"


def test_versions_begin_at_nothing_come_with_a_refit_and_are_resumed_where_weights_are_trained(path: Path) -> None:
    (seen, generated, refits), (also, trained, _) = run_on_ranks(2, _seen, path)
    assert refits == [("actor_train", "actor_generate")]
    assert (seen["actor_generate"].built, seen["actor_generate"].refit) == (None, 0)
    assert (also["actor_train"].built, also["actor_train"].resumed) == (0, 7)
    assert seen["actor_generate"].resumed == 0  # until the next refit brings it
    assert (seen["ref_logprob"].built, seen["ref_logprob"].resumed) == (0, 0)
    torch.testing.assert_close(generated["actor_generate"], trained["actor_train"], atol=0, rtol=0)


def test_every_precision_of_a_job_has_a_type() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {"fp32": 4, "bf16": 2}
