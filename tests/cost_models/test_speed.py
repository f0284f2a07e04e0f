"""The planner asks millions of times."""

import time
from collections.abc import Callable

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.workload import Workload


def test_a_warm_question_is_answered_in_microseconds(
    a100s: Callable[[int], Cluster], call: Callable[..., Call], long_tail: Workload
) -> None:
    model = AnalyticModel(a100s(1), long_tail, "bf16")
    questions = [call(stage, "tp2,pp2,dp2", 4, slots=16) for stage in ("actor_generate", "actor_train", "ref_logprob")]

    def sweep() -> float:
        start = time.thread_time()
        for question in questions:
            model.seconds(question)
            model.memory(question)
        return (time.thread_time() - start) / (2 * len(questions))

    sweep()
    assert min(sweep() for _ in range(20)) < 50e-6
