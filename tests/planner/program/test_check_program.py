"""The check of a program: what compiled passes, and each planted fault is named in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.planner.program.check_program import check_program, require_sound
from meshwright.planner.program.program import Instruction, MoveWeights, Program, Receive, RunStage, Send, Stream, lower
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from tests.planner.plans import long_facts, random_plan
from tests.seeds import seeds


@pytest.fixture
def program() -> Program:
    """Two stages on four ranks: ranks 2 and 3 own the responses, ranks 0 and 1 score them."""
    handover = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens", "behaviour_logprobs")}
    return Program(
        (
            MoveWeights(source="actor_train", target="actor_generate", ranks=(0, 1, 2, 3)),
            RunStage(stage="actor_generate", ranks=(0, 1, 2, 3)),
            Send(**handover, ranks=(2, 3), targets=(0, 1)),
            Receive(**handover, ranks=(0, 1), owners=(2, 3)),
            RunStage(stage="reward_score", ranks=(0, 1)),
        )
    )


def edited(program: Program, edit: Callable[[Instruction], Instruction | None]) -> Program:
    """The program with each instruction replaced, or left out for None."""
    return Program(tuple(kept for kept in map(edit, program.instructions) if kept is not None))


@seeds(4, all=40)
def test_the_program_of_any_legal_plan_is_sound(seed: int) -> None:
    plan = random_plan(seed)
    assert check_program(lower(plan), PPO_GRAPH) == ()
    assert check_program(lower(plan, ("actor_generate", "reward_score")), PPO_GRAPH) == ()


def test_a_receive_without_its_send_is_named(program: Program) -> None:
    broken = edited(program, lambda i: None if isinstance(i, Send) else i)
    assert "'receive actor_generate -> reward_score' has no send; its ranks would wait for ever." in check_program(
        broken, PPO_GRAPH
    )


def test_a_send_without_its_receive_is_named(program: Program) -> None:
    broken = edited(program, lambda i: None if isinstance(i, Receive) else i)
    found = check_program(broken, PPO_GRAPH)
    assert "'send actor_generate -> reward_score' has no receive; what it sends would wait for ever." in found
    assert "reward_score reads tokens of actor_generate, which has not reached ranks 0, 1." in found


def test_a_receive_that_expects_another_owner_is_named(program: Program) -> None:
    def edit(i: Instruction) -> Instruction:
        return replace(i, owners=(0, 3)) if isinstance(i, Receive) else i

    assert check_program(edited(program, edit), PPO_GRAPH)[0] == (
        "'send actor_generate -> reward_score' is sent by ranks 2, 3 and expected from ranks 0, 3."
    )


def test_a_field_that_is_not_sent_is_named(program: Program) -> None:
    def edit(i: Instruction) -> Instruction:
        return replace(i, fields=("behaviour_logprobs",)) if isinstance(i, Send | Receive) else i

    assert check_program(edited(program, edit), PPO_GRAPH) == (
        "reward_score reads tokens of actor_generate, which has not reached ranks 0, 1.",
    )


def test_a_stage_that_runs_before_its_input_is_named(program: Program) -> None:
    *rest, score = program.instructions
    found = check_program(Program((score, *rest)), PPO_GRAPH)
    assert "reward_score reads tokens of actor_generate, which has not reached ranks 0, 1." in found


def test_a_refit_after_its_stage_is_named(program: Program) -> None:
    move, *rest = program.instructions
    assert check_program(Program((*rest, move)), PPO_GRAPH) == (
        "'refit actor_train -> actor_generate' comes after actor_generate in the order; put it before.",
    )


def test_a_refit_that_leaves_out_a_rank_is_named(program: Program) -> None:
    broken = edited(program, lambda i: replace(i, ranks=i.ranks[:-1]) if isinstance(i, MoveWeights) else i)
    assert any("leaves out rank 3, where" in said for said in check_program(broken, PPO_GRAPH))


def test_an_unsound_program_is_refused(program: Program) -> None:
    broken = edited(program, lambda i: None if isinstance(i, Send) else i)
    with pytest.raises(BadInput, match=r"program: 'receive actor_generate -> reward_score' has no send"):
        require_sound(broken, PPO_GRAPH)


@pytest.fixture
def streaming() -> Program:
    """Ranks 0 and 1 own the responses, ranks 2 and 3 score them chunk by chunk and receive them whole afterwards."""
    handover = {"producer": "actor_generate", "consumer": "reward_score", "fields": ("tokens",)}
    return Program(
        (
            RunStage(stage="actor_generate", ranks=(0, 1)),
            Send(**handover, ranks=(0, 1), targets=(2, 3)),
            RunStage(stage="reward_score", ranks=(2, 3)),
            Receive(**handover, ranks=(2, 3), owners=(0, 1)),
        ),
        (Stream(producer="actor_generate", consumer="reward_score", chunk_tokens=128, owners=(0, 1), targets=(2, 3)),),
    )


def with_stream(program: Program, **fields: object) -> tuple[str, ...]:
    """The faults of the program when its stream has these fields instead."""
    return check_program(replace(program, streams=(replace(program.streams[0], **fields),)), PPO_GRAPH)


@seeds(4, all=40)
def test_the_program_of_any_plan_that_streams_is_sound_and_so_is_that_of_one_step(seed: int) -> None:
    program = lower(random_plan(seed, long_facts()))
    assert check_program(program, PPO_GRAPH) == ()
    assert check_program(program.synchronous(), PPO_GRAPH) == ()
    assert not program.synchronous().streams


def test_random_plans_stream_often() -> None:
    assert sum(bool(lower(random_plan(seed, long_facts())).streams) for seed in range(40)) > 20


def test_a_stage_has_what_streams_to_it(streaming: Program) -> None:
    assert check_program(streaming, PPO_GRAPH) == ()
    assert check_program(replace(streaming, streams=()), PPO_GRAPH) == (
        "reward_score reads tokens of actor_generate, which has not reached ranks 2, 3.",
    )


def test_a_stream_without_its_stage_is_named(streaming: Program) -> None:
    found = with_stream(streaming, consumer="ref_logprob")
    assert "the stream actor_generate -> ref_logprob has no ref_logprob in the program; leave it out." in found


def test_a_second_stream_to_a_stage_is_named(streaming: Program) -> None:
    found = check_program(replace(streaming, streams=streaming.streams * 2), PPO_GRAPH)
    assert found == ("the stream actor_generate -> reward_score is not the only one to reward_score; a stage has one.",)


def test_a_stream_that_misses_ranks_of_its_stage_is_named(streaming: Program) -> None:
    found = with_stream(streaming, targets=(2,))
    assert "the stream actor_generate -> reward_score goes to rank 2 and reward_score runs on ranks 2, 3." in found
    assert "reward_score reads tokens of actor_generate, which has not reached rank 3." in found


def test_a_stream_from_other_ranks_than_the_owners_is_named(streaming: Program) -> None:
    name = "the stream actor_generate -> reward_score"
    assert with_stream(streaming, owners=(0,)) == (
        f"{name} comes from rank 0 and 'send actor_generate -> reward_score' from ranks 0, 1.",
    )
    assert f"{name} comes from rank 2, where actor_generate does not run." in with_stream(streaming, owners=(0, 1, 2))


def test_a_stream_between_turns_is_named(streaming: Program) -> None:
    ahead = edited_in_place(streaming, lambda i: i.name in ("actor_generate", "send actor_generate -> reward_score"))
    assert check_program(ahead, PPO_GRAPH)[0] == (
        "the stream actor_generate -> reward_score goes from steps_ahead=1 to steps_ahead=0; "
        "a stage streams within its own period: use 1."
    )


def edited_in_place(program: Program, ahead: Callable[[Instruction], bool]) -> Program:
    """The program with some instructions one step ahead."""
    return replace(
        program, instructions=tuple(replace(i, steps_ahead=1) if ahead(i) else i for i in program.instructions)
    )
