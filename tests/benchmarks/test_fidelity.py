"""The scoring of published rows, on rows made up here."""

import gzip
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.inference import precision_of, time_per_token
from benchmarks.fidelity.intervals import UNSHIFTED, Doubt, Shift
from benchmarks.fidelity.pretraining import iteration_memory
from benchmarks.fidelity.recipes import recipe_of
from benchmarks.fidelity.rows import Row, Skip
from benchmarks.fidelity.score import Answer, Bar, Score, rank_correlation, regrets
from benchmarks.fidelity.sets import scores_of, set_names, unread
from benchmarks.fidelity.shapes import model_named
from benchmarks.fidelity.training import iteration, peak_memory, question
from meshwright.profiles.aiconfigurator import PACKAGE, package_version
from meshwright.profiles.errors import BadInput
from meshwright.profiles.uncertainty import uncertainty

GEMM_ROWS = "m,n,k,latency_ms\n4096,4096,4096,0.2\n1,4096,4096,0.012\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "primitives").mkdir()
    (tmp_path / "primitives" / "h200_gemm_bf16.csv").write_text(GEMM_ROWS, encoding="utf-8")
    return tmp_path


def answer(predicted: float, measured: float, setting: str = "", *, rate: bool = False) -> Answer:
    return Answer(label="", measured=measured, predicted=predicted, setting=setting, rate=rate)


def score(*answers: Answer) -> Score:
    return Score(name="made up", bar=Bar(), answers=answers, skipped=Counter())


def test_only_sets_with_rows_are_scored(folder: Path) -> None:
    found = {score.name: score for score in scores_of([folder])}
    assert set(found) == {"GEMM H200, m >= 64", "GEMM H200, m < 64"} <= set(set_names())
    assert all(score.used == 1 and score.mean < 0.5 for score in found.values())


def test_a_compressed_file_is_read_alike(folder: Path) -> None:
    plain = scores_of([folder])
    (folder / "primitives" / "h200_gemm_bf16.csv").unlink()
    (folder / "primitives" / "h200_gemm_bf16.csv.gz").write_bytes(gzip.compress(GEMM_ROWS.encode()))
    assert [s.mean for s in scores_of([folder])] == [s.mean for s in plain]


def test_an_unknown_file_is_told_with_a_suggestion_and_the_others_are_scored(folder: Path) -> None:
    known = [score.name for score in scores_of([folder])]
    assert unread([folder]) == ()
    path = folder / "primitives" / "h200_gem_bf16.csv"
    path.write_text(GEMM_ROWS, encoding="utf-8")
    assert [score.name for score in scores_of([folder])] == known
    assert unread([folder]) == (
        f"rows file {path} is not known and not read; did you mean 'primitives/h200_gemm_bf16'?",
    )


def test_a_missing_or_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        scores_of([tmp_path / "nowhere"])
    with pytest.raises(BadInput, match="holds no rows"):
        scores_of([tmp_path])


def test_rows_that_ask_something_else_are_counted_by_reason(tmp_path: Path) -> None:
    header = "dataset,model,hidden,layers,heads,seq_len,vocab,gpu,num_gpus,TP,PP,VPP,CP,DP,EP,FSDP,mbs,gbs,precision"
    header += ",recompute,tokens_per_s_per_gpu,TFLOPs_per_gpu,iter_time_s\n"
    rows = "vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2,bf16,full,,,0.1\n"
    rows += "vtrain_multi,GPT,1024,4,16,1024,,V100-32GB,2,1,1,,,2,,,1,2,bf16,full,,,0.1\n"
    rows += "vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2,INT8,full,,,0.1\n"
    (tmp_path / "megatron_training.csv").write_text(header + rows, encoding="utf-8")
    multi = next(s for s in scores_of([tmp_path]) if s.name == "vTrain multi-node")
    assert multi.used == 1
    assert dict(multi.skipped) == {
        "device V100-32GB not known": 1,
        "precision INT8 not known": 1,
    }
    assert multi.answers[0].terms.total == pytest.approx(multi.answers[0].predicted)


