from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Memory, TermSums
from meshwright.cost_models.generation_cost import ENGINE_SLEEP, ENGINE_WAKE
from meshwright.cost_models.memory_cost import offloaded_state, optimizer_state, weight_copy
from meshwright.cost_models.params import StagePart, sharded
from meshwright.cost_models.protocol import StageQuery, bytes_of
from meshwright.profiles.algorithms import PPO_GRAPH, with_sampling_mask
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts, LatentAttention
from meshwright.profiles.frameworks import GRAPH, EngineName, engine_named
from meshwright.profiles.hardware import Cluster, local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.model_parts.layer_kinds import LayerKind
from meshwright.profiles.model_parts.linear_attention import LinearAttention
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS, num_blocks_for
from meshwright.profiles.schedule import Offload, Recompute, Schedule
from meshwright.profiles.workload import Workload


@pytest.fixture
def ask(
    a100s: Callable[[int], Cluster], long_tail: Workload, query: Callable[..., StageQuery]
) -> Callable[..., Memory]:
    def of(
        *question: object,
        precision: str = "bf16",
        workload: Workload = long_tail,
        engine: EngineName | None = None,
        **changes: object,
    ) -> Memory:
        costs = AnalyticModel(a100s(4), workload, precision, engine=engine_named(engine) if engine else None)
        return costs.memory(query(*question, **changes))

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
        schedule, dp = Schedule(generation_slots=100), Layout.parse(layout).dp
        cache = terms(ask("actor_generate", layout, slots=100))["kv cache"]
        assert cache == (long_tail.cache_need(schedule, dp).blocks + 1) * BLOCK_TOKENS * 524_288 / share


def test_an_engine_in_its_own_process_holds_a_second_copy_all_the_time_and_its_cache_while_it_generates(
    long_tail: Workload, llama: ModelSpec, query: Callable[..., StageQuery]
) -> None:
    cluster, vllm = local_cluster(4), engine_named("vllm")
    asked = query("actor_generate", "tp2,dp2", slots=8)
    ours, theirs = (AnalyticModel(cluster, long_tail, "fp32", engine=one).memory(asked) for one in (None, vllm))
    weights = terms(ours)["weights"]
    embedding = 4 * llama.padded_vocab_size * llama.hidden_size
    assert theirs.resident.amount("engine process") == vllm.process_bytes > 2**28
    assert theirs.resident.amount("weights of the engine") == weights == theirs.resident.amount("weights")
    assert theirs.resident.amount("weights in transit") == 2 * embedding
    assert theirs.transient == ours.transient
    assert theirs.resident.total == ours.resident.total + vllm.process_bytes + weights + 2 * embedding
    assert bytes_of(theirs).weights == weights  # of which one copy may be shared with another stage
    in_flight = query("actor_generate", "tp2,dp2", slots=8, batches_in_flight=2)
    ours, theirs = (AnalyticModel(cluster, long_tail, "fp32", engine=one).memory(in_flight) for one in (None, vllm))
    assert ours.resident.amount("kv cache") > theirs.resident.amount("kv cache") == 0.0


def test_an_engine_in_its_own_process_takes_and_frees_its_cache_at_its_rates(
    long_tail: Workload, query: Callable[..., StageQuery], a100s: Callable[..., Cluster]
) -> None:
    cluster, vllm = local_cluster(4), engine_named("vllm")
    asked, rates = query("actor_generate", "tp2,dp2", slots=8), vllm.sleep
    model = AnalyticModel(cluster, long_tail, "fp32", engine=vllm)
    cost, cache = model.seconds(asked), (long_tail.cache_need(asked.schedule, 2).blocks + 1) * BLOCK_TOKENS * 2**20 / 2
    assert rates is not None
    assert cost.amount(ENGINE_WAKE) == pytest.approx(cache / rates.taken_bytes_per_second)
    assert cost.amount(ENGINE_SLEEP) == pytest.approx(cache / rates.freed_bytes_per_second)
    assert not AnalyticModel(cluster, long_tail, "fp32").seconds(asked).amount(ENGINE_WAKE, ENGINE_SLEEP)
    assert not AnalyticModel(a100s(4), long_tail, "bf16", engine=vllm).seconds(asked).amount(ENGINE_WAKE, ENGINE_SLEEP)


