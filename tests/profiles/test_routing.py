"""The busiest of several ranks gets more than its share, and no more than there is."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Balance, Experts, Routing, routing
from meshwright.profiles.model_shape import ModelSpec

TOKENS, PICKED = 16384, 8


def drawn(law: Routing, num_experts: int, ep: int, rng: random.Random) -> float:
    """What the busiest rank gets over the mean, of one draw."""
    power, most = 1 - law.exponent, law.reach * TOKENS
    experts = [(1 + rng.random() * (most**power - 1)) ** (1 / power) for _ in range(num_experts)]
    held = num_experts // ep
    return max(sum(experts[i : i + held]) for i in range(0, num_experts, held)) * ep / sum(experts)


@pytest.mark.parametrize(("num_experts", "ep"), [(128, 2), (128, 8), (128, 16), (256, 4), (256, 16), (256, 32)])
def test_the_busiest_rank_gets_what_it_gets_in_draws(num_experts: int, ep: int) -> None:
    law, rng = routing(), random.Random(0)
    mean = sum(drawn(law, num_experts, ep, rng) for _ in range(400)) / 400
    assert law.imbalance(TOKENS, PICKED, num_experts, ep) == pytest.approx(mean, rel=0.15)


def test_one_rank_gets_all_there_is_and_no_rank_more_than_every_token_sends() -> None:
    assert routing().imbalance(TOKENS, PICKED, 128, 1) == 1
    for ep in (2, 4, 8, 64):
        for tokens in (0.5, 1, 3, 100, 1e6):
            share = routing().imbalance(tokens, 2, 64, ep)
            assert 1 <= share <= ep * min(1, 64 / ep / 2)


def test_more_ranks_are_less_even_and_more_experts_on_each_are_more_so() -> None:
    found = [routing().imbalance(TOKENS, PICKED, 128, ep) for ep in (1, 2, 4, 8, 16)]
    assert found == sorted(found)
    assert routing().imbalance(TOKENS, PICKED, 256, 8) < routing().imbalance(TOKENS, PICKED, 128, 8)


def selected_of(law: Routing, tokens: int, num_experts: int, picked: int) -> float:
    """The experts that some token selects, in the mean over the popularities of the law."""
    power, most = 1 - law.exponent, max(law.reach * tokens, 1.001)
    popularity = [(1 + (i + 0.5) / 2000 * (most**power - 1)) ** (1 / power) for i in range(2000)]
    copies = -math.log1p(-picked / num_experts) * tokens / (sum(popularity) / 2000)
    return num_experts * sum(1 - math.exp(-copies * x) for x in popularity) / 2000


@pytest.mark.parametrize(("num_experts", "picked"), [(384, 8), (128, 4), (8, 2)])
def test_the_popular_experts_are_selected_first(num_experts: int, picked: int) -> None:
    experts = Experts(num_experts=num_experts, experts_per_token=picked, ffn_size=64)
    tokens = [1, 2, 4, 16, 64, 256, 4096, 65536]
    found = [experts.num_selected(float(n)) for n in tokens]
    assert found == pytest.approx([selected_of(routing(), n, num_experts, picked) for n in tokens], rel=0.08)
    assert found == sorted(found)
    assert found[0] == pytest.approx(picked)
    assert experts.num_selected(np.array(tokens, dtype=np.float64)) == pytest.approx(found)
    forced = replace(experts, balance="forced")
    assert [forced.num_selected(float(n)) for n in tokens] == pytest.approx(
        [num_experts * (1 - (1 - picked / num_experts) ** n) for n in tokens]
    )


def test_all_experts_are_selected_where_every_token_selects_all() -> None:
    assert Experts(num_experts=4, experts_per_token=4, ffn_size=64).num_selected(3.0) == 4


@pytest.mark.parametrize("ep", [2, 8, 64])
def test_more_tokens_never_bring_the_busiest_rank_fewer_copies(ep: int) -> None:
    copies = [
        tokens * routing().imbalance(tokens, 2, 64, ep) for tokens in (0.5, 1, 1.2, 1.3, 2, 5, 17.5, 100, 1e4, 1e6)
    ]
    assert all(few < more for few, more in pairwise(copies))


def test_balance_leaves_the_busiest_rank_less_than_routers_by_themselves_and_chance_when_it_is_forced() -> None:
    balances: tuple[Balance | None, ...] = (None, "auxiliary_loss", "forced")
    free, balanced, forced = (routing().imbalance(TOKENS, PICKED, 64, 64, balance) for balance in balances)
    assert free > balanced > forced > 1
    assert 1.5 < balanced < 1.75  # what the source reports of 64 experts, one on each rank
    assert forced < 1.1


def test_the_balance_of_a_model_is_stated_where_it_has_experts() -> None:
    experts = Experts(num_experts=64, experts_per_token=8, ffn_size=64)
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    texts = {"name": "small", "architecture": "MixtralForCausalLM", "activation": "silu", "norm_epsilon": 1e-5}
    dense = ModelSpec(**sizes, **texts, vocab_size=64, max_positions=64, tied_embeddings=False)  # type: ignore[arg-type]
    mixture = replace(dense, experts=experts)
    stated = mixture.with_balance("forced").experts
    assert stated is not None
    assert stated.imbalance(TOKENS, 64) < experts.imbalance(TOKENS, 64)
    assert mixture.with_balance(None) == mixture
    with pytest.raises(BadInput, match="small has no experts, and balance=forced is about them"):
        dense.with_balance("forced")