def test_errors_are_relative_and_signed() -> None:
    found = score(answer(1.1, 1.0), answer(0.8, 1.0))
    assert found.mean == pytest.approx(0.15)
    assert found.bias == pytest.approx(-0.05)
    assert math.isnan(found.spearman)
    assert found.worst(1)[0].predicted == 0.8


def test_small_collectives_are_judged_in_seconds_and_apart_from_large_ones(folder: Path) -> None:
    rows = "op_name,num_gpus,bytes,latency_ms\nalltoall,8,1024,0.01\nall_reduce,8,134217728,0.5\n"
    (folder / "primitives" / "h200_comm.csv").write_text(rows, encoding="utf-8")
    small, large = (s for s in sorted(scores_of([folder]), key=lambda s: s.name) if s.name.startswith("collectives"))
    assert (small.used, large.used) == (1, 1)
    assert small.bar.seconds == pytest.approx(2e-6)
    assert small.seconds == pytest.approx(abs(small.answers[0].predicted - 1e-5))
    assert large.bar.seconds is None


def test_ranks_that_agree_correlate_and_ties_share_their_rank() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 400]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)


def test_regret_is_what_the_predicted_best_loses() -> None:
    seconds = [answer(1.0, 2.2, "a"), answer(1.5, 2.0, "a"), answer(9.0, 9.0, "alone"), answer(1.0, 5.0)]
    assert regrets(seconds) == {"a": pytest.approx(0.1)}
    rates = [answer(10, 90, "b", rate=True), answer(8, 100, "b", rate=True)]
    assert regrets(rates) == {"b": pytest.approx(0.1)}


def test_requests_that_wait_have_a_time_per_token_and_no_rate(tmp_path: Path) -> None:
    """70B in fp8 leaves an H200 about 70 GB for keys and values, which are 1.5 GB for each of these requests."""
    header = "backend,backend_version,model_path,system,precision,isl,osl,batch_size,tp_size,pp_size,moe_tp_size"
    header += ",moe_ep_size,silicon_tpot_ms\n"
    row = "trtllm,1.0,meta-llama/Llama-3.1-70B,h200_sxm,fp8,1024,8192,{},{},1,1,1,30\n"
    rows = row.format(16, 1) + row.format(128, 1) + row.format(128, 8)
    (tmp_path / "serving_points.csv").write_text(header + rows, encoding="utf-8")
    laws = [score for score in scores_of([tmp_path]) if "imported" not in score.name]
    assert {score.name: score.used for score in laws} == {"serving, time per token": 3, "serving, rate per GPU": 2}
    assert dict(laws[1].skipped) == {"more requests than the cache holds, so that some wait": 1}


def test_serving_points_are_also_asked_of_the_operators_of_their_engine_where_those_are_installed(
    tmp_path: Path,
) -> None:
    header = "backend,backend_version,model_path,system,precision,isl,osl,batch_size,tp_size,pp_size,moe_tp_size"
    header += ",moe_ep_size,silicon_tpot_ms\n"
    row = "{},1.0,meta-llama/Llama-3.1-70B,h200_sxm,fp8,1024,1024,16,4,1,1,1,10\n"
    rows = row.format("trtllm") + row.format("sglang")
    (tmp_path / "serving_points.csv").write_text(header + rows, encoding="utf-8")
    laws, imported = (score for score in scores_of([tmp_path]) if score.name.startswith("serving, time"))
    assert laws.used == 2
    if package_version() is None:
        assert dict(imported.skipped) == {f"{PACKAGE} is not installed": 2}
        return
    assert dict(imported.skipped) == {f"{PACKAGE} has no operators of sglang on h200": 1}
    by_law, by_operators = laws.answers[0].predicted, imported.answers[0].predicted
    assert by_operators != by_law
    assert by_operators == pytest.approx(by_law, rel=0.3)