def test_on_a_gpu_an_engine_is_that_of_another_trainer_and_has_the_only_copy(ask: Callable[..., Memory]) -> None:
    assert "engine process" not in terms(ask("actor_generate", "tp2", slots=8, engine="vllm"))


@pytest.mark.parametrize(("layout", "each"), [("tp1", 16), ("tp2,pp4", 4)])
def test_layers_with_a_sliding_window_keep_no_more_of_a_row_than_that_lies_in(
    ask: Callable[..., Memory], long_tail: Workload, llama: ModelSpec, layout: str, each: int
) -> None:
    """Every second layer of 32, with a window of 4 blocks, which lies in 5 of them; this project's engine keeps all."""
    model = replace(llama, window=SlidingWindow(num_tokens=4 * BLOCK_TOKENS, every=2))
    parsed = Layout.parse(layout)
    blocks = long_tail.cache_need(Schedule(generation_slots=100), parsed.dp).blocks
    assert blocks > 100 * 5
    cache = {
        engine: terms(ask("actor_generate", layout, slots=100, model=model, engine=engine))["kv cache"]
        for engine in ("vllm", GRAPH, None)
    }
    one_layer = BLOCK_TOKENS * 2 * llama.kv_size * 2 / parsed.tp
    assert cache["vllm"] == one_layer * each * ((blocks + 1) + (100 * 5 + 1))
    assert cache[GRAPH] == cache[None] == one_layer * each * 2 * (blocks + 1)


def test_this_projects_cache_of_latent_attention_holds_each_vector_as_key_and_as_value(
    ask: Callable[..., Memory], long_tail: Workload, llama: ModelSpec
) -> None:
    """A vector of 512 + 64 elements of 2 bytes in each of 32 layers, on every tensor-parallel rank."""
    latent = LatentAttention(query_rank=0, kv_rank=512, nope_dim=64, rope_dim=64, value_dim=64)
    model = replace(llama, latent=latent)
    blocks = long_tail.cache_need(Schedule(generation_slots=100, batches_in_flight=2), 1).blocks
    for layout in ("tp1", "tp2"):
        own, none, other = (
            terms(ask("actor_generate", layout, slots=100, model=model, engine=engine, batches_in_flight=2))["kv cache"]
            for engine in (GRAPH, None, "vllm")
        )
        assert other == (blocks + 1) * BLOCK_TOKENS * 32 * (512 + 64) * 2
        assert own == none == 2 * other


def test_layers_with_a_state_keep_one_for_each_row_and_two_more(
    ask: Callable[..., Memory], long_tail: Workload, llama: ModelSpec
) -> None:
    """Three layers of four have a state instead of keys and values."""
    delta = LinearAttention(
        rule="gated delta", num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_kernel=4
    )
    kinds = (*(LayerKind("linear"),) * 3, LayerKind("attention")) * 8
    model = replace(llama, linear=delta, layer_kinds=kinds)
    for layout, share in (("tp1", 1), ("tp4", 4)):
        cache = terms(ask("actor_generate", layout, slots=100, model=model))["kv cache"]
        blocks = long_tail.cache_need(Schedule(generation_slots=100), Layout.parse(layout).dp).blocks
        keys_and_values = 8 * (blocks + 1) * BLOCK_TOKENS * 2 * llama.kv_size * 2
        states = 24 * (100 + 2) * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2)
        assert cache == (keys_and_values + states) / share


def test_capped_scores_and_logits_are_counted_by_hand(
    ask: Callable[..., Memory], fixed: Workload, llama: ModelSpec
) -> None:
    """Two rows of 128 tokens with 8 heads of a rank: six copies of their scores in fp32, and logits with two gradients.

    With 64 rows a block of queries has 2^23 scores.
    """
    capped = replace(llama, attention_cap=50.0, logits_cap=30.0)
    plain, found = (terms(ask("actor_train", "tp4", 2, workload=fixed, model=model)) for model in (llama, capped))
    assert found.keys() - plain.keys() == {"capped scores"}
    assert found["capped scores"] == 256 * 8 * 128 * 4 * 6
    sinks = terms(ask("actor_train", "tp4", 2, workload=fixed, model=replace(llama, attention_sinks=True)))
    assert sinks["capped scores"] == found["capped scores"]
    many = terms(ask("actor_train", "tp1", 64, workload=fixed, model=capped))
    assert many["capped scores"] == 2**23 * 4 * 6
    assert found["logits"] - plain["logits"] == 256 * llama.padded_vocab_size // 4 * 2


