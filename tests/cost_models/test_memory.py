from collections.abc import Callable
from itertools import pairwise

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Memory
from meshwright.cost_models.question import Call
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.stages import STAGES
from meshwright.profiles.workload import Workload


@pytest.fixture
def ask(a100s: Callable[[int], Cluster], long_tail: Workload, call: Callable[..., Call]) -> Callable[..., Memory]:
    def of(*question: object, precision: str = "bf16", workload: Workload = long_tail, **changes: object) -> Memory:
        return AnalyticModel(a100s(4), workload, precision).memory(call(*question, **changes))

    return of


def terms(memory: Memory) -> dict[str, float]:
    return {term.name: term.amount for term in (*memory.resident.terms, *memory.transient.terms)}


def test_a_trained_7b_takes_16_bytes_per_parameter_in_bf16_and_fp32(
    ask: Callable[..., Memory], llama: ModelSpec
) -> None:
    """bf16: 2 + 4 + 4 + 8. fp32: 4 + 4 + 8, the weight being its own main weight."""
    assert ask("actor_train").resident.total == 18 * llama.num_params
    assert ask("actor_train", precision="fp32").resident.total == 16 * llama.num_params
    assert ask("ref_logprob").resident.total == 2 * llama.num_params


def test_the_distributed_optimizer_divides_its_state_over_replicas(
    ask: Callable[..., Memory], llama: ModelSpec
) -> None:
    found = terms(ask("actor_train", "dp8"))
    assert found["main weights"] + found["moments"] == 12 * llama.num_params / 8
    assert found["weights"] + found["gradients"] == 6 * llama.num_params


def test_the_kv_cache_of_llama_2_7b_is_half_a_mebibyte_per_token(
    ask: Callable[..., Memory], long_tail: Workload
) -> None:
    """2 x 32 layers x 4,096 x 2 bytes = 524,288 bytes a token."""
    for layout, share in (("tp1", 1), ("tp8", 8), ("tp2,pp4", 8)):
        cache = terms(ask("actor_generate", layout, slots=10))["kv cache"]
        assert cache == 10 * long_tail.max_tokens * 524_288 / share


def test_slots_beyond_the_rows_of_a_replica_hold_nothing(ask: Callable[..., Memory]) -> None:
    assert ask("actor_generate", "dp32", slots=16) == ask("actor_generate", "dp32", slots=999)


def test_activations_are_counted_by_hand(ask: Callable[..., Memory], fixed: Workload, llama: ModelSpec) -> None:
    """2 x 128 tokens, 32 layers, 2 bytes x (4h + 4h + 4 x 11,008) and 4 bytes x 32 heads."""
    per_token = 2 * (8 * 4096 + 4 * 11008) + 4 * 32
    assert terms(ask("actor_train", "tp1", 2, workload=fixed))["activations"] == 256 * 32 * per_token
    full = terms(ask("actor_train", "tp1", 2, "full", workload=fixed))
    assert full["activations"] == 256 * 32 * 2 * 4096
    assert full["working set"] == 256 * per_token


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES])
def test_more_ways_to_cut_never_take_more(ask: Callable[..., Memory], stage: str) -> None:
    slots = 64 if stage == "actor_generate" else 0
    for axis in ("tp", "pp"):
        peaks = [ask(stage, f"{axis}{degree}", 4, slots=slots).peak_bytes for degree in (1, 2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", ["tp1", "pp4", "tp4,dp2,sp"])
def test_a_larger_micro_batch_never_takes_less(ask: Callable[..., Memory], recompute: str, layout: str) -> None:
    peaks = [ask("actor_train", layout, mbs, recompute).peak_bytes for mbs in (1, 2, 4, 8)]
    assert all(small < large for small, large in pairwise(peaks))


def test_recomputation_and_sequence_parallelism_save_memory(ask: Callable[..., Memory]) -> None:
    none, selective, full = (ask("actor_train", "tp4", 4, r).peak_bytes for r in ("none", "selective", "full"))
    assert full < selective < none
    assert ask("actor_train", "tp4,sp", 4).peak_bytes < none


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(
    ask: Callable[..., Memory], fixed: Workload
) -> None:
    """Four in flight over a quarter of the layers are as much as one over all of them; with 2 micro-batches, half."""
    whole = terms(ask("critic_train", "pp1", 1, workload=fixed))["activations"]
    assert terms(ask("critic_train", "pp4", 1, workload=fixed))["activations"] == whole
    assert terms(ask("critic_train", "pp4,dp32", 1, workload=fixed))["activations"] == whole / 2


def test_weights_are_a_term_of_their_own_and_stay(ask: Callable[..., Memory]) -> None:
    for stage in STAGES:
        memory = ask(stage.name, "tp2", slots=8)
        assert "weights" in {term.name for term in memory.resident.terms}
        assert {term.name for term in memory.transient.terms}.isdisjoint({"weights", "gradients", "moments"})


def test_a_copy_of_a_trained_role_has_room_to_be_refit(ask: Callable[..., Memory], fixed: Workload) -> None:
    assert "refit buffer" in terms(ask("critic_value", workload=fixed))
    assert "refit buffer" not in terms(ask("reward_score", workload=fixed))
    assert "refit buffer" not in terms(ask("critic_train", workload=fixed))


def test_a_scalar_head_has_no_logits(ask: Callable[..., Memory], llama: ModelSpec, long_tail: Workload) -> None:
    reward = llama.__class__(**{**llama.__dict__, "scalar_head": True})
    assert "logits" not in terms(ask("reward_score", model=reward))
    assert "logits" in terms(ask("ref_logprob"))
