from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Source
from meshwright.cost_models.pipeline import BUBBLE, MESSAGES
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload
from meshwright.profiles.workload import Workload
from tests.seeds import cases

FORWARD_STAGES = ("reward_score", "ref_logprob", "critic_value", "actor_logprob")
TRAIN_STAGES = ("actor_train", "critic_train")


def amount(cost: Cost, name: str) -> float:
    return sum(term.amount for term in cost.terms if term.name == name)


def steady(batch_size: int) -> Workload:
    return Workload(
        batch_size=batch_size, prompt=LengthSpec(max=512, fixed=512), response=LengthSpec(max=512, fixed=512)
    )


@pytest.mark.parametrize("stage", [*FORWARD_STAGES, *TRAIN_STAGES])
@cases("layout", ["tp2,pp2,dp2", "tp4,dp2,sp", "tp1", "pp8", "tp8,pp2,dp2,sp"], few=2)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_terms_are_positive_and_sum_to_the_total(
    *,
    a100s: Callable[[int], Cluster],
    query: Callable[..., StageQuery],
    long_tail: Workload,
    stage: str,
    layout: str,
    recompute: str,
) -> None:
    cost = AnalyticModel(a100s(4), long_tail, "bf16").seconds(query(stage, layout, 4, recompute))
    assert cost.total == pytest.approx(sum(term.amount for term in cost.terms))
    assert all(term.amount > 0 for term in cost.terms)
    assert len({term.name for term in cost.terms}) == len(cost.terms)
    assert cost.source is Source.ANALYTIC


@pytest.mark.parametrize("stage", ["ref_logprob", "actor_train"])
def test_the_bubble_is_p_minus_one_stage_times_and_vanishes_with_many_micro_batches(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], stage: str
) -> None:
    shares = []
    for batch_size in (4, 64, 4096):
        cost = AnalyticModel(a100s(1), steady(batch_size), "bf16").seconds(query(stage, "pp4"))
        busy = amount(cost, "layers") + amount(cost, "pipeline messages")
        assert amount(cost, "pipeline bubble") / busy == pytest.approx(3 / batch_size)
        shares.append(amount(cost, "pipeline bubble") / cost.total)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.001


@pytest.mark.parametrize("stage", ["ref_logprob", "actor_train"])
def test_stages_of_a_layer_less_at_both_ends_wait_for_the_slowest(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec, stage: str
) -> None:
    """30 layers on 4 stages: the inner ones have 8. The sum of all stages' times passes once, the slowest m times."""
    model, num_batches = replace(llama, num_layers=30), 16
    cost = AnalyticModel(a100s(1), steady(num_batches), "bf16").seconds(query(stage, "pp4", model=model))
    whole = AnalyticModel(a100s(1), steady(num_batches), "bf16").seconds(query(stage, "tp1", model=model))
    layer, ends = amount(whole, "layers") / 30 / num_batches, amount(whole, "embedding and head") / num_batches
    slowest = max(8 * layer, 7 * layer + ends)
    sends = amount(cost, "pipeline messages") / num_batches
    assert amount(cost, "layers") + amount(cost, "embedding and head") == pytest.approx(num_batches * slowest)
    assert amount(cost, "pipeline bubble") == pytest.approx(30 * layer + ends - slowest + 3 * sends)