def test_slots_beyond_the_rows_of_a_replica_hold_nothing(ask: Callable[..., Memory]) -> None:
    assert ask("actor_generate", "dp32", slots=16) == ask("actor_generate", "dp32", slots=999)


def test_activations_are_counted_by_hand(ask: Callable[..., Memory], fixed: Workload, llama: ModelSpec) -> None:
    """2 x 128 tokens, 32 layers, 2 bytes x (4h + 4h + 4 x 11,008) and 4 bytes x 32 heads."""
    per_token = 2 * (8 * 4096 + 4 * 11008) + 4 * 32
    assert terms(ask("actor_train", "tp1", 2, workload=fixed))["activations"] == 256 * 32 * per_token
    full = terms(ask("actor_train", "tp1", 2, "full", workload=fixed))
    assert full["activations"] == 256 * 32 * 2 * 4096
    assert full["working set"] == 256 * per_token


def test_what_torch_operators_keep_on_a_cpu_is_counted_by_hand(
    fixed: Workload, query: Callable[..., StageQuery]
) -> None:
    """64 x 128 tokens, 32 layers of h = 4,096 and f = 11,008 with 32 heads of 128, in fp32.

    The terms are what the profiler of torch counts; without them a plan lay below what its run took."""
    hidden, width, tokens = 4096, 11008, 64 * 128
    model = AnalyticModel(local_cluster(1), fixed, "fp32")
    trained = terms(model.memory(query("actor_train", "tp1", 64)))
    assert trained["activations"] == tokens * 32 * (4 * (8 * hidden + 4 * width) + 4 * 32)
    assert trained["unfused operators"] == tokens * 32 * 4 * (2 * hidden + 3 * hidden + width)
    assert trained["backward working set"] == tokens * 4 * (hidden + 2 * width)
    assert trained["logits"] == 4 * (2 * tokens * 32000 + 6 * 2**25)
    scored = terms(model.memory(query("ref_logprob", "tp1", 64)))
    assert scored["working set"] == tokens * 4 * (4 * hidden + 2 * 128 + 5 * width)


