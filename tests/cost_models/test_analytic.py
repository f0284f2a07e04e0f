"""The planner asks millions of times, often the same: a question asked again is not computed again."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.workload import Workload


@pytest.mark.parametrize("stage", ["actor_generate", "actor_train", "ref_logprob"])
def test_a_question_asked_again_gets_the_same_answer_object(
    a100s: Callable[[int], Cluster], call: Callable[..., Call], long_tail: Workload, stage: str
) -> None:
    model = AnalyticModel(a100s(1), long_tail, "bf16")
    question = call(stage, "tp2,pp2,dp2", 4, slots=16)
    again = call(stage, "tp2,pp2,dp2", 4, slots=16)
    assert model.seconds(question) is model.seconds(again)
    assert model.memory(question) is model.memory(again)
