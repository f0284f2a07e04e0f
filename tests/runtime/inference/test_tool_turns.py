"""Turns: what a rollout draws depends neither on when its tool answers, nor on what becomes of it while it waits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from meshwright.planner.job.rewards_and_tools import Tool
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.environment.samples import ToolCall
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Finish, Prompt, Response
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.inference.tool_turns import RolloutTurn, ToolTurns, TurnLimits
from meshwright.runtime.model.mesh import build_mesh
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
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    taking = turn_taking(mesh, "last_letters", keeps_cache)
    generator = Generator(
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
    responses = generator.generate(PROMPTS)
    if taking._tools:
        assert taking.num_calls == sum(map(num_calls, responses))
        taking._tools.close()
    return responses


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