def test_what_torch_operators_keep_of_norms_windows_and_experts_is_counted_by_hand(
    fixed: Workload, query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    """Elements per token and layer, in widths of the 32 heads of 128 in all, besides those of plain layers: normalised
    queries and keys, norms after both blocks, queries that are grouped, and of 3 experts of 1,024 the output times its
    weights, the clamped gate and its sigmoid."""
    hidden, tokens = 4096, 64 * 128
    model = AnalyticModel(local_cluster(1), fixed, "fp32")

    def unfused(spec: ModelSpec) -> float:
        kept = terms(model.memory(replace(query("actor_train", "tp1", 64), model=spec)))["unfused operators"]
        return kept / (tokens * spec.num_layers * 4)

    plain, window = unfused(llama), SlidingWindow(num_tokens=64, every=4)
    assert unfused(replace(llama, qk_norm=True)) - plain == 2 * hidden
    assert unfused(replace(llama, whole_qk_norm=True)) - plain == 3 * hidden
    assert unfused(replace(llama, norms="both")) - plain == 2 * hidden
    assert unfused(replace(llama, window=window)) - plain == hidden / 4
    experts = Experts(num_experts=8, experts_per_token=3, ffn_size=1024)
    clamped = replace(experts, clamp=7.0)
    gate = 3 * 1024 - llama.ffn_size
    assert unfused(replace(llama, experts=experts)) - plain == pytest.approx(gate + 3 * 1024)
    assert unfused(replace(llama, experts=clamped)) - plain == pytest.approx(gate + 3 * 3 * 1024)


def test_an_update_on_a_cpu_needs_the_gathered_weights_or_its_activations(
    fixed: Workload, query: Callable[..., StageQuery], llama: ModelSpec
) -> None:
    """The gathered weights of a 7B take more than the activations of one short row, and less than those of many."""
    short = fixed.model_copy(update={"response": LengthSpec(max=1, fixed=1), "prompt": LengthSpec(max=1, fixed=1)})
    found = AnalyticModel(local_cluster(1), short, "fp32").memory(query("actor_train", "tp1", 1)).transient
    assert {term.name: term.amount for term in found.terms} == {"gathered weights": 4 * llama.num_params}
    long = AnalyticModel(local_cluster(1), fixed, "fp32").memory(query("actor_train", "tp1", 64)).transient
    assert "gathered weights" not in {term.name for term in long.terms}


@pytest.mark.parametrize("stage", [stage.name for stage in PPO_GRAPH.stages])
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


def test_the_second_stage_is_the_fullest_where_the_first_has_a_layer_less(
    ask: Callable[..., Memory], llama: ModelSpec, long_tail: Workload
) -> None:
    """30 layers on 8 stages are 3, 4, ..., 4, 3; the second stage holds seven micro-batches of four layers."""
    model = replace(llama, num_layers=30)
    memory, whole = ask("actor_train", "pp8", 1, model=model), ask("actor_train", "tp1", 1, model=model)
    layer = terms(whole)["activations"] / 30
    assert terms(memory)["activations"] == pytest.approx(7 * 4 * layer)
    assert terms(memory)["weights"] == 2 * 4 * llama.layer_params


def test_weights_are_a_term_of_their_own_and_stay(ask: Callable[..., Memory]) -> None:
    for stage in PPO_GRAPH.stages:
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


@pytest.mark.parametrize(
    ("stage", "cluster"),
    [
        *(
            (stage, "a100")
            for stage in ("actor_generate", "ref_logprob", "actor_train", "reward_score", "critic_train")
        ),
        *((stage, "local") for stage in ("actor_generate", "ref_logprob", "reward_score")),
    ],
)
def test_a_larger_sampling_mask_takes_more_memory_in_the_stages_that_read_it(
    stage: str,
    cluster: str,
    a100s: Callable[[int], Cluster],
    fixed: Workload,
    query: Callable[..., StageQuery],
) -> None:
    """On a CPU the sets of the whole batch count too. The model is so small that a refit needs less than a pass."""
    small = replace(
        query(stage, "tp1").model,
        num_layers=1,
        hidden_size=64,
        ffn_size=64,
        vocab_size=512,
        num_heads=2,
        num_kv_heads=2,
    )
    graph, found = with_sampling_mask(PPO_GRAPH), []
    for kept_tokens in (0, 32, 64, 512):
        workload = fixed.model_copy(update={"kept_tokens": kept_tokens})
        machine = a100s(4) if cluster == "a100" else local_cluster(8)
        slots = {"slots": 16} if stage == "actor_generate" else {}
        asked = replace(query(stage, "tp2,dp4", model=small, **slots), stage=graph.by_name[stage])
        memory = AnalyticModel(machine, workload, "bf16").memory(asked)
        found.append(terms(memory).get("sampling mask", 0.0))
    reads = stage not in ("reward_score", "critic_train")
    assert (found == sorted(set(found))) == reads
    assert reads or found == [0.0] * 4


@pytest.mark.parametrize("setting", [{"batches_in_flight": 3}, {"overcommit": 64}], ids=str)
def test_sequences_that_run_on_keep_their_cache_between_turns(
    ask: Callable[..., Memory], setting: dict[str, int]
) -> None:
    alone, running_on = (ask("actor_generate", "tp2,dp4", slots=64, **settings) for settings in ({}, setting))
    assert {term.name for term in alone.resident.terms} == {"weights"}
    assert {term.name for term in running_on.resident.terms} == {"weights", "kv cache"}
    assert running_on.peak_bytes >= alone.peak_bytes


def test_more_prompts_in_flight_fill_more_slots(ask: Callable[..., Memory]) -> None:
    """16 rows a replica: three batches are 48 sequences, and 64 more over 32 replicas are two more for each."""
    two, three, more = (
        ask("actor_generate", "dp32", slots=999, **settings).resident.total
        for settings in ({"batches_in_flight": 2}, {"batches_in_flight": 3}, {"overcommit": 64})
    )
    assert more < two < three
    assert more == ask("actor_generate", "dp32", slots=18, overcommit=64).resident.total


@pytest.mark.parametrize(
    ("stage", "what", "names"),
    [
        ("ref_logprob", Offload.WEIGHTS, {"weights"}),
        ("reward_score", Offload.WEIGHTS, {"weights"}),
        ("actor_train", Offload.OPTIMIZER, {"gradients", "main weights", "moments"}),
        ("critic_train", Offload.OPTIMIZER, {"gradients", "main weights", "moments"}),
    ],
)
@pytest.mark.parametrize("layout", ["dp8", "tp2,dp4"])
def test_offloaded_state_waits_on_the_host_and_is_on_the_device_only_while_the_stage_runs(
    ask: Callable[..., Memory], layout: str, stage: str, what: Offload, names: set[str]
) -> None:
    kept, away = ask(stage, layout), ask(stage, layout, offload=what)
    assert kept.host_bytes == 0
    assert {term.name for term in away.host.terms} == names
    assert names.isdisjoint(term.name for term in away.resident.terms)
    assert {term.name: term.amount for term in away.transient.terms if term.name in names} == {
        term.name: term.amount for term in away.host.terms
    }
    assert away.host_bytes == kept.resident_bytes - away.resident_bytes
    assert away.peak_bytes == kept.peak_bytes


def test_host_memory_of_a_trained_7b_is_counted_by_hand(ask: Callable[..., Memory], llama: ModelSpec) -> None:
    """bf16: 4 bytes of gradients, 4 + 8 of optimizer state over dp."""
    assert ask("actor_train", "dp8", offload=Offload.OPTIMIZER).host.total == (4 + 12 / 8) * llama.num_params


def test_the_host_has_room_for_the_largest_part_of_a_pipeline(ask: Callable[..., Memory], llama: ModelSpec) -> None:
    """Half the layers with the embedding, or with the head and the last norm."""
    half = 16 * llama.layer_params + llama.embedding_params + llama.hidden_size
    assert ask("ref_logprob", "pp2", offload=Offload.WEIGHTS).host.total == 2 * half


def test_a_stage_that_streams_keeps_keys_and_values_and_works_on_a_chunk(
    ask: Callable[..., Memory], long_tail: Workload
) -> None:
    whole, chunked = (terms(ask("ref_logprob", "tp2,dp4", 4, chunk_tokens=chunk)) for chunk in (0, 1024))
    blocks = 128 * num_blocks_for(long_tail.max_tokens) + 1
    assert chunked["kv cache"] == blocks * BLOCK_TOKENS * 524_288 / 2
    assert chunked["working set"] == whole["working set"] * 1024 / long_tail.max_tokens
    assert "kv cache" not in whole
    assert "kv cache" not in {term.name for term in ask("ref_logprob", chunk_tokens=64).resident.terms}


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])  # the first stage is the fullest
def test_an_interleaved_pipeline_holds_more_activations_and_the_same_weights(
    ask: Callable[..., Memory], fixed: Workload, recompute: Recompute
) -> None:
    layouts = ("tp2,pp4,dp2,sp", *(f"tp2,pp4,dp2,vpp{vpp},sp" for vpp in (2, 4, 8)))
    plain, *cut = (ask("actor_train", layout, 1, recompute, workload=fixed) for layout in layouts)
    for number, memory in zip((2, 4, 8), cut, strict=True):
        assert memory.resident == plain.resident
        ratio = terms(memory)["activations"] / terms(plain)["activations"]
        assert ratio == pytest.approx(1 + 3 / (4 * number))
        others = [{name: b for name, b in terms(m).items() if name != "activations"} for m in (memory, plain)]
        assert others[0] == others[1]