def test_a_layer_alone_is_asked_as_what_a_second_layer_adds(tmp_path: Path) -> None:
    header = "dataset,model,hidden,layers,heads,seq_len,vocab,gpu,num_gpus,TP,PP,VPP,CP,DP,EP,FSDP,mbs,gbs,precision"
    header += ",recompute,tokens_per_s_per_gpu,TFLOPs_per_gpu,iter_time_s\n"
    row = "korthikanti_2022_layer,one layer,6144,1,64,2048,,A100-80GB,8,8,1,,,1,,,4,,fp16 mixed,{},,,0.02\n"
    rows = row.format("baseline no recompute") + row.format("selective recompute")
    (tmp_path / "megatron_training.csv").write_text(header + rows, encoding="utf-8")
    found = next(s for s in scores_of([tmp_path]) if s.name == "Korthikanti, Narayanan")
    plain, selective = found.answers
    assert plain.predicted < selective.predicted < 1.3 * plain.predicted
    assert "embedding and head" not in {term.name for term in plain.terms.terms}


def test_rows_of_experts_are_read_from_the_package_that_carries_them_when_asked(tmp_path: Path) -> None:
    (tmp_path / "inference.csv").write_text("engine\n", encoding="utf-8")
    name = "experts A100, power law, >= 512 tokens"
    assert scores_of([tmp_path], [name]) == []
    found = scores_of([tmp_path], [name], installed=True)
    if package_version() is None:
        assert found == []
        return
    assert found[0].used > 500
    assert found[0].mean < 0.1


TRAINING_COLUMNS = (
    "dataset,model,hidden,layers,heads,seq_len,vocab,gpu,num_gpus,TP,PP,VPP,CP,DP,EP,FSDP,mbs,gbs,precision"
    ",recompute,tokens_per_s_per_gpu,TFLOPs_per_gpu,iter_time_s\n"
)


def multi_node(folder: Path, *rows: str) -> Score:
    (folder / "megatron_training.csv").write_text(TRAINING_COLUMNS + "\n".join(rows), encoding="utf-8")
    return next(s for s in scores_of([folder]) if s.name == "vTrain multi-node")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("vtrain_multi,GPT,1024,4,16,1024,,A100,3,3,1,,,1,,,1,2,bf16,full,,,0.1", "tp=3 does not divide num_heads"),
        ("vtrain_multi,GPT,1024,4,0,1024,,A100,2,1,1,,,2,,,1,2,bf16,full,,,0.1", "heads of 0"),
        ("vtrain_multi,GPT,1024,4,16,1024,,A100,2,0,1,,,2,,,1,2,bf16,full,,,0.1", "TP of 0"),
        ("vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2,bf16,full,,,nan", "iter_time_s of nan"),
        ("vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2,bf16,full,,,-0.1", "iter_time_s of -0.1"),
        ("vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2", "precision not published"),
    ],
)
def test_a_row_that_cannot_be_answered_is_skipped_with_the_reason(tmp_path: Path, row: str, reason: str) -> None:
    honest = "vtrain_multi,GPT,1024,4,16,1024,,A100,2,1,1,,,2,,,1,2,bf16,full,,,0.1"
    found = multi_node(tmp_path, honest, row)
    assert found.used == 1
    assert sum(found.skipped.values()) == 1
    assert reason in next(iter(found.skipped))


