"""The accelerator benchmark: its limits are the device's, its parts run on a processor too, and none runs twice."""

from __future__ import annotations

import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks.accelerator import eight_bits, environment
from benchmarks.accelerator.agreement import compare
from benchmarks.accelerator.finished import Finished
from benchmarks.accelerator.jobs import config_of, write_profile_job
from benchmarks.accelerator.limits import decode_seconds, train_seconds
from benchmarks.accelerator.long_tail import end_tokens, geometric
from benchmarks.accelerator.parts import PARTS
from benchmarks.accelerator.profiles import against
from benchmarks.accelerator.repeats import digest_of
from benchmarks.accelerator.shares import shares
from benchmarks.accelerator.world import World
from meshwright.cost_models.imported_operators import imported_points, imported_table
from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.aiconfigurator import read_operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.hardware import Cluster, device_named, require_uniform
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import model_from_config
from meshwright.profiles.table import Point
from meshwright.runtime.device import host
from tests.planner.jobs import model_spec

H200, _, _ = device_named("h200")
SPEC = model_spec("actor")
ROOT = Path(__file__).parents[2]


def test_a_decode_step_cannot_be_faster_than_its_weights_and_cache_are_read() -> None:
    untied, tied = (replace(SPEC, tied_embeddings=tied) for tied in (False, True))
    weights = 2 * (SPEC.num_params - SPEC.embedding_params) / H200.memory_bytes_per_second
    assert decode_seconds(untied, H200, "bf16", rows=0, context=100) == pytest.approx(weights)
    assert decode_seconds(tied, H200, "bf16", rows=0, context=100) == pytest.approx(weights)
    one, eight = (decode_seconds(SPEC, H200, "bf16", rows=rows, context=100) - weights for rows in (1, 8))
    assert one == pytest.approx(2 * 2 * 4 * 64 * 100 / H200.memory_bytes_per_second)
    assert eight == pytest.approx(8 * one)


def test_the_peak_of_training_is_six_flops_a_weight_and_token_and_the_causal_attention() -> None:
    flops = train_seconds(SPEC, H200, "bf16", rows=2, tokens=512) * H200.flops_per_second["bf16"]
    assert flops == pytest.approx(6 * 1024 * (SPEC.num_params - SPEC.embedding_params + 4 * 64 * 512))


def tiny(out: Path) -> World:
    return World(out=out, device="cpu", tiny=True)


@pytest.mark.check_all
def test_both_bodies_of_a_whole_model_are_measured_and_slower_than_their_limits(tmp_path: Path) -> None:
    world = tiny(tmp_path)
    spec = model_from_config(config_of(world, "qwen2.5-0.5b"), name="tiny")
    found = list(shares(world, [spec]))
    assert len(found) == 2
    for share in found:
        assert share.measured.point.num_layers == spec.num_layers
        assert share.measured.seconds is not None
        assert 0 < share.limit_seconds < share.measured.seconds


@pytest.mark.check_all
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b"])
def test_log_probabilities_are_those_of_transformers_and_in_bf16_as_near_as_its_own(name: str, tmp_path: Path) -> None:
    exact, ours, theirs = compare(tiny(tmp_path), name)
    assert exact.most < 1e-5
    assert 0 < ours.mean < 1.5 * theirs.mean


def points_of_shards(directory: Path, name: str) -> tuple[tuple[Point, ...], Cluster]:
    world = World(out=directory, device="h200", tiny=False)
    facts = resolve(read_job(write_profile_job(directory, world, name)), directory)
    cluster = require_uniform(facts.cluster, "profile")
    return imported_points(
        PPO_GRAPH, [{role: facts.models.spec(role) for role in PPO_GRAPH.roles}], [facts.workload], cluster
    ), cluster


