"""Turns: what a rollout draws depends neither on when its tool answers, nor on what becomes of it while it waits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models

from meshwright.cost_models.period_ends import WholeTurns
from meshwright.planner.job.rewards_and_tools import Tool
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.environment.samples import ToolCall
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.in_flight import (
    GenerationState,
    InFlightState,
    SamplingDigests,
    pack_in_flight_state,
    read_in_flight_state,
    write_in_flight_state,
)
from meshwright.runtime.inference.slots import Finish, Prompt, Response
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.inference.tool_turns import RolloutTurn, ToolTurns, TurnLimits
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.environment.samples import MODULE
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

pytestmark = pytest.mark.slow

LETTERS = "abcdefghijklmnopqrstuvwx"
CALLS, EOS = "fgij", LETTERS.index("h")
LIMITS = TurnLimits(num_turns=5, sampled=20, answer=3, response=44)
PROMPTS = tuple(
    Prompt(
        row=row, sample_id=100 + row, tokens=tuple((tokens(1, 3 + row // 4, seed=row // 4)[0] % len(LETTERS)).tolist())
    )
    for row in range(24)
)


def turn_taking(mesh, function: str, keeps_cache: bool) -> ToolTurns:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()

    def describe(prompt: Prompt, behind: object, turn: RolloutTurn) -> ToolCall:
        text = "".join(LETTERS[token] for token in behind)  # type: ignore[attr-defined]
        return ToolCall(id=f"0/{prompt.row}", prompt="", response=text, turn=turn.number, sampled=text[turn.first :])

    return ToolTurns(
        mesh,
        torch.device("cpu"),
        ToolWorkers(Tool(function=f"{MODULE}:{function}", workers=2)) if mesh.is_first_of_replica else None,
        call_end=StopStrings(tokenizer, tuple(CALLS)),
        limits=LIMITS,
        keeps_cache=keeps_cache,
        describe=describe,
        encode=lambda text: tuple(LETTERS.index(letter) for letter in text),
    )


class Case(NamedTuple):
    """Where rollouts are generated, in how many slots and blocks of cache, and how many read one prompt."""

    layout: str
    slots: int
    blocks: int | None = None
    group_size: int = 1


def generate(directory: Path, case: Case, keeps_cache: bool) -> tuple[Response, ...] | None:
    mesh = build_mesh(Layout.parse(case.layout), 0)
    if not mesh.is_member:
        return None
    taking = turn_taking(mesh, "last_letters", keeps_cache)
    responses = new_generator(directory, mesh, case, taking).generate(PROMPTS)
    if taking._tools:
        assert taking.num_calls == sum(map(num_calls, responses))
        taking._tools.close()
    return responses


def new_generator(directory: Path, mesh: Mesh, case: Case, taking: ToolTurns) -> Generator:
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    return Generator(
        model,
        spec,
        mesh,
        num_slots=case.slots,
        num_blocks=case.blocks,
        max_tokens=64,
        max_response=LIMITS.response,
        eos_tokens=frozenset({EOS}),
        temperature=0.8,
        seed=5,
        group_size=case.group_size,
        tool_turns=taking,
    )


ROWS = 8
"""The prompts of each of the steps in which several batches are in flight."""


class Periods(NamedTuple):
    """How many batches are in flight, whether a rollout keeps its slot while it waits within a period, and whether each
    period runs on a generator that was restored from a checkpoint of the one before."""

    num_batches: int
    keeps_cache: bool
    restarts: bool = True


def generate_in_periods(directory: Path, case: Case, periods: Periods) -> tuple[tuple[Response, ...], int] | None:
    """All responses, and the calls that all periods counted: the period of a step delivers its batch and has its number
    as version."""
    mesh = build_mesh(Layout.parse(case.layout), 0)
    if not mesh.is_member:
        return None
    taking = turn_taking(mesh, "last_letters", periods.keeps_cache)
    generator = new_generator(directory, mesh, case, taking)
    steps, num_batches, responses, calls = len(PROMPTS) // ROWS, periods.num_batches, list[Response](), 0
    for step in range(steps):
        admitted = range(0 if step == 0 else step + num_batches - 1, min(step + num_batches, steps))
        delivered = generator.run_period(
            [replace(prompt, step=prompt.row // ROWS) for prompt in PROMPTS if prompt.row // ROWS in admitted],
            version=step,
            delivery=WholeTurns(step, num_batches, LIMITS.num_turns),
        )
        assert [one.step for one in delivered] == [step] * ROWS
        assert not any(group.live for group in generator._flight.groups)
        responses += delivered
        calls += taking.take_counts()[0]
        if periods.restarts:
            state = InFlightState(
                digests=SamplingDigests("", ""),
                num_steps=steps,
                experience={},
                generation=GenerationState(num_admitted=0, mean_response_tokens=0.0, in_flight=generator.snapshot()),
            )
            calls += taking.take_counts()[0]
            content = pack_in_flight_state(state)
            if taking._tools:
                taking._tools.close()
            taking = turn_taking(mesh, "last_letters", periods.keeps_cache)
            generator = new_generator(directory, mesh, case, taking)
            write_in_flight_state(directory, dist.get_rank(), content)
            read = read_in_flight_state(directory, dist.get_rank(), SamplingDigests("", ""))
            assert read
            assert read.generation
            if in_flight := read.generation.in_flight:
                assert not in_flight.cached
                generator.restore(in_flight)
    assert not generator.in_flight
    if taking._tools:
        taking._tools.close()
    return tuple(responses), calls


def turn_versions(response: Response) -> list[set[int]]:
    """The versions that sampled the tokens of each of its turns."""
    turns, told = [set[int]()], False
    for version in response.versions:
        if told and version != TOOL_TOKEN_VERSION:
            turns.append(set())
        told = version == TOOL_TOKEN_VERSION
        if not told:
            turns[-1].add(version)
    return turns


def num_calls(response: Response) -> int:
    """Of its tool: every one tells a letter or more."""
    told = [version == TOOL_TOKEN_VERSION for version in response.versions]
    return sum(one and not before for before, one in zip([False, *told], told, strict=False))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor", vocab_size=len(LETTERS))


@pytest.fixture(scope="module")
def alone(directory: Path) -> tuple[Response, ...]:
    found = run_on_ranks(4, generate, directory, Case("tp1", 1), True)[0]
    assert found is not None
    return found


def test_a_rollout_goes_on_behind_what_its_tool_told_and_ends_within_its_limits(alone: tuple[Response, ...]) -> None:
    assert sum(map(num_calls, alone)) > len(alone) / 2
    for response in alone:
        assert len(response.tokens) <= LIMITS.response
        first, number = 0, 1
        for place, version in enumerate(response.versions):
            if version == TOOL_TOKEN_VERSION and response.versions[place - 1] != TOOL_TOKEN_VERSION:
                assert LETTERS[response.tokens[place - 1]] in CALLS
                told = response.tokens[first:place][-number:][: min(LIMITS.answer, LIMITS.response - place - 1)]
                assert response.tokens[place : place + len(told)] == told
                assert response.versions[place : place + len(told)] == (TOOL_TOKEN_VERSION,) * len(told)
                assert response.logprobs[place : place + len(told)] == (0.0,) * len(told)
                first, number = place + len(told), number + 1
        assert number <= LIMITS.num_turns
        last = response.tokens[first:]
        assert (response.finish is Finish.EOS) == (last[-1] == EOS)
        assert len(last) <= LIMITS.sampled
    assert {response.finish for response in alone} == {Finish.EOS, Finish.LENGTH}


@cases("keeps_cache", [True, False], few=2)
@cases(
    "case",
    [
        Case("tp1", 4),
        Case("tp1", 24, blocks=12),
        Case("tp1", 11, group_size=4),
        Case("tp2", 9),
        Case("pp2", 5),
        Case("tp2,pp2", 8, blocks=9, group_size=4),
    ],
    few=2,
)
def test_neither_layouts_nor_slots_nor_leaving_them_change_what_is_drawn(
    directory: Path, alone: tuple[Response, ...], case: Case, keeps_cache: bool
) -> None:
    answers = [a for a in run_on_ranks(4, generate, directory, case, keeps_cache) if a]
    assert len(answers) == Layout.parse(case.layout).num_ranks
    for responses in answers:
        assert [one.tokens for one in responses] == [one.tokens for one in alone]
        assert [one.versions for one in responses] == [one.versions for one in alone]
        assert [one.finish for one in responses] == [one.finish for one in alone]


@cases(
    ("case", "periods"),
    [
        (Case("tp1", 3), Periods(2, keeps_cache=True, restarts=False)),
        (Case("pp2", 5), Periods(3, keeps_cache=False)),
        (Case("tp2", 24, blocks=12), Periods(4, keeps_cache=True)),
        (Case("tp1", 11, group_size=4), Periods(5, keeps_cache=False)),
        (Case("tp2,pp2", 8, blocks=9, group_size=4), Periods(2, keeps_cache=True)),
    ],
    few=2,
)
def test_with_batches_in_flight_its_turn_decides_which_version_samples_a_token(
    directory: Path, alone: tuple[Response, ...], tmp_path: Path, case: Case, periods: Periods
) -> None:
    """Under weights that do not change the tokens are those of one batch at a time. A resumed run, and slots that are
    fewer than the rollouts, change nothing; every call is counted in one period."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    answers = [a for a in run_on_ranks(4, generate_in_periods, tmp_path, case, periods) if a]
    assert len(answers) == Layout.parse(case.layout).num_ranks
    assert answers[0][1] == sum(map(num_calls, alone))
    for responses, _ in answers:
        assert [one.tokens for one in responses] == [one.tokens for one in alone]
        assert [one.finish for one in responses] == [one.finish for one in alone]
        for response in responses:
            for turn, versions in enumerate(turn_versions(response)):
                period = response.step - periods.num_batches + turn * periods.num_batches // LIMITS.num_turns + 1
                assert versions == {max(0, period)}, (response.step, turn)