def test_a_file_without_a_column_of_its_format_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "megatron_training.csv").write_text("dataset,layers\nvtrain_multi,4\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"megatron_training.csv has no column \w+; give a file in the format"):
        scores_of([tmp_path])


def test_the_products_of_any_models_layers_are_read(tmp_path: Path) -> None:
    (tmp_path / "primitives").mkdir()
    columns = "attn_pre_proj_ms,attn_post_proj_ms,mlp_up_proj_ms,mlp_down_proj_ms,n_head,n_kv_head,n_embd"
    columns += ",n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers\n"
    rows = "1.9,0.6,3.4,1.6,32,32,4096,11008,True,4096,1\n0.07,0.03,0.13,0.08,32,32,4096,11008,True,8,1\n"
    (tmp_path / "primitives" / "a100_Some-7B_mlp.csv").write_text(columns + rows, encoding="utf-8")
    found = {score.name: score for score in scores_of([tmp_path])}
    assert set(found) == {"products of a layer A100, >= 64 tokens", "products of a layer A100, < 64 tokens"}
    assert all(score.used == 1 and score.mean < 0.25 for score in found.values())


@pytest.mark.parametrize(
    ("spellings", "num_billions"),
    [
        (
            ("Llama-3.1 8B", "llama3_8b", "LLAMA3.1_8B", "meta-llama/Llama-3.1-8B", "nvidia/Llama-3.1-8B-Instruct-FP8"),
            8.0,
        ),
        (("Llama-2 13B", "LLaMA 13B", "Llama2-13B"), 13.0),
        (("Qwen3-30B3A", "Qwen3_30B_a3B", "Qwen/Qwen3-30B-A3B-Instruct-2507"), 30.5),
        (("DeepSeek V3", "DeepSeekV3 (tokendrop)", "deepseek-ai/DeepSeek-R1"), 671.0),
        (("Nemotron-4 15B",), 15.6),
        (("MPT-7b",), 6.65),
    ],
)
def test_spellings_of_one_model_are_one_shape(spellings: tuple[str, ...], num_billions: float) -> None:
    sizes = {model_named(name).num_params for name in spellings}
    assert len(sizes) == 1
    assert sizes.pop() / 1e9 == pytest.approx(num_billions, rel=0.01)


@pytest.mark.parametrize(
    ("stated", "precision"),
    [
        ({"precision": "fp8", "model_path": "Qwen/Qwen3-32B"}, "fp8"),
        ({"precision": "", "gemm_quant_mode": "nvfp4", "model_path": "Qwen/Qwen3-32B"}, "fp4"),
        ({"precision": "", "model_path": "Qwen/Qwen3-32B"}, "bf16"),
        ({"precision": "", "model_path": "Qwen/Qwen3-32B-FP8"}, "fp8"),
        ({"precision": "", "model_path": "deepseek-ai/DeepSeek-V3"}, "fp8"),
    ],
)
def test_an_empty_precision_is_that_of_the_published_checkpoint(stated: Row, precision: str) -> None:
    assert precision_of(stated) == precision


CI_NOTES = "attention-backend=unfused; kind={}; peak allocated 2.00 GiB"


def ci_row(kind: str = "gpt", **changes: str) -> Row:
    values = "mcore_ci,test,512,12,8,1024,,DGX-H100,8,1,2,,,4,1,0,4,32,BF16,none,,,0.2"
    row = dict(zip(*(line.split(",") for line in (TRAINING_COLUMNS.strip(), values)), strict=True))
    return {**row, "notes": CI_NOTES.format(kind), **changes}


def test_a_functional_test_is_asked_as_it_is_set() -> None:
    """What is not stated is off; launches of the host decide, and those of experts are more."""
    plain = iteration("", ci_row())
    flash = iteration("", ci_row(notes="kind=gpt"))
    mixture = iteration("", ci_row("moe", notes="kind=moe; num-experts=8; moe-router-topk=2; moe-grouped-gemm=True"))
    assert flash.predicted == pytest.approx(plain.predicted, rel=0.1)
    assert mixture.predicted > 1.3 * plain.predicted
    assert peak_memory("", ci_row()).measured == 2 * 2**30
    assert iteration("", ci_row(num_gpus="")).predicted == plain.predicted
    with pytest.raises(Skip, match="kind bert is no decoder"):
        iteration("", ci_row("bert"))


def test_the_peak_memory_of_a_functional_test_is_that_of_the_rank_that_writes_the_log() -> None:
    """The last pipeline stage has the logits, and the first one more micro-batches in flight."""
    long = ci_row(vocab="1024", PP="4", DP="2", gbs="64")
    asked, cluster, _ = question(long)
    assert peak_memory("", long).predicted < iteration_memory(asked, cluster, "bf16").peak_bytes
    wide = ci_row(PP="4", DP="2", gbs="64")
    assert peak_memory("", wide).predicted > peak_memory("", long).predicted


def test_recipes_are_asked_in_their_number_format_and_with_their_balance() -> None:
    recipe = {"dataset": "megatron_bridge", "hidden": "", "layers": "", "heads": "", "notes": "", "FSDP": "0"}
    llama = {**recipe, "model": "LLAMA3_8B", "seq_len": "8192", "PP": "1", "DP": "8", "mbs": "1", "gbs": "64"}
    sixteen, eight = (iteration("", ci_row(**llama, precision=name)).predicted for name in ("BF16", "FP8"))
    assert 0.5 < eight / sixteen < 0.9
    mixture = {**llama, "model": "Qwen3_30B_a3B", "EP": "8", "precision": "BF16"}
    forced = iteration("", ci_row(**mixture)).predicted
    kept_even = iteration("", ci_row(**{**mixture, "notes": "auxiliary loss"})).predicted
    assert forced < kept_even


BRIDGE = {
    "dataset": "megatron_bridge",
    "hidden": "",
    "layers": "",
    "heads": "",
    "notes": "",
    "FSDP": "0",
    "seq_len": "4096",
    "precision": "FP8",
}


def of_release(release: str) -> dict[str, str]:
    return {"source": f"Megatron-Bridge docs/performance-archive.md {release} NeMo Container"}


def test_a_recipe_has_the_graphs_of_its_model_gpu_and_release() -> None:
    """Without graphs the host decides; whole iterations are recorded from a later release on."""
    small = {**BRIDGE, "model": "Qwen3_30B_a3B", "PP": "1", "DP": "8", "EP": "8", "mbs": "1", "gbs": "64"}
    early, late = (
        iteration("", ci_row(**small, gpu="DGX-B200", **of_release(release))).predicted
        for release in ("26.02", "26.06")
    )
    assert late < early / 2
    recorded = recipe_of(
        ci_row(**small, gpu="DGX-GB300", **of_release("26.04.01")), "megatron-bridge", is_eight_bit=True
    )
    assert recorded is not None
    assert recorded.merged
    assert recipe_of(ci_row(**small, source=""), "megatron-core", is_eight_bit=True) is None


def test_a_chunk_has_as_many_layers_as_the_fullest_and_a_prediction_further_is_one_more() -> None:
    """61 layers and one more of DeepSeek V3 are 64 places of 2 x 8 chunks with embedding and head."""
    shape = {"num_gpus": "256", "PP": "2", "VPP": "8", "TP": "1", "DP": "128", "EP": "32", "mbs": "1", "gbs": "4096"}
    row = {**BRIDGE, **shape, "gpu": "DGX-GB300", "precision": "MXFP8", **of_release("26.04")}
    further, alone = (iteration("", ci_row(**row, model=name)) for name in ("DeepSeekV3", "DeepSeekV3 (w/o MTP)"))
    assert "embedding and head" not in {term.name for term in further.terms.terms}
    assert further.predicted == pytest.approx(alone.predicted, rel=1e-2)
    assert "61x7168" in alone.label
    assert "62x7168" in further.label


def test_recipes_say_what_is_computed_again_and_where_experts_are() -> None:
    plain = {**BRIDGE, "precision": "BF16", "source": "", "num_gpus": "64", "TP": "1", "PP": "1", "DP": "64"}
    row = {**plain, "FSDP": "64", "mbs": "2", "gbs": "512"}
    oss = iteration("", ci_row(**{**row, "dataset": "automodel_fsdp2"}, model="GPT-OSS 120B", EP=""))
    assert "ep64" in oss.label
    saved = iteration("", ci_row(**{**row, "dataset": "dgxc_maxtext_fsdp"}, model="Llama 3 70B")).terms
    again = iteration("", ci_row(**{**row, "dataset": "automodel_fsdp2"}, model="Llama 3 70B")).terms
    assert 0.5 < saved.amount("recomputation") / again.amount("recomputation") < 0.8


def test_adapters_of_fewer_linears_take_less_time() -> None:
    llama = {"hidden": "", "layers": "", "heads": "", "notes": "", "model": "LLAMA3_8B", "PP": "1", "DP": "8"}
    narrow, wide = (iteration("", ci_row(**llama, dataset=f"{name}_lora")) for name in ("dgxc_nemo", "automodel"))
    assert narrow.predicted < wide.predicted


def test_embedding_and_head_may_take_the_places_of_layers() -> None:
    """126 layers of Llama-3 405B divide into 8 x 8 chunks with both."""
    recipe = {"dataset": "dgxc_nemo", "hidden": "", "layers": "", "heads": "", "notes": "", "model": "Llama 3.1 405B"}
    shape = {"num_gpus": "512", "TP": "8", "PP": "8", "VPP": "8", "DP": "8", "gbs": "64", "mbs": "1", "seq_len": "8192"}
    found = iteration("", ci_row(**recipe, **shape))
    assert "embedding and head" not in {term.name for term in found.terms.terms}
    assert found.predicted > 0


def test_the_micro_batch_that_is_not_published_is_the_quickest_that_fits() -> None:
    stated = [iteration("", ci_row(mbs=str(size), gbs="32")).predicted for size in (1, 2, 4, 8)]
    assert iteration("", ci_row(mbs="", gbs="32")).predicted == pytest.approx(min(stated))


def test_coverage_is_the_share_of_rows_in_the_range_of_their_prediction() -> None:
    """An input that moves a prediction in proportion, and laws that are right within 3 %."""
    doubt = Doubt(device="h100-sxm")
    launches = replace(answer(10.0, 11.0), ask=lambda shift: 10.0 * shift.factor, doubt=doubt)
    laws = replace(answer(10.0, 11.0), ask=lambda _: 10.0, doubt=doubt)
    wide, narrow = launches.interval, laws.interval
    assert wide is not None
    assert narrow is not None
    assert wide.p10 < narrow.p10 < 10 < narrow.p90 < wide.p90
    assert score(launches, laws, answer(1.0, 1.0)).coverage == 0.5
    assert math.isnan(score(answer(1.0, 1.0)).coverage)


def test_what_is_known_of_a_row_decides_how_wide_its_range_is() -> None:
    def spread(**known: Any) -> float:
        found = replace(
            answer(10.0, 10.0), ask=lambda shift: 10.0 * shift.factor, doubt=Doubt(device="h100-sxm", **known)
        )
        assert found.interval is not None
        return found.interval.p90

    plain, experts = spread(), spread(has_experts=True)
    assert plain < spread(has_experts=True, only_generates=True) < experts
    assert plain < spread(is_of_other_release=True) < spread(is_of_other_trainer=True)
    assert spread(launch_deviation=0.1) < plain


def test_every_input_that_is_uncertain_moves_an_iteration_or_a_round() -> None:
    tokens = {"backend": "trtllm", "backend_version": "1.0", "isl": "1024", "osl": "1024", "batch_size": "64"}
    where = {"model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "precision": "fp8", "tp_size": "4", "pp_size": "1"}
    one_round = time_per_token("", {**tokens, **where, "silicon_tpot_ms": "20"})
    recipe = {"dataset": "dgxc_nemo", "hidden": "", "layers": "", "heads": "", "notes": "", "model": "Llama 3.1 70B"}
    shape = {"num_gpus": "64", "TP": "4", "PP": "4", "VPP": "", "DP": "4", "gbs": "16", "mbs": "1", "seq_len": "8192"}
    asks = [iteration("", ci_row()).ask, iteration("", ci_row(**recipe, **shape)).ask, one_round.ask]
    names = {*uncertainty().rates, "host of an engine"} - {"bandwidth to the host"}
    moved = {name for name in names for ask in asks if ask and ask(Shift(name, 1.5)) != ask(UNSHIFTED)}
    assert moved == names
