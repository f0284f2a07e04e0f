"""Multi-turn rollouts train as others do, wherever they run and whatever they keep while they wait."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.planner.program.durations import Planned
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.stages import GENERATE, TOOL_TOKEN_VERSION
from meshwright.profiles.trace import NUM_CALLS, read_spans
from meshwright.runtime.execution.rehearse import rehearse
from meshwright.runtime.execution.train import run_plan
from tests.runtime.observed import Observed, observe
from tests.runtime.rewarded import rewarded, stopped_and_resumed, write_rewarded
from tests.seeds import cases

THIRD = {"name": "third", "function": "tests.runtime.rewarding:third_word"}
APART = ("actor_generate.pool=0:1", "actor_train.pool=1:1")
TURNS = {
    "number": {"max": 4, "histogram": [[1, 1], [2, 2], [4, 1]]},
    "result": {"max": 4, "fixed": 3},
    "latency_seconds": {"fixed": 0.01},
    "max_tokens": 40,
}


WAVES = {"dynamic_sampling": {"acceptance": 0.6, "num_prompts": 3}}
BEST = {"group_size": 2, "best_of": 4, "batch_size": 8}
FROZEN = {"grpo": {"actor_learning_rate": 1e-12, "kl_coefficient": 0.0}}


def written(
    directory: Path,
    tool: str = "echoed_words",
    *,
    reward: dict[str, Any] = THIRD,
    workload: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    given = {"function": f"tests.runtime.rewarding:{tool}", "call_end": "w5", "workers": 2}
    path = write_rewarded(directory, reward, **{"algorithm": "grpo", **changes})
    job = yaml.safe_load(path.read_text())
    job["workload"] |= {"response": {"max": 16, "median": 8, "p99": 16}, "turns": TURNS, **(workload or {})}
    path.write_text(yaml.safe_dump({**job, "tool": given}))
    return path


def ran(path: Path, out: Path, *pins: str, steps: int = 2) -> list[dict[str, Any]]:
    run_plan(rewarded(path, out, *pins, steps=steps))
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@cases("changes", [{}, {"algorithm": "ppo"}, {"workload": WAVES}, {"workload": BEST}], few=1)
def test_neither_layouts_nor_leaving_a_slot_change_what_is_learned(changes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, **changes)
    ways = {
        "one": ("actor_generate.while_waiting=keep", "actor_generate.layout=tp1,pp1,dp2"),
        "two": ("actor_generate.while_waiting=leave", "actor_generate.layout=tp2,pp1,dp1"),
        "three": ("actor_generate.while_waiting=leave", "actor_generate.layout=tp1,pp2,dp1"),
    }
    runs = [ran(path, tmp_path / name, *pins) for name, pins in ways.items()]
    assert all(line["tool_tokens"] > 0 for line in runs[0])
    for run in runs[1:]:
        for line, other in zip(runs[0], run, strict=True):
            for key in ("score", "tool_tokens", "response_tokens", "actor_grad_norm", "policy_loss"):
                assert other[key] == pytest.approx(line[key], abs=1e-5), key


def sequences(run: Observed) -> list[tuple[list[int], float]]:
    """The tokens and the score of every row of a run, step by step."""
    return [
        (held["tokens"][row].tolist(), float(held["environment_scores"][row]))
        for held in run.steps
        for row in range(len(held["tokens"]))
    ]


@pytest.mark.check_all
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_selected_is_selected_of_the_rollouts_of_a_run_that_trains_on_all(
    tmp_path: Path, staleness: int
) -> None:
    """Under a policy that does not change, rollouts of the same prompts are the same."""
    short = {"name": "short", "function": "tests.runtime.rewarding:is_short"}
    asked = {}
    for name, workload in {"all": {"batch_size": 48}, "waves": WAVES, "best": BEST}.items():
        (tmp_path / name).mkdir()
        job = written(tmp_path / name, reward=short, workload=workload, staleness=staleness, **FROZEN)
        pins = APART if staleness else ("actor_generate.pool=0:2",)
        asked[name] = rewarded(job, tmp_path / name / "run", *pins, steps=2)
        assert name == "all" or asked[name].plan.placement(GENERATE).steps_ahead == staleness
    everything, waves, best = map(sequences, observe(2, list(asked.values())))
    groups = [everything[first : first + 4] for first in range(0, len(everything), 4)]
    drawn, trained = iter(groups), list[tuple[list[int], float]]()
    for _ in range(2):
        kept: list[list[tuple[list[int], float]]] = []
        while len(kept) < 4:
            wave = list(itertools.islice(drawn, 3))
            kept += [group for group in wave if len({score for _, score in group}) > 1]
        trained += [one for group in kept[:4] for one in group]
    assert any(len({score for _, score in group}) == 1 for group in groups)
    assert waves == trained
    ranked = [sorted(range(4), key=lambda row, group=group: (-group[row][1], row))[:2] for group in groups]  # type: ignore[misc]
    highest = [group[row] for group, rows in zip(groups, ranked, strict=True) for row in sorted(rows)]
    assert best == highest[: len(best)]


@pytest.mark.check_all
def test_a_run_that_is_resumed_ahead_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    """But for the last bits of sums, which follow when tools answer."""
    path = written(tmp_path, staleness=1)
    whole, resumed = stopped_and_resumed(rewarded(path, tmp_path / "whole", *APART, steps=4))
    for key in ("score", "actor_grad_norm", "tool_tokens"):
        assert [line[key] for line in whole] == pytest.approx([line[key] for line in resumed], rel=1e-5)


IN_FLIGHT = (
    "actor_generate.layout=tp1,pp1,dp1",
    "actor_generate.pool=0:1",
    "actor_generate.batches_in_flight=2",
    "actor_train.pool=1:1",
)


def versions_by_turn(held: dict[str, dict[int, Any]], row: int) -> list[set[int]]:
    """The versions that sampled the tokens of each turn of a rollout."""
    prompt, turns, told = int(held["prompt_lengths"][row]), [set[int]()], False
    for version in held["versions"][row].tolist()[prompt - 1 : -1]:
        if told and version != TOOL_TOKEN_VERSION:
            turns.append(set())
        told = version == TOOL_TOKEN_VERSION
        if not told:
            turns[-1].add(version)
    return turns


@pytest.mark.check_all
def test_with_batches_in_flight_the_turns_of_a_rollout_are_sampled_by_successive_versions(tmp_path: Path) -> None:
    """Of four turns and two batches the first two are sampled a period earlier; every call is in the trace."""
    asked = rewarded(written(tmp_path, staleness=1), tmp_path / "run", *IN_FLIGHT, steps=4)
    assert asked.plan.staleness == 1
    (run,) = observe(2, [asked])
    num_turns = 0
    for step, held in enumerate(run.steps):
        for row in held["tokens"]:
            turns = versions_by_turn(held, row)
            assert turns == [{step if number > 2 else max(0, step - 1)} for number in range(1, len(turns) + 1)]
            num_turns += len(turns)
    spans = read_spans(asked.out / "trace.jsonl")
    calls = sum(span.facts.get(NUM_CALLS, 0.0) for span in spans if span.instruction == GENERATE)
    assert calls + sum(len(held["tokens"]) for held in run.steps) == num_turns
    assert any(len(versions_by_turn(held, row)) > 2 for held in run.steps for row in held["tokens"])


@pytest.mark.check_all
def test_a_run_that_is_resumed_between_two_turns_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    path = written(tmp_path, staleness=1)
    whole, resumed = stopped_and_resumed(rewarded(path, tmp_path / "whole", *IN_FLIGHT, steps=4))
    for key in ("score", "actor_grad_norm", "tool_tokens"):
        assert [line[key] for line in whole] == pytest.approx([line[key] for line in resumed], rel=1e-5)


@pytest.mark.slow
def test_a_tool_that_fails_ends_the_run_with_its_sample(tmp_path: Path) -> None:
    path = written(tmp_path, "silent_at_seven")
    with pytest.raises(RunFailed, match=r"in turn \d of sample (held out|0)/\d+: ValueError: w7 is not to be asked"):
        run_plan(rewarded(path, tmp_path / "run", steps=1))


@pytest.mark.check_all
def test_a_plan_of_several_turns_is_rehearsed(tmp_path: Path) -> None:
    asked = rewarded(written(tmp_path), tmp_path / "run", steps=1)
    found = rehearse(asked.plan, Planned(asked.plan), steps=2, speed=0.1)
    assert found.steps.mean == pytest.approx(asked.plan.period_seconds, rel=1.0)


def test_a_job_of_several_turns_without_a_tool_is_planned_and_not_run(tmp_path: Path) -> None:
    path = written(tmp_path)
    job = yaml.safe_load(path.read_text())
    del job["tool"]
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(BadInput, match=r"no tool answers them; give tool\.function"):
        run_plan(rewarded(path, tmp_path / "run", steps=1))


def test_a_tool_of_a_module_that_was_not_allowed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = written(tmp_path)
    job = yaml.safe_load(path.read_text())
    job["tool"]["function"] = "os.path:exists"
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(BadInput, match=r"tool: os\.path:exists would run code of the module os\.path"):
        run_plan(rewarded(path, tmp_path / "run", steps=1))
