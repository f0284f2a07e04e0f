from collections.abc import Callable

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import Body
from meshwright.profiles.workload import Workload


def test_a_long_tail_takes_longer_than_its_mean(a100s: Callable[[int], Cluster], call: Callable[..., Call]) -> None:
    tail = Workload(
        batch_size=64, prompt=LengthSpec(max=100, fixed=100), response=LengthSpec(max=2000, median=100, p99=1500)
    )
    mean = round(tail.response_lengths.mean)
    flat = tail.model_copy(update={"response": LengthSpec(max=2000, fixed=mean)})
    question = call("actor_generate", "tp1", slots=64)
    spread = AnalyticModel(a100s(1), tail, "bf16").seconds(question).total
    assert spread > 1.5 * AnalyticModel(a100s(1), flat, "bf16").seconds(question).total


def test_one_wave_on_one_rank_is_its_closed_form(
    a100s: Callable[[int], Cluster], call: Callable[..., Call], llama: ModelSpec, fixed: Workload
) -> None:
    """A prefill of 64 x 100 tokens, then 27 decodes of 64 rows; cost is linear in context between 100 and 127."""
    cost = AnalyticModel(a100s(1), fixed, "bf16").seconds(call("actor_generate", "tp1", slots=64))
    shard = AnalyticShard(llama, a100s(1).device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)

    def one(body: Body, tokens: int, context: int) -> float:
        time = shard.time(body, 64, tokens, context)
        return 32 * time.layer + time.ends

    expected = one(Body.PREFILL, 100, 0) + sum(one(Body.DECODE, 1, 100 + i) for i in range(27))
    assert cost.total == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("layout", ["tp1", "tp2,dp4", "pp2,dp4", "tp4,pp2"])
def test_terms_are_positive_and_sum_to_the_total(
    a100s: Callable[[int], Cluster], call: Callable[..., Call], long_tail: Workload, layout: str
) -> None:
    cost = AnalyticModel(a100s(1), long_tail, "bf16").seconds(call("actor_generate", layout, slots=32))
    assert cost.total == pytest.approx(sum(term.amount for term in cost.terms))
    assert all(term.amount > 0 for term in cost.terms)


def test_a_pipeline_pays_for_groups_that_ran_dry(a100s: Callable[[int], Cluster], call: Callable[..., Call]) -> None:
    """One row keeps one group of four alive: each token still passes all four stages."""
    one_row = Workload(batch_size=1, prompt=LengthSpec(max=8, fixed=8), response=LengthSpec(max=100, fixed=100))
    model = AnalyticModel(a100s(1), one_row, "bf16")
    alone = model.seconds(call("actor_generate", "pp1", slots=1))
    piped = model.seconds(call("actor_generate", "pp4", slots=1))
    layers = [sum(t.amount for t in cost.terms if t.name == "decode layers") for cost in (alone, piped)]
    assert layers[1] == pytest.approx(layers[0])
    assert piped.total > alone.total


def test_generating_without_slots_is_refused(
    a100s: Callable[[int], Cluster], call: Callable[..., Call], fixed: Workload
) -> None:
    with pytest.raises(BadInput, match="generation_slots=0 generates nothing; use 1 or more"):
        AnalyticModel(a100s(1), fixed, "bf16").seconds(call("actor_generate"))