PART = StagePart(
    num_layers=4.0,
    num_params=1000.0,
    num_stages_to_end=1.0,
    expert_params=0.0,
    adapter_params=0.0,
    adapter_expert_params=0.0,
    num_window_layers=0.0,
    num_full_layers=4.0,
    num_linear_layers=0.0,
)


def amounts(sums: TermSums[float]) -> dict[str, float]:
    return {name: amount for name, amount, _ in sums.addends}


def state_of(query: StageQuery, size: int, part: StagePart[float] = PART) -> dict[str, float]:
    return amounts(optimizer_state(query.stage, query.layout, part, size))


def offloaded(query: StageQuery, offload: Offload) -> dict[str, float]:
    return amounts(offloaded_state(query.stage, sharded(query.model, query.layout), offload, PART, 2))


def test_a_copy_takes_its_elements_and_only_training_keeps_more(query: Callable[..., StageQuery]) -> None:
    assert amounts(weight_copy(1000.0, 2)) == {"weights": 2000.0}
    assert state_of(query("ref_logprob"), 2) == {}
    assert state_of(query("actor_train"), 2) == {
        "gradients": 4000.0,
        "main weights": 4000.0,
        "moments": 8000.0,
    }


def test_a_weight_in_fp32_is_its_own_main_weight(query: Callable[..., StageQuery]) -> None:
    assert state_of(query("actor_train"), 4) == {"gradients": 4000.0, "moments": 8000.0}


