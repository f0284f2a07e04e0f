"""Steps of RLHF systems and pairs of them, on rows made up here."""

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.grpo import by_stage, grpo_stage, step_seconds, unread_step
from benchmarks.fidelity.lengths import cut_lognormal
from benchmarks.fidelity.pairs import Scaled, pairs, speedup
from benchmarks.fidelity.realhf import experiment_of
from benchmarks.fidelity.rows import Row, Skip
from benchmarks.fidelity.sets import scores_of
from benchmarks.fidelity.shapes import has_experts
from meshwright.profiles.frameworks import framework_named

REAL = {
    "system": "ReaL-Heuristic",
    "gpu": "H100-80GB",
    "num_gpus": "16",
    "batch_prompts": "64",
    "prompt_len_tok": "128",
    "response_len_tok": "128",
    **{f"model_{role}": "Llama-2-7B" for role in ("actor", "critic", "ref", "reward")},
    "step_time_s": "20",
}
NEMO = {
    "system": "NeMo-RL v9",
    "model_actor": "LLAMA3.1_8B",
    "gpu": "H100",
    "num_gpus": "16",
    "batch_prompts": "",
    "response_len_tok": "1000 (mean total seq)",
    "parallel_config": "gen [TP,PP]=[1,1] train [TP,CP,EP,PP,VPP]=[1,1,1,2,n/a]",
    "precision": "BF16",
    "mode": "sync",
    "step_time_s": "100",
    "source": "page",
    "notes": "G-GBS (samples generated) 1024, T-GBS 512, max seq 4096",
}
VERL = {
    **NEMO,
    "system": "veRL",
    "parallel_config": "vLLM+FSDP2; colocate",
    "gen_s": "100",
    "infer_logprob_s": "20",
    "train_s": "80",
    "step_time_s": "200",
}


def verl_pair(**changes: str) -> Row:
    row = {**VERL, "mode": "fully async, staleness 0.5", "parallel_config": "vLLM+FSDP2; 8:8", "infer_logprob_s": ""}
    ((_, pair),) = pairs([("", VERL), ("", {**row, **changes})])
    return pair


def test_the_hand_rule_of_real_has_stages_across_nodes() -> None:
    step = experiment_of(REAL).best(framework_named("realhf"))
    assert step.layout.num_ranks == 16
    assert step.layout.pp % 2 == 0


def test_every_function_call_of_a_step_pays_the_controller() -> None:
    framework, experiment = framework_named("realhf"), experiment_of(REAL)
    free = experiment.best(framework.model_copy(update={"call_seconds": 0.0}))
    assert experiment.best(framework).cost.total == pytest.approx(free.cost.total + 6 * framework.call_seconds)


def test_models_that_fit_nowhere_are_skipped() -> None:
    huge = {f"model_{role}": "Llama-3-405B" for role in ("actor", "critic", "ref", "reward")}
    with pytest.raises(Skip, match="no single layout fits"):
        experiment_of({**REAL, **huge}).best(framework_named("realhf"))


def test_an_asynchronous_step_hides_the_shorter_of_generation_and_training() -> None:
    alone, beside = step_seconds(NEMO), step_seconds({**NEMO, "mode": "1-step Off"})
    assert beside.total < alone.total
    assert {term.name for term in alone.terms} - {term.name for term in beside.terms} == {"generation"}


def test_a_mode_or_a_layout_that_is_not_known_is_skipped() -> None:
    with pytest.raises(Skip, match="mode later is not known"):
        step_seconds({**NEMO, "mode": "later"})
    with pytest.raises(Skip, match="heads, layers or sequences are dealt otherwise"):
        step_seconds({**NEMO, "parallel_config": "gen [TP,PP]=[64,1] train [TP,CP,EP,PP,VPP]=[1,1,1,2,n/a]"})


def test_sequences_may_be_cut_and_experts_spread_in_training() -> None:
    cut = step_seconds({**NEMO, "parallel_config": "gen [TP,PP]=[1,1] train [TP,CP,EP,PP,VPP]=[1,2,1,2,n/a]"})
    assert {term.name for term in cut.terms} == {term.name for term in step_seconds(NEMO).terms}
    mixed = {**NEMO, "model_actor": "Qwen3-30B3A", "notes": NEMO["notes"].replace("4096", "8192")}
    spread = "gen [TP,PP]=[2,1] train [TP,CP,EP,PP,VPP]=[1,1,{},1,n/a]"
    few, many = (step_seconds({**mixed, "parallel_config": spread.format(ep)}) for ep in (2, 8))
    assert few.total != many.total
    assert has_experts("Qwen3-30B3A")
    assert not has_experts("LLAMA3.1_8B")