def test_the_last_stage_is_the_slowest_where_its_head_outweighs_a_layer(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    for vocab_size, layers in ((128000, 7), (640, 8)):
        model = replace(llama, num_layers=30, vocab_size=vocab_size)
        cost = AnalyticModel(a100s(1), steady(64), "bf16").seconds(query("ref_logprob", "pp4", 4, model=model))
        whole = AnalyticModel(a100s(1), steady(64), "bf16").seconds(query("ref_logprob", "tp1", 4, model=model))
        assert amount(cost, "layers") == pytest.approx(layers / 30 * amount(whole, "layers"))


def test_generation_waits_for_the_fullest_stage(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    found = []
    for num_layers in (30, 32):
        question = query("actor_generate", "pp4", slots=4, model=replace(llama, num_layers=num_layers))
        found.append(AnalyticModel(a100s(1), steady(16), "bf16").seconds(question))
    uneven, even = found
    assert amount(uneven, "decode layers") == pytest.approx(amount(even, "decode layers"))
    assert uneven.total <= even.total


def test_one_stage_has_no_bubble_and_no_messages(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload
) -> None:
    cost = AnalyticModel(a100s(1), long_tail, "bf16").seconds(query("actor_train", "dp8"))
    assert {term.name for term in cost.terms} == {
        "layers",
        "embedding and head",
        "gradient reduction",
        "optimizer",
        "parameter gather",
    }


def test_recomputation_costs_a_forward_pass_of_the_layers(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]
) -> None:
    model = AnalyticModel(a100s(1), steady(64), "bf16")
    forward = amount(model.seconds(query("actor_logprob", "tp1", 4)), "layers")
    again = {
        r: amount(model.seconds(query("actor_train", "tp1", 4, r)), "recomputation")
        for r in ("none", "selective", "full")
    }
    assert again["none"] == 0
    assert 0 < again["selective"] < again["full"] == pytest.approx(forward)


def test_every_epoch_and_minibatch_updates(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    once = steady(64)
    often = once.model_copy(update={"num_epochs": 3, "num_minibatches": 4})
    question = query("actor_train", "dp8", 2)
    one = AnalyticModel(a100s(1), once, "bf16").seconds(question)
    many = AnalyticModel(a100s(1), often, "bf16").seconds(question)
    assert amount(many, "optimizer") == pytest.approx(12 * amount(one, "optimizer"))
    assert amount(many, "layers") == pytest.approx(3 * amount(one, "layers"))


def test_tensor_parallel_training_exchanges_twice_what_a_forward_pass_does(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery]
) -> None:
    model = AnalyticModel(a100s(1), steady(64), "bf16")
    name = "tensor-parallel collectives"
    forward = amount(model.seconds(query("critic_value", "tp8", 4)), name)
    train = amount(model.seconds(query("critic_train", "tp8", 4)), name)
    full = amount(model.seconds(query("critic_train", "tp8", 4, "full")), name)
    assert train / forward == pytest.approx(2, rel=0.05)
    assert full / forward == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("stage", ["ref_logprob", "actor_train"])
def test_more_replicas_are_faster(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload, stage: str
) -> None:
    model = AnalyticModel(a100s(4), long_tail, "bf16")
    times = [model.seconds(query(stage, str(Layout(dp=dp)), 2)).total for dp in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times, reverse=True)


def test_published_a100_iterations_are_met_within_a_factor_of_two(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    """GPT-3 175B, 64 A100, TP8 PP8, 64 sequences of 2,048: 18.13 s with full and 13.75 s with selective recomputation
    and sequence parallelism (Korthikanti et al., arXiv:2205.05198, tables 3 and 5)."""
    gpt = llama.__class__(
        **{
            **llama.__dict__,
            "num_layers": 96,
            "hidden_size": 12288,
            "num_heads": 96,
            "num_kv_heads": 96,
            "ffn_size": 32768,
            "vocab_size": 51200,
        }
    )
    workload = Workload(
        batch_size=64, prompt=LengthSpec(max=1024, fixed=1024), response=LengthSpec(max=1024, fixed=1024)
    )
    model = AnalyticModel(a100s(8), workload, "bf16")
    full = model.seconds(query("actor_train", "tp8,pp8", 1, "full", model=gpt)).total
    selective = model.seconds(query("actor_train", "tp8,pp8,sp", 1, "selective", model=gpt)).total
    assert 18.13 / 2 < full < 18.13 * 2
    assert 13.75 / 2 < selective < 13.75 * 2
    assert selective < full


@pytest.mark.parametrize("vpp", [2, 4, 8])
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.OPTIMIZER])
def test_the_bubble_is_divided_and_messages_are_multiplied(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload, vpp: int, offload: Offload
) -> None:
    """The first micro-batch still passes p - 1 stages forward and backward, a message each."""
    layout, model = Layout(tp=2, pp=4, dp=2, sp=True), AnalyticModel(a100s(2), fixed, "bf16")
    asked = query("actor_train", str(layout), offload=offload)
    plain = model.seconds(asked)
    cut = model.seconds(replace(asked, layout=replace(layout, vpp=vpp)))
    others = [[term for term in cost.terms if term.name not in (BUBBLE, MESSAGES)] for cost in (cut, plain)]
    assert others[0] == others[1]
    assert amount(cut, MESSAGES) == pytest.approx(vpp * amount(plain, MESSAGES))
    num_batches = fixed.batch_size // layout.dp
    passed = (layout.pp - 1) * amount(plain, MESSAGES) / num_batches
    assert amount(cut, BUBBLE) - passed == pytest.approx((amount(plain, BUBBLE) - passed) / vpp)
    assert cut.total == pytest.approx(sum(term.amount for term in cut.terms))
