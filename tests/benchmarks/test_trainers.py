"""Steps of a trainer by itself, on rows made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.sets import scores_of

HEADER = (
    "system,type,model,gpu,num_gpus,lora_rank,seq_len,micro_batches_per_gpu,activation_memory,attention,success,"
    "step_time_mean_s,peak_mem_gib\n"
)
H100 = "NVIDIA H100 80GB HBM3"


def row(model: str = "Qwen/Qwen3-0.6B", *, gpus: int = 1, rank: str = "", kept: str = "full recompute") -> str:
    return f"made up,rl,{model},{H100},{gpus},{rank},4096,2,{kept},flash_attention_3,True,0.5,10\n"


def scored(folder: Path, *rows: str) -> dict[str, tuple[list[float], dict[str, int]]]:
    """By set, what was predicted and what was skipped."""
    (folder / "trainer_baselines_primerl.csv").write_text(HEADER + "".join(rows), encoding="utf-8")
    return {s.name: ([a.predicted for a in s.answers], dict(s.skipped)) for s in scores_of([folder])}


def test_an_adapter_takes_less_memory_and_of_a_large_model_less_time_than_all_weights(tmp_path: Path) -> None:
    found = scored(tmp_path, row("Qwen3-32B"), row("Qwen3-32B", rank="16"))
    for (whole, adapted), skipped in (found["trainer, step"], found["trainer, memory of one GPU"]):
        assert 0 < adapted < whole
        assert skipped == {}


def test_as_many_rows_a_gpu_take_about_as_long_on_several(tmp_path: Path) -> None:
    (one, eight), _ = scored(tmp_path, row(), row(gpus=8))["trainer, step"]
    assert eight == pytest.approx(one, rel=0.1)


def test_a_step_of_reinforcement_learning_takes_a_time_more_than_one_of_fine_tuning(tmp_path: Path) -> None:
    (learning, tuning), _ = scored(tmp_path, row(), row().replace(",rl,", ",sft,"))["trainer, step"]
    assert learning - tuning == pytest.approx(assumed().prime_rl.reinforcement_seconds)


def test_what_is_no_question_for_the_cost_model_is_counted_by_reason(tmp_path: Path) -> None:
    failed = row().replace("True", "False")
    found = scored(
        tmp_path,
        failed,
        row(kept="recompute + activation offload"),
        row("Qwen/Qwen3-30B-A3B-Instruct-2507", rank="16"),
        row(gpus=8),
    )
    of_both = {
        "the run failed": 1,
        "activations in host memory are not priced": 1,
        "adapters of experts are not priced": 1,
    }
    assert found["trainer, step"][1] == of_both
    divided = {"weights divided over replicas (FSDP) are not a layout here": 1}
    assert found["trainer, memory of one GPU"][1] == of_both | divided
