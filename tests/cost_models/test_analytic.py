"""The planner asks millions of times, often the same: a question asked again is not computed again."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.workload import Workload


@pytest.mark.parametrize("stage", ["actor_generate", "actor_train", "ref_logprob"])
def test_a_question_asked_again_gets_the_same_answer_object(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload, stage: str
) -> None:
    model = AnalyticModel(a100s(1), long_tail, "bf16")
    question = query(stage, "tp2,pp2,dp2", 4, slots=16)
    again = query(stage, "tp2,pp2,dp2", 4, slots=16)
    assert model.seconds(question) is model.seconds(again)
    assert model.memory(question) is model.memory(again)


@pytest.mark.parametrize("stage", ["actor_generate", "actor_train", "ref_logprob"])
@pytest.mark.parametrize("layout", ["dp3", "tp2,dp3", "pp2,dp3"])
def test_replicas_whose_rows_are_uneven_take_what_as_many_full_ones_do(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload, stage: str, layout: str
) -> None:
    """64 rows over three replicas are 22, 21 and 21: the time and the memory are those of 66."""
    uneven, full = (fixed.model_copy(update={"batch_size": size}) for size in (64, 66))
    question = query(stage, layout, 8, slots=16)
    one, other = (AnalyticModel(a100s(3), workload, "bf16") for workload in (uneven, full))
    assert one.seconds(question) == other.seconds(question)
    assert one.memory(question) == other.memory(question)