@pytest.mark.parametrize(
    ("name", "sizes"), [("llama-3.1-8b", (1, 2, 4, 8)), ("qwen2.5-1.5b", (1, 2)), ("qwen2.5-0.5b", (1, 2))]
)
def test_a_profile_of_shards_has_every_tp_that_divides_the_model(
    tmp_path: Path, name: str, sizes: tuple[int, ...]
) -> None:
    heads = config_of(World(out=tmp_path, device="h200", tiny=False), name)["num_attention_heads"]
    wanted, _ = points_of_shards(tmp_path, name)
    assert {point.shape.num_heads for point in wanted} == {heads // tp for tp in sizes}


def test_a_profile_is_scored_by_the_points_that_both_tables_have(tmp_path: Path) -> None:
    wanted, cluster = points_of_shards(tmp_path, "llama-3.1-8b")
    measured = imported_table(read_operators("h200"), wanted, cluster, "bf16", "2026-11-22")
    rows = [m.model_copy(update={"seconds": 1.1 * (m.seconds or 0)}) for m in measured.measurements[:-1]]
    slower = measured.model_copy(update={"measurements": tuple(rows)})
    *_, whole = against(measured, slower)
    assert whole.used == len(wanted) - 1
    assert (whole.mean, whole.bias) == (pytest.approx(0.1), pytest.approx(0.1))
    assert sum(score.used for score in against(measured, slower)) == 2 * whole.used


@pytest.mark.parametrize(
    ("name", "num_params"), [("qwen2.5-0.5b", 0.494e9), ("qwen2.5-1.5b", 1.544e9), ("llama-3.1-8b", 8.03e9)]
)
def test_models_have_their_published_numbers_of_parameters(name: str, num_params: float, tmp_path: Path) -> None:
    config = config_of(World(out=tmp_path, device="h200", tiny=False), name)
    assert model_from_config(config, name=name).num_params == pytest.approx(num_params, rel=1e-3)


@pytest.mark.parametrize(("vocab_size", "draws", "longest"), [(128256, 185, 1024), (512, 8, 32)])
def test_lengths_of_a_long_tail_are_those_of_draws_that_one_in_so_many_tokens_ends(
    vocab_size: int, draws: int, longest: int
) -> None:
    ends = end_tokens(vocab_size, draws)
    assert min(ends) > max(map(ord, string.printable))
    assert max(ends) == vocab_size - 1
    chance = len(ends) / vocab_size
    assert chance == pytest.approx(1 / draws, rel=0.01)
    found = LengthSpec(max=longest, histogram=tuple(map(tuple, geometric(chance, longest)))).resolve()
    whole = sum((1 - chance) ** drawn for drawn in range(longest))  # of the chances that one is as long and longer
    assert found.mean == pytest.approx(whole, rel=0.03)
    assert sum(found.probabilities) == pytest.approx(1.0)
    assert found.expected_maximum(64) > 3 * found.mean


def test_large_files_of_a_part_go_when_it_ends_and_those_of_one_that_was_cut_off_when_it_begins(tmp_path: Path) -> None:
    left = tmp_path / "grpo" / "room" / "weights"
    left.mkdir(parents=True)
    with tiny(tmp_path).room("grpo") as room:
        assert room.is_relative_to(tmp_path)
        assert list(room.iterdir()) == []
        (room / "run").mkdir()
    assert not room.exists()


def test_what_is_multiplied_in_8_bits_is_near_the_same_numbers_cast_up() -> None:
    torch.manual_seed(0)
    host.choose("cpu")
    error, *_ = eight_bits._product(torch.randn(4, 64), [torch.randn(32, 64) for _ in range(3)]).split(" | ")
    assert float(error) < 1e-6


def call(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.accelerator", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_says_every_part(tmp_path: Path) -> None:
    said = call(tmp_path, "--help").stdout
    assert all(f"{name} " in said and part.about in said for name, part in PARTS.items())


def test_no_part_takes_longer_than_a_call() -> None:
    assert all(0 < part.minutes <= 9.5 for part in PARTS.values())


def test_a_processor_measures_tiny_models_only(tmp_path: Path) -> None:
    found = call(tmp_path / "out", "--device", "cpu")
    assert found.returncode == 2
    assert found.stderr == (
        "error: --device cpu: models of real sizes take a processor days; add --tiny to try the commands.\n"
    )


def test_a_part_that_is_cut_off_is_left_for_the_next_call(tmp_path: Path) -> None:
    found = call(tmp_path, "--device", "cpu", "--tiny", "--minutes", "0", "--part", "ceilings")
    assert found.returncode == 1
    assert "ceilings is begun again in the next call" in found.stdout
    assert f"left: {', '.join(PARTS)}; say the same command again" in found.stdout
    assert not (tmp_path / "ceilings.md").exists()


@pytest.mark.check_all
def test_every_part_runs_on_a_processor_says_so_and_is_not_run_again(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--tiny", "--minutes", "60")
    found = call(tmp_path, *options)
    assert found.returncode == 0, found.stdout + found.stderr
    for name in PARTS:
        report = (tmp_path / f"{name}.md").read_text()
        assert "TINY, ON A PROCESSOR" in report
        assert "No figure is of a GPU" in report
    assert "have the same bits" in (tmp_path / "repeats.md").read_text()
    for name in ("ppo", "grpo"):
        report = (tmp_path / f"{name}.md").read_text()
        assert "profile: median absolute error" in report
        assert "equations: median absolute error" in report
    assert "| 100.0% |" not in (tmp_path / "grpo.md").read_text(), "no response of the long tail has ended by itself"
    assert "| vLLM | 128 |" in (tmp_path / "generation.md").read_text()
    assert "failed" not in (tmp_path / "eight-bits.md").read_text()
    assert "snapshot, of the step" in (tmp_path / "checkpoints.md").read_text()
    assert "not measured yet" not in (tmp_path / "shares.md").read_text()
    again = call(tmp_path, *options)
    assert (
        again.stdout.strip() == f"nothing is left. Tiny models: nothing in {tmp_path} is a figure of a GPU; delete it."
    )
    other = call(tmp_path, "--device", "h200")
    assert other.returncode == 2
    assert f"--out {tmp_path} holds parts measured on cpu, tiny, not on h200; give another." in other.stderr


def test_what_is_finished_is_known_to_the_next_call_and_refused_to_another_device(tmp_path: Path) -> None:
    finished = Finished(tmp_path, "h200")
    assert "shares" not in finished
    finished.add("shares", "a report", 12.0)
    assert "shares" in Finished(tmp_path, "h200")
    assert "ceilings" not in Finished(tmp_path, "h200")
    assert finished.report_of("shares").read_text() == "# shares\n\na report"
    with pytest.raises(BadInput, match="holds parts measured on h200, not on cpu, tiny; give another"):
        Finished(tmp_path, "cpu, tiny")


def test_what_the_pins_leave_out_is_named() -> None:
    wanted = {requirement.name: requirement for requirement in environment.requirements()}
    assert {"torch", "megatron-core", "transformers"} <= set(wanted)
    assert environment.held_to(wanted["torch"]) == (environment.held_to(Requirement("torch"))[0], "")
    assert environment.held_to(Requirement("torch==1.0"))[1] == "NOT ==1.0"
    assert environment.held_to(Requirement("no-such-package"))[1] == "MISSING"


def test_runs_have_one_digest_where_records_and_weights_are_alike_but_for_the_clock(tmp_path: Path) -> None:
    digests = []
    for number, (seconds, reward, weights) in enumerate([(1, 2, b"a"), (9, 2, b"a"), (1, 3, b"a"), (1, 2, b"b")]):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_text(f'{{"seconds": {seconds}, "reward": {reward}}}\n')
        (run / "model.safetensors").write_bytes(weights)
        digests.append(digest_of(run))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
