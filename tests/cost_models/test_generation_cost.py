from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.generation_cost import generation_work
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rounds import Prefill, Rounds, RoundWindow, batch_rounds
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import EAGER, engine_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.table import TimedPass
from meshwright.profiles.workload import Workload


def test_a_long_tail_takes_longer_than_its_mean(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]
) -> None:
    tail = Workload(
        batch_size=64, prompt=LengthSpec(max=100, fixed=100), response=LengthSpec(max=2000, median=100, p99=1500)
    )
    mean = round(tail.response_lengths.mean)
    flat = tail.model_copy(update={"response": LengthSpec(max=2000, fixed=mean)})
    question = query("actor_generate", "tp1", slots=64)
    spread = AnalyticModel(a100s(1), tail, "bf16").seconds(question).total
    assert spread > 1.5 * AnalyticModel(a100s(1), flat, "bf16").seconds(question).total


def test_one_wave_on_one_rank_is_its_closed_form(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec, fixed: Workload
) -> None:
    """A prefill of 64 x 100 tokens, then 27 decodes of 64 rows; cost is linear in context between 100 and 127."""
    cost = AnalyticModel(a100s(1), fixed, "bf16").seconds(query("actor_generate", "tp1", slots=64))
    framework = engine_named(EAGER).framework_on("cuda")
    efficiency = efficiency_of("cuda", "a100-80gb")
    shard = AnalyticShard(llama, a100s(1).device, "bf16", efficiency, 1.0, framework=framework)

    def one(timed_pass: TimedPass, tokens: int, context: int) -> float:
        time = shard.time(timed_pass, 64, tokens, context)
        return 32 * time.layer + time.ends

    expected = one(TimedPass.PREFILL, 100, 0) + sum(one(TimedPass.DECODE, 1, 100 + i) for i in range(27))
    assert cost.total == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("layout", ["tp1", "tp2,dp4", "pp2,dp4", "tp4,pp2"])
def test_terms_are_positive_and_sum_to_the_total(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload, layout: str
) -> None:
    cost = AnalyticModel(a100s(1), long_tail, "bf16").seconds(query("actor_generate", layout, slots=32))
    assert cost.total == pytest.approx(sum(term.amount for term in cost.terms))
    assert all(term.amount > 0 for term in cost.terms)


def test_a_pipeline_pays_for_groups_that_ran_dry(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]
) -> None:
    """One row keeps one group of four alive: each token still passes all four stages."""
    one_row = Workload(batch_size=1, prompt=LengthSpec(max=8, fixed=8), response=LengthSpec(max=100, fixed=100))
    model = AnalyticModel(a100s(1), one_row, "bf16")
    alone = model.seconds(query("actor_generate", "pp1", slots=1))
    piped = model.seconds(query("actor_generate", "pp4", slots=1))
    layers = [sum(t.amount for t in cost.terms if t.name == "decode layers") for cost in (alone, piped)]
    assert layers[1] == pytest.approx(layers[0])
    assert piped.total > alone.total


def test_generating_without_slots_is_refused(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    with pytest.raises(BadInput, match="generation_slots=0 generates nothing; use 1 or more"):
        AnalyticModel(a100s(1), fixed, "bf16").seconds(query("actor_generate"))


def test_groups_take_turns_and_a_pipeline_waits_for_those_that_are_dry() -> None:
    """10 rounds of 8 sequences are 4 passes of 2 in a pipeline of 4 stages, and so are those of 2 sequences of 1."""
    nothing = Prefill(0, 0, 0)
    for live, rows in ((8, 2), (2, 1)):
        rounds = Rounds(10, (RoundWindow(10, live, 100),), nothing, nothing)
        ((_, load),) = generation_work(rounds, 8, 4).loads
        assert load.passes == [(40, rows, 1, 100)]
        assert (load.number, load.mean_rows, load.mean_tokens) == (40, rows, rows)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_every_token_is_decoded_or_prefilled_in_some_pass(long_tail: Workload, slots: int, pp: int) -> None:
    rounds = batch_rounds(long_tail, 16, slots)
    work = generation_work(rounds, slots, pp)
    decoding = dict(work.loads)[TimedPass.DECODE]
    decoded = sum(number * rows for number, rows, _, _ in decoding.passes)
    assert decoded >= sum(window.rounds * window.live for window in rounds.windows) - 1e-6
    assert work.num_sampled == rounds.num_sampled
    assert work.host_iterations == rounds.num_busy * min(pp, slots)


def test_norms_over_all_heads_add_up_their_squares_over_the_shards(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec, fixed: Workload
) -> None:
    def reductions(model: ModelSpec, layout: str) -> float:
        cost = AnalyticModel(a100s(1), fixed, "bf16").seconds(query("actor_generate", layout, model=model, slots=64))
        return sum(term.amount for term in cost.terms if term.name == "tensor-parallel collectives")

    whole = replace(llama, whole_qk_norm=True)
    assert 1.1 < reductions(whole, "tp2") / reductions(llama, "tp2") < 1.5
    assert reductions(whole, "tp1") == 0
