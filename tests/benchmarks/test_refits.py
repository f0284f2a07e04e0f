"""Weight synchronisations of published rows as questions."""

import pytest

from benchmarks.fidelity.assumed import assumed
from benchmarks.fidelity.refits import in_place, is_in_place, is_loaded, loaded, otherwise, within_step
from benchmarks.fidelity.rows import Row, Skip


def row(**said: str) -> Row:
    return {"model": "Qwen2.5-7B", "trainer_ranks": "8", "rollout_ranks": "8", "total_sync_s": "2.0", **said}


def full(**said: str) -> Row:
    layout = {"transport": "NCCL broadcast", "gpu": "H100", "rollout_layout": "SGLang TP8", "precision": "BF16"}
    return row(**layout | said)


def test_a_loader_is_given_all_weights_whatever_the_engine_keeps() -> None:
    few, many = (loaded("", full(rollout_ranks=ranks)) for ranks in ("8", "16"))
    assert few.measured == 2.0
    assert few.predicted == many.predicted
    assert loaded("", full(model="Qwen2.5-32B")).predicted > 4 * few.predicted


def test_in_place_each_rank_receives_its_part() -> None:
    parts = {tp: in_place("", full(transport="NCCL reshard", rollout_layout=f"vLLM TP{tp}")) for tp in (2, 4)}
    start = assumed().transfers.reshard_start_seconds
    assert start < parts[4].predicted < parts[2].predicted < start + loaded("", full()).predicted


def test_a_row_of_models_and_ranks_alone_is_a_broadcast_on_hopper() -> None:
    assert loaded("", row()).predicted == loaded("", full()).predicted


def test_tensors_sent_alone_and_weights_gathered_from_shards_take_longer() -> None:
    together = loaded("", row(checkpoint_engine="True")).predicted
    assert loaded("", row(checkpoint_engine="False")).predicted > together + 0.1
    assert loaded("", full(trainer_layout="FSDP")).predicted > 5 * together


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"precision": "FP8"}, "precision FP8 is made on the way"),
        ({"trainer_ranks": ""}, "trainer_ranks not published"),
    ],
)
def test_what_is_not_costed_is_skipped_with_the_reason(said: dict[str, str], why: str) -> None:
    with pytest.raises(Skip, match=why):
        loaded("", full(**said))


def test_every_row_is_of_one_way_of_transport() -> None:
    ways = {"NCCL broadcast": (True, False), "NCCL reshard": (False, True), "delta_sharded": (False, False)}
    found = {way: (is_loaded(full(transport=way)), is_in_place(full(transport=way))) for way in ways}
    assert found == ways
    with pytest.raises(Skip, match="transport delta_sharded is not priced"):
        otherwise("", full(transport="delta_sharded"))


def test_of_a_run_the_first_steps_are_left_out() -> None:
    said = {"model": "Qwen3.5-397B-A17B", "gpu": "GB300", "train_gpus": "64", "gen_gpus": "192", "precision": "BF16"}
    step = {**said, "weight_sync_s": "15.0", "gen_layout": "vLLM TP8"}
    found = within_step("", {**step, "step": "3"})
    assert (found.measured, within_step("", {**step, "step": "4"}).predicted) == (15.0, found.predicted)
    with pytest.raises(Skip, match="a step before step 3"):
        within_step("", {**step, "step": "2"})
