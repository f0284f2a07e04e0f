"""An interleaved pipeline waits less, sends more and holds more than the plain one, and is it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.params import micro_batches_in_flight, stage_parts
from meshwright.cost_models.pipeline import BUBBLE, MESSAGES
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload, Recompute
from meshwright.profiles.workload import Workload

PLAIN = Layout(tp=2, pp=4, dp=2, sp=True)


@pytest.fixture
def model(a100s: Callable[[int], Cluster], fixed: Workload) -> AnalyticModel:
    return AnalyticModel(a100s(2), fixed, "bf16")


def amount(cost: Cost, *names: str) -> float:
    return sum(term.amount for term in cost.terms if term.name in names)


def others(cost: Cost, *names: str) -> list[object]:
    return [term for term in cost.terms if term.name not in names]


@pytest.mark.parametrize("vpp", [2, 4, 8])
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.OPTIMIZER])
def test_the_bubble_is_divided_and_messages_are_multiplied(
    model: AnalyticModel, call: Callable[..., Call], fixed: Workload, vpp: int, offload: Offload
) -> None:
    """The first micro-batch still passes p - 1 stages forward and backward, a message each."""
    asked = call("actor_train", str(PLAIN), offload=offload)
    plain = model.seconds(asked)
    cut = model.seconds(replace(asked, layout=replace(PLAIN, vpp=vpp)))
    assert others(cut, BUBBLE, MESSAGES) == others(plain, BUBBLE, MESSAGES)
    assert amount(cut, MESSAGES) == pytest.approx(vpp * amount(plain, MESSAGES))
    num_batches = fixed.batch_size // PLAIN.dp
    passed = (PLAIN.pp - 1) * amount(plain, MESSAGES) / num_batches
    assert amount(cut, BUBBLE) - passed == pytest.approx((amount(plain, BUBBLE) - passed) / vpp)
    assert cut.total == pytest.approx(sum(term.amount for term in cut.terms))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 4])
def test_the_first_stage_holds_a_share_more_than_p_micro_batches(pp: int, vpp: int) -> None:
    """1 + (p - 1)/(p v) of p (Korthikanti et al., arXiv:2205.05198, section 4.2.3), and never more than there are."""
    layout = Layout(pp=pp, vpp=vpp)
    assert micro_batches_in_flight(layout, pp, 100 * pp) == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))
    assert micro_batches_in_flight(layout, pp, pp) == pp
    assert micro_batches_in_flight(layout, 1, 100 * pp) == pytest.approx(((vpp - 1) * pp + 1) / vpp)
    counts = [micro_batches_in_flight(layout, behind, 100 * pp) for behind in range(1, pp + 1)]
    assert counts == sorted(counts)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])  # the first stage is the fullest
def test_more_activations_are_held_and_the_same_weights(
    model: AnalyticModel, call: Callable[..., Call], recompute: Recompute
) -> None:
    layouts = [str(replace(PLAIN, vpp=vpp)) for vpp in (1, 2, 4, 8)]
    plain, *cut = (model.memory(call("actor_train", layout, 1, recompute)) for layout in layouts)
    for number, memory in zip((2, 4, 8), cut, strict=True):
        assert memory.resident == plain.resident
        ratio = amount(memory.transient, "activations") / amount(plain.transient, "activations")
        assert ratio == pytest.approx(1 + 3 / (4 * number))
        assert others(memory.transient, "activations") == others(plain.transient, "activations")


def test_the_pieces_of_all_stages_are_the_model(llama: ModelSpec) -> None:
    for vpp in (1, 2, 4, 8):
        first, last = stage_parts(llama, 1, 2, 1, vpp)
        assert first.num_params + last.num_params == llama.num_params
        assert (first.num_layers, last.num_layers) == (16, 16)