STAGED = {
    **NEMO,
    "parallel_config": "Megatron TP2; gen TP2",
    "gen_s": "50",
    "infer_logprob_s": "10",
    "train_s": "40",
}


def stage_seconds(**changes: str) -> dict[str, float]:
    """The predicted seconds of the stages of a step, by column."""
    rows = by_stage([("", {**STAGED, **changes})])
    return {str(row["stage"]): grpo_stage("", row).predicted for _, row in rows}


def test_the_reference_takes_the_place_of_the_actor_through_unpinned_memory_behind_pcie() -> None:
    """Three copies of the 8 billion weights of 16 bits that two ranks share."""
    job = {"notes": f"{NEMO['notes']}, previous log-probs skipped"}
    shard = 2 * 8.03e9 / 2
    swap = 3 * shard / assumed().nemo_rl.unpinned_bytes_per_second
    on_pcie, on_c2c = (stage_seconds(gpu=gpu, **job)["infer_logprob_s"] for gpu in ("H100", "GB200"))
    sharded = stage_seconds(parallel_config="DTensor (FSDP2) TP2; gen TP2", **job)["infer_logprob_s"]
    assert on_pcie - swap == pytest.approx(sharded, rel=0.6)
    assert on_pcie > swap > 4 * on_c2c


def test_a_pipeline_pads_each_packed_micro_batch() -> None:
    """Training alone has no swap: a second pipeline stage adds its bubble, and the padding of sequences that no other
    one fits beside."""
    longer = {"response_len_tok": "2400 (mean generated)", "num_gpus": "16"}
    one, two = (stage_seconds(parallel_config=f"Megatron TP2 PP{pp}; gen TP2", **longer)["train_s"] for pp in (1, 2))
    assert two > 1.02 * one


def test_the_longest_of_many_responses_is_longer_than_that_of_few() -> None:
    lengths = cut_lognormal(400, 4000, 6.0).resolve()
    few, many = (lengths.expected_maximum(number) for number in (64, 2048))
    median, sigma = 297.0, math.log(6.0) / NormalDist().inv_cdf(0.99)
    drawn = np.minimum(4000, np.random.default_rng(0).lognormal(math.log(median), sigma, (200, 2048)))
    assert lengths.mean == pytest.approx(400, rel=1e-3)
    assert many == pytest.approx(drawn.max(axis=1).mean(), rel=0.03)
    assert few == pytest.approx(drawn[:, :64].max(axis=1).mean(), rel=0.08)
    assert many > 1.5 * few


def test_a_pair_is_two_steps_of_one_job() -> None:
    other_job, other_engine = {**VERL, "num_gpus": "32"}, {**VERL, "parallel_config": "vLLM+Megatron; colocate"}
    row = {**VERL, "mode": "one-step off", "parallel_config": "vLLM+FSDP2; 4 gen : 12 train"}
    ((_, alone),) = pairs([("", other_job), ("", other_engine), ("", row)])
    with pytest.raises(Skip, match="no synchronous row"):
        speedup("", alone)
    assert speedup("", verl_pair(step_time_s="100")).measured == 2


def test_stages_are_scaled_to_their_pools_and_the_slower_one_decides() -> None:
    verl = assumed().verl
    found = speedup("", verl_pair())
    assert found.terms.total == pytest.approx(max(2 * verl.work_share * 100, 2 * verl.alone_share * 80))
    assert found.predicted == pytest.approx(200 / found.terms.total)
    again = speedup("", verl_pair(infer_logprob_s="20"))
    assert again.terms.total == pytest.approx(max(2 * verl.work_share * 100, 2 * verl.alone_share * 100))


def test_without_work_ahead_a_step_waits_for_the_longest_responses() -> None:
    ahead = Scaled(
        generation_seconds=100, training_seconds=1, generation_share=0.5, training_share=0.5, works_ahead=True
    )
    behind = Scaled(**{**vars(ahead), "works_ahead": False})
    verl = assumed().verl
    waiting = behind.seconds(verl).total - ahead.seconds(verl).total
    assert waiting == pytest.approx((1 - verl.work_share) * 100)


