"""What a rank keeps of a role from step to step, by hand, and what of it may wait on the host."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.cost import Cost
from meshwright.cost_models.params import StagePart
from meshwright.cost_models.question import Call
from meshwright.cost_models.state import offloaded, optimizer_state, weights
from meshwright.profiles.errors import BadInput
from meshwright.profiles.schedule import Offload

PART = StagePart(num_layers=4, num_params=1000.0, num_behind=1, expert_params=0.0)


def amounts(cost: Cost) -> dict[str, float]:
    return {term.name: term.amount for term in cost.terms}


def test_a_copy_takes_its_elements_and_only_training_keeps_more(call: Callable[..., Call]) -> None:
    assert amounts(weights(1000.0, 2)) == {"weights": 2000.0}
    assert optimizer_state(call("ref_logprob"), PART, 2) == Cost()
    assert amounts(optimizer_state(call("actor_train"), PART, 2)) == {
        "gradients": 4000.0,
        "main weights": 4000.0,
        "moments": 8000.0,
    }


def test_a_weight_in_fp32_is_its_own_main_weight(call: Callable[..., Call]) -> None:
    assert amounts(optimizer_state(call("actor_train"), PART, 4)) == {"gradients": 4000.0, "moments": 8000.0}


@pytest.mark.parametrize("layout", ["dp4", "cp4", "dp2,cp2"])
def test_ranks_with_the_same_weights_share_the_state_and_not_the_gradients(
    call: Callable[..., Call], layout: str
) -> None:
    found = amounts(optimizer_state(call("actor_train", layout), PART, 2))
    assert found == {"gradients": 4000.0, "main weights": 1000.0, "moments": 2000.0}


def test_the_state_of_experts_is_shared_by_those_that_hold_them(call: Callable[..., Call]) -> None:
    """600 of the parameters are in experts, spread over 4 of 8 replicas: all replicas hold 1000 + 3 x 600 together."""
    part = PART._replace(expert_params=600.0)
    found = amounts(optimizer_state(call("actor_train", "dp8,ep4"), part, 2))
    assert found == {"gradients": 4000.0, "main weights": 4 * 2800 / 8, "moments": 8 * 2800 / 8}


def test_what_waits_on_the_host_is_a_frozen_copy_or_all_that_an_optimizer_keeps(call: Callable[..., Call]) -> None:
    assert offloaded(call("ref_logprob", offload=Offload.WEIGHTS), PART, 2) == weights(1000.0, 2)
    training = call("actor_train", offload=Offload.OPTIMIZER)
    assert offloaded(training, PART, 2) == optimizer_state(training, PART, 2)
    assert offloaded(call("actor_train"), PART, 2) == Cost()


@pytest.mark.parametrize(
    ("stage", "what", "says"),
    [
        ("critic_value", Offload.WEIGHTS, "critic_value: offload=weights is for roles that are not trained; use none"),
        ("actor_train", Offload.WEIGHTS, "actor_train: offload=weights is for roles that are not trained"),
        ("ref_logprob", Offload.OPTIMIZER, "ref_logprob: offload=optimizer is for stages that train; use none"),
    ],
)
def test_state_that_a_stage_does_not_have_cannot_be_offloaded(
    call: Callable[..., Call], stage: str, what: Offload, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        offloaded(call(stage, offload=what), PART, 2)
