"""Runs that generate with vLLM beside the rank learn as others do, with the weights of every update, and go on after
its end."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.hosts import LOOPBACK
from meshwright.planner.plan.plan import read_plan, write_plan
from meshwright.profiles.errors import STOPPED
from meshwright.profiles.run_logs import former_plans
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.records.record import RunSummary
from tests.runtime.checkpoints import name_end_tokens, write_checkpoint
from tests.runtime.command import Call
from tests.runtime.inference.vllm_environment import VLLM_PYTHON, needs_vllm
from tests.runtime.laws.test_experts import mixture
from tests.runtime.laws.test_replanned_runs import BEYOND, MANY, stopped_beyond
from tests.runtime.laws.test_replanned_runs import asked as replannable
from tests.runtime.laws.test_replanned_runs import start as start_replanning
from tests.runtime.laws.test_restarts import command, ranks_of, wait_for_steps
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.rewarded import LEARNS, lines, rewarded, stopped_and_resumed, write_rewarded
from tests.runtime.small_job import EOS, OF_TIME, VOCAB_SIZE, request, write_job

pytestmark = [pytest.mark.check_all, needs_vllm]

THIRD = {"name": "third", "function": "tests.runtime.rewarding:third_word"}
TWO_REPLICAS = ("actor_generate.layout=tp1,dp2",)
TWO_SHARDS = ("actor_generate.layout=tp2,dp1",)
APART = ("actor_generate.pool=0:1", "actor_train.pool=1:1")
IN_FLIGHT = (*APART, "actor_generate.batches_in_flight=2")
LATE = {"staleness": 2, "cache_after_refit": "recompute"}
BY_VLLM: dict[str, Any] = {"engine": "vllm", "engines": {"vllm": {"python": str(VLLM_PYTHON)}}}


def with_wide_heads(directory: Path) -> Path:
    """The directory, with models whose heads have the 32 elements that vLLM needs on a CPU."""
    for role, head in (("actor", "ForCausalLM"), ("reward", "ForSequenceClassification")):
        write_checkpoint(directory / role, head=head, vocab_size=VOCAB_SIZE, head_dim=32)
        name_end_tokens(directory / role, EOS)
    return directory


def written(directory: Path, algorithm: str = "grpo", **changes: Any) -> Path:
    path = write_rewarded(directory, THIRD, algorithm=algorithm, **{**BY_VLLM, **changes})
    with_wide_heads(directory)
    return path


def with_adapter(path: Path) -> Path:
    """The job, whose actor is trained by an adapter."""
    document = yaml.safe_load(path.read_text())
    document["models"]["actor"]["adapter"] = {"rank": 8, "alpha": 16.0}
    document["grpo"]["actor_learning_rate"] = 3e-2
    path.write_text(yaml.safe_dump(document))
    return path


def require_same_weights(out: Path) -> None:
    """What the engine gave each token, and what the trainer gives it with weights of the same version, are equal."""
    for line in lines(out):
        if "max_generator_gap" in line:
            assert line["max_generator_gap"] < 1e-4


@pytest.mark.parametrize(("algorithm", "pins"), [("grpo", TWO_REPLICAS), ("ppo", TWO_REPLICAS), ("grpo", TWO_SHARDS)])
def test_rewards_rise_and_every_update_reaches_the_engine(
    algorithm: str, pins: tuple[str, ...], tmp_path: Path
) -> None:
    summary = run_plan(rewarded(written(tmp_path, algorithm), tmp_path / "run", *pins, steps=12))
    assert isinstance(summary, RunSummary)
    rise, error = summary.improvement() or (0.0, 1.0)
    assert rise > 3 * error
    assert {line["max_staleness"] for line in lines(tmp_path / "run")} == {0}
    require_same_weights(tmp_path / "run")
    assert "generation by vllm 0.32" in summary.kernels
    assert len(summary.memory) > 3
    for used in summary.memory:  # that of both processes
        assert used.measured_bytes == pytest.approx(used.planned_bytes, rel=0.1), used.stage


@pytest.mark.parametrize("pins", [TWO_REPLICAS, TWO_SHARDS])
def test_the_experts_of_every_update_reach_the_engine(pins: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path)
    rmtree(tmp_path / "actor")
    mixture(tmp_path / "actor", vocab_size=VOCAB_SIZE, head_dim=32)
    name_end_tokens(tmp_path / "actor", EOS)
    summary = run_plan(rewarded(path, tmp_path / "run", *pins, steps=3))
    assert isinstance(summary, RunSummary)
    require_same_weights(tmp_path / "run")


@pytest.mark.parametrize(("pins", "changes"), [(TWO_REPLICAS, {}), (TWO_SHARDS, {}), (IN_FLIGHT, LATE)])
def test_the_adapter_of_every_update_reaches_the_engine(
    pins: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    summary = run_plan(rewarded(with_adapter(written(tmp_path, **changes)), tmp_path / "run", *pins, steps=12))
    assert isinstance(summary, RunSummary)
    rise, error = summary.improvement() or (0.0, 1.0)
    assert rise > 3 * error
    require_same_weights(tmp_path / "run")


def test_a_run_of_an_adapter_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    one, other = stopped_and_resumed(rewarded(with_adapter(written(tmp_path)), tmp_path / "whole", steps=4))
    for key in ("score", "actor_grad_norm", "reward_third"):
        assert [line[key] for line in one] == [line[key] for line in other]


@pytest.mark.parametrize("changes", [{}, LATE])
def test_stages_that_read_responses_in_chunks_compute_what_they_do_of_whole_ones(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write_job(tmp_path, num_ranks=2)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **BY_VLLM, **changes}))
    with_wide_heads(tmp_path)
    whole = request(path, tmp_path / "whole", steps=3)
    slots = Schedule(generation_slots=8, batches_in_flight=2 if changes else 1)
    reading = {"actor_generate": Where("0:1", schedule=slots), "other": Where("1:1")}
    chunks = dict.fromkeys(("reward_score", "ref_logprob"), Where("1:1", schedule=Schedule(chunk_tokens=5)))
    outs = []
    for name, streamed in (("whole", {}), ("chunks", chunks)):
        outs.append(tmp_path / name)
        plan = plan_by_hand(whole.plan.facts, {**reading, **streamed})
        assert isinstance(run_plan(replace(whole, plan=plan, out=outs[-1])), RunSummary)
        require_same_weights(outs[-1])
    for line, known in zip(*map(lines, outs), strict=True):
        for name in known.keys() - OF_TIME:
            assert line[name] == pytest.approx(known[name], abs=1e-4), name


def test_a_first_job_runs_with_vllm_without_pins(call: Call, tmp_path: Path) -> None:
    written(tmp_path)
    numbers = ("--device", "local", "--gpus", 2, "--batch", 8, "--prompt", 8, "--response", 16)
    asked = call("init", tmp_path / "actor", *numbers, "--algorithm", "grpo", "-o", tmp_path / "first.yaml")
    assert asked.code == 0, asked.err
    path = tmp_path / "first.yaml"
    data = {"data": {"prompts": "prompts.jsonl", "tokenizer": "tokenizer"}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rewards": [THIRD], **data, **BY_VLLM}))
    summary = run_plan(rewarded(path, tmp_path / "run", steps=2))
    assert isinstance(summary, RunSummary)
    assert "generation by vllm 0.32" in summary.kernels
    require_same_weights(tmp_path / "run")


def test_filters_and_a_temperature_leave_the_log_probabilities_those_of_the_trainer(tmp_path: Path) -> None:
    path = written(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["grpo"] |= {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "stop": ["ab"]}
    path.write_text(yaml.safe_dump(document))
    summary = run_plan(rewarded(path, tmp_path / "run", *TWO_REPLICAS, steps=3))
    assert isinstance(summary, RunSummary)
    require_same_weights(tmp_path / "run")


def test_batches_in_flight_keep_the_bound_on_staleness(tmp_path: Path) -> None:
    asked = rewarded(written(tmp_path, **LATE), tmp_path / "run", *IN_FLIGHT, steps=12)
    summary = run_plan(asked)
    assert isinstance(summary, RunSummary)
    rise, error = summary.improvement() or (0.0, 1.0)
    assert rise > 3 * error
    assert max(line["max_staleness"] for line in lines(asked.out)) == asked.plan.staleness > 0
    require_same_weights(asked.out)


def test_rewards_over_five_seeds_are_those_of_our_own_engine(tmp_path: Path) -> None:
    rises: dict[str, list[float]] = {"vllm": [], "meshwright-eager": []}
    for engine, of_seeds in rises.items():
        for seed in range(5):
            (directory := tmp_path / f"{engine}-{seed}").mkdir()
            path = written(directory, engine=engine, grpo={**LEARNS, "seed": seed})
            summary = run_plan(rewarded(path, directory / "run", *TWO_REPLICAS, steps=12))
            assert isinstance(summary, RunSummary)
            of_seeds.append((summary.improvement() or (0.0, 1.0))[0])
    means = [statistics.fmean(of_seeds) for of_seeds in rises.values()]
    errors = [statistics.stdev(of_seeds) / len(of_seeds) ** 0.5 for of_seeds in rises.values()]
    assert all(mean > 3 * error for mean, error in zip(means, errors, strict=True)), rises
    assert abs(means[0] - means[1]) < 3 * math.hypot(*errors), rises


@pytest.mark.parametrize(("pins", "changes"), [(TWO_REPLICAS, {}), (TWO_SHARDS, {}), (IN_FLIGHT, LATE)])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    pins: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    asked = rewarded(written(tmp_path, **changes), tmp_path / "whole", *pins, steps=4)
    one, other = stopped_and_resumed(asked)
    for key in ("score", "actor_grad_norm", "reward_third"):
        assert [line[key] for line in one] == [line[key] for line in other]


def test_a_run_goes_over_to_another_plan_and_learns_as_if_it_had_been_resumed_by_hand(tmp_path: Path) -> None:
    write_job(tmp_path, num_ranks=2)
    with_wide_heads(tmp_path)
    asked = replannable(tmp_path, **BY_VLLM)
    agent = start_replanning(asked, "--steps", MANY)
    saved = stopped_beyond(asked, [agent])
    ended = agent.end(300)
    assert ended.code == STOPPED, ended.err
    assert f"restart 1 from step {saved}, 0 steps lost: planned again from its own measurements" in ended.err
    left = [former.plan for former in former_plans(asked.out)][1:] or [asked.out / "plan.json"]
    new = read_plan(left[0])
    assert (new.facts.engine, asked.plan.facts.engine) == ("vllm", "vllm")
    assert new.placements != asked.plan.placements
    require_same_weights(asked.out)

    by_hand = replace(asked, out=tmp_path / "by hand", steps=saved)
    run_plan(by_hand)
    run_plan(replace(by_hand, plan=new, steps=saved + BEYOND, resume=True))
    found = lines(asked.out)[: saved + BEYOND]
    for line, known in zip(found, lines(by_hand.out), strict=True):
        for name in known.keys() - OF_TIME:
            assert line[name] == pytest.approx(known[name], abs=1e-4), name


def ppo_by_vllm(directory: Path, *pins: str) -> RunRequest:
    """A request for six steps of PPO on two ranks."""
    path = write_job(directory, num_ranks=2)
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **BY_VLLM}))
    with_wide_heads(directory)
    return replace(request(path, directory / "unbroken", *pins), steps=6)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """The scores of each step of such a run in which no engine fails, by its pins."""

    @functools.cache
    def scores(*pins: str) -> list[float]:
        asked = ppo_by_vllm(tmp_path_factory.mktemp("unbroken"), *pins)
        assert isinstance(run_plan(asked), RunSummary)
        return [line["score"] for line in lines(asked.out)]

    return scores


def kill(engine: psutil.Process) -> None:
    engine.kill()


def stop(engine: psutil.Process) -> None:
    """Stop the process without ending it, as one that waits for ever."""
    engine.suspend()


def leave_no_memory(engine: psutil.Process) -> None:
    """Refuse the process all memory beyond what it has."""
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms, engine.memory_info().vms))


@pytest.mark.parametrize(
    ("fault", "pins", "says"),
    [
        (kill, TWO_REPLICAS, "was ended by SIGKILL, which the kernel sends when memory runs out; what it printed is"),
        (kill, TWO_SHARDS, "was ended by SIGKILL"),
        (stop, TWO_REPLICAS, "did not answer within 45 s and was ended; what it printed is in"),
        (leave_no_memory, TWO_REPLICAS, "ran out of memory ("),
    ],
)
def test_an_engine_that_fails_is_named_and_started_again_with_its_rank_which_samples_the_same_again(
    fault: Callable[[psutil.Process], None],
    pins: tuple[str, ...],
    says: str,
    unbroken: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    write_plan(tmp_path / "plan.json", ppo_by_vllm(tmp_path, *pins).plan)
    agent = LOOPBACK[0].start(command(tmp_path, tmp_path / "run", "--max-restarts", 1))
    wait_for_steps(tmp_path / "run", 2, [agent])
    engines = [
        process
        for rank in ranks_of(agent)
        for process in rank.children(recursive=True)
        if any("engine_server.py" in word for word in process.cmdline())
    ]
    fault(engines[0])
    ended = agent.end(600)
    assert ended.code == 0, ended.err
    assert says in ended.err
    assert not any(psutil.pid_exists(engine.pid) for engine in engines)
    assert "generation by vllm" in json.loads((tmp_path / "run" / "summary.json").read_text())["kernels"]
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == list(range(6))
    require_same_weights(tmp_path / "run")
    assert [line["score"] for line in found] == pytest.approx(unbroken(*pins), abs=1e-4)