@pytest.mark.parametrize("layout", ["dp4", "cp4", "dp2,cp2"])
def test_ranks_with_the_same_weights_share_the_state_and_not_the_gradients(
    query: Callable[..., StageQuery], layout: str
) -> None:
    found = state_of(query("actor_train", layout), 2)
    assert found == {"gradients": 4000.0, "main weights": 1000.0, "moments": 2000.0}


def test_the_state_of_experts_is_shared_by_those_that_hold_them(query: Callable[..., StageQuery]) -> None:
    """600 of the parameters are in experts, spread over 4 of 8 replicas: all replicas hold 1000 + 3 x 600 together."""
    part = replace(PART, expert_params=600.0)
    found = state_of(query("actor_train", "dp8,ep4"), 2, part)
    assert found == {"gradients": 4000.0, "main weights": 4 * 2800 / 8, "moments": 8 * 2800 / 8}


def test_what_waits_on_the_host_is_a_frozen_copy_or_all_that_an_optimizer_keeps(
    query: Callable[..., StageQuery],
) -> None:
    assert offloaded(query("ref_logprob"), Offload.WEIGHTS) == amounts(weight_copy(1000.0, 2))
    training = query("actor_train")
    assert offloaded(training, Offload.OPTIMIZER) == state_of(training, 2)
    assert offloaded(training, Offload.NONE) == {}


@pytest.mark.parametrize(
    ("stage", "what", "says"),
    [
        ("critic_value", Offload.WEIGHTS, "critic_value: offload=weights is for roles that are not trained; use none"),
        ("actor_train", Offload.WEIGHTS, "actor_train: offload=weights is for roles that are not trained"),
        ("ref_logprob", Offload.OPTIMIZER, "ref_logprob: offload=optimizer is for stages that train; use none"),
    ],
)
def test_state_that_a_stage_does_not_have_cannot_be_offloaded(
    query: Callable[..., StageQuery], stage: str, what: Offload, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        offloaded(query(stage), what)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp8", "tp2,pp3", "pp5"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_generator_in_8_bit_floats_never_takes_more(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload, layout: str, precision: str
) -> None:
    asked = query("actor_generate", layout, slots=16)
    whole, quantised = (
        AnalyticModel(a100s(4), long_tail, precision).memory(
            replace(asked, stage=replace(asked.stage, is_quantised=is_so))
        )
        for is_so in (False, True)
    )
    assert quantised.resident_bytes < whole.resident_bytes
    assert quantised.peak_bytes < whole.peak_bytes


def test_of_a_7b_in_8_bit_floats_all_but_embedding_head_and_norms_takes_a_byte(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], long_tail: Workload, llama: ModelSpec
) -> None:
    asked = query("actor_generate", "tp1", slots=16)
    memory = AnalyticModel(a100s(1), long_tail, "bf16").memory(
        replace(asked, stage=replace(asked.stage, is_quantised=True))
    )
    linears = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    outputs = 32 * (3 * 4096 + 4096 + 2 * 11008 + 4096)
    found = terms(memory)
    assert found["weights"] == linears + 2 * (llama.num_params - linears)
    assert found["weight scales"] == 4 * outputs