def test_pools_that_are_not_stated_are_skipped() -> None:
    with pytest.raises(Skip, match="the ranks of the two pools are not stated"):
        speedup("", verl_pair(parallel_config="vLLM+FSDP2; split"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [NEMO, {**NEMO, "mode": "1-step Off", "step_time_s": "80"}]
    lines = [",".join(NEMO), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    (tmp_path / "rlhf_steps.csv").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_a_pair_is_scored_by_the_ratio_of_its_seconds(folder: Path) -> None:
    scores = {score.name: score for score in scores_of([folder])}
    (pair,) = scores["asynchronous over synchronous, speed-up"].answers
    assert pair.measured == pytest.approx(1.25)
    assert 1 < pair.predicted < 2
    assert scores["NeMo-RL synchronous steps"].used == 1


def test_stages_are_scored_one_by_one_where_their_seconds_are_published() -> None:
    row = {**NEMO, "gen_s": "50", "infer_logprob_s": "", "train_s": "40"}
    generation, training = (grpo_stage("", stage) for _, stage in by_stage([("", row)]))
    terms = {term.name: term.amount for term in step_seconds(row).terms}
    assert (generation.measured, generation.predicted) == (50, pytest.approx(terms["generation"]))
    assert (training.measured, training.predicted) == (40, pytest.approx(terms["actor train"]))


def test_whole_tensors_of_experts_cost_a_refit_more_where_ranks_train_and_generate_in_turn() -> None:
    mixture = {**NEMO, "model_actor": "Qwen3-30B-A3B", "parallel_config": "Megatron TP2 EP8; gen TP2"}
    modes = ("sync", "1-step Off")
    in_turn, beside = (
        next(term.amount for term in step_seconds({**mixture, "mode": mode}).terms if term.name == "refit")
        for mode in modes
    )
    num_tensors = 48 * (6 + 3 * 128)
    assert in_turn - beside == pytest.approx(num_tensors * (assumed().nemo_rl.refit_tensor_seconds - 5e-5))


def test_a_release_that_trains_on_policy_skips_the_previous_log_probabilities() -> None:
    early, late = (step_seconds({**NEMO, "system": name}) for name in ("NeMo-RL v0.6", "NeMo-RL v0.7"))
    assert {term.name for term in early.terms} - {term.name for term in late.terms} == {"actor logprob"}


def test_layouts_of_early_releases_are_read_from_their_prose() -> None:
    row = {**NEMO, "gpu": "not stated (H100 presumed)", "parallel_config": "DTensor (FSDP2); gen TP1"}
    assert "actor train" in {term.name for term in step_seconds(row).terms}
    mixture = {**NEMO, "model_actor": "Qwen3-30B-A3B", "parallel_config": "Megatron TP2 EP8; gen TP2"}
    assert step_seconds(mixture).total > 0
    with pytest.raises(Skip, match="layouts not stated"):
        step_seconds({**NEMO, "parallel_config": "as usual"})


def test_a_pair_may_lie_in_two_folders(folder: Path, tmp_path: Path) -> None:
    name, (header, sync, beside) = (
        "asynchronous over synchronous, speed-up",
        folder.joinpath("rlhf_steps.csv").read_text(encoding="utf-8").split("\n"),
    )
    halves = [tmp_path / "one", tmp_path / "other"]
    for half, row in zip(halves, (sync, beside), strict=True):
        half.mkdir()
        (half / "rlhf_steps.csv").write_text(f"{header}\n{row}", encoding="utf-8")
    (alone,) = scores_of(halves[1:], [name])
    assert (alone.used, dict(alone.skipped)) == (0, {"no synchronous row of the same job with these columns": 1})
    (both,) = scores_of(halves, [name])
    assert both.used == 1


def test_a_step_of_another_system_is_listed_as_unread_with_the_reason() -> None:
    for changes, reason in (
        ({"model_actor": "not stated"}, "model not published"),
        ({"parallel_config": ""}, "layouts not published"),
        ({}, "layouts of other are free text"),
    ):
        with pytest.raises(Skip, match=reason):
            unread_step("", {**NEMO, "system": "other", **changes})
