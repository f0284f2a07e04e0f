"""What the ranks of a pipeline hold adds up to the model, and to what is in flight through it."""

from dataclasses import replace

import pytest

from meshwright.cost_models.params import LayerCounts, fullest_part, micro_batches_in_flight, stage_parts
from meshwright.profiles.experts import Experts
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec


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


def test_the_pieces_of_all_stages_are_the_model(llama: ModelSpec) -> None:
    for vpp in (1, 2, 4, 8):
        first, last = stage_parts(llama, 1, 2, 1, vpp)
        assert first.num_params + last.num_params == llama.num_params
        assert (first.num_layers, last.num_layers) == (16, 16)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_tied_embedding_is_held_by_the_first_stage_and_again_by_the_last(llama: ModelSpec, pp: int) -> None:
    tied = replace(llama, tied_embeddings=True)
    first, last = (stage_parts(tied, 1, pp)[end] for end in (0, -1))
    assert first.num_params == last.num_params - tied.hidden_size
    assert stage_parts(tied, 1, 1)[0].num_params == tied.num_params


def test_where_layers_do_not_divide_the_inner_stages_may_be_the_fullest(llama: ModelSpec) -> None:
    """30 layers on 4 stages are 7, 8, 8, 7; of the inner ones the first has most micro-batches in flight."""
    uneven = replace(llama, num_layers=30, vocab_size=64)
    assert [(part.num_layers, part.num_stages_to_end) for part in stage_parts(uneven, 1, 4)] == [(7, 4), (8, 3), (7, 1)]
    assert [part.num_layers for part in stage_parts(llama, 1, 4)] == [8, 8]
    assert fullest_part(uneven, 1, 4).num_layers == 8
    assert fullest_part(llama, 1, 4) == stage_parts(llama, 1, 4)[1]


def test_replicas_that_share_experts_hold_each_of_them_once(llama: ModelSpec) -> None:
    mixture = replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=llama.ffn_size // 4))
    whole = stage_parts(mixture, 2, 1)[0]
    for ep in (2, 4, 8):
        part = stage_parts(mixture, 2, 1, ep)[0]
        assert part.expert_params == whole.expert_params / ep
        assert part.distinct_params(ep) == whole.num_params


def test_the_last_stage_is_slowest_unless_its_ends_take_less_than_the_layers_that_it_lacks(llama: ModelSpec) -> None:
    counts = LayerCounts.of(replace(llama, num_layers=30), 4)
    assert counts == LayerCounts(8, 7)
    assert counts.slowest(1.0, 0.9) == (8, False)
    assert counts.slowest(1.0, 1.1) == (7, True)
    assert LayerCounts.of(llama, 4).slowest(1.0, 0.0) == (8, True)
