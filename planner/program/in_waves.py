"""The program of a turn whose batch is chosen from what is drawn: what is repeated for every wave of prompts.

A simulation and a rehearsal give generation and the reward model the time of all waves at once, and follow the program
as `lower` makes it. Ranks that compute do not know how many waves there will be: they draw one, score it, tell each
other the scores, and draw the next one if groups with a signal are missing. All of that comes where generation stood;
what generation hands to other stages follows, of the groups that are kept. Where the best samples of each prompt are
kept there is one wave, of all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost_models.waves import sees_waves
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Instruction, Program, Receive, RunStage, Send, Waves, owners
from meshwright.profiles.stages import GENERATE, RESPONSE_LENGTHS, SEQUENCE_DIGESTS, Role

_OF_RESPONSES = ("truncated", RESPONSE_LENGTHS, SEQUENCE_DIGESTS)
"""What is paid for a score depends on these."""


def in_waves(program: Program, plan: Plan) -> Program:
    """What ranks follow of the whole program of a plan: the same where a step trains on all that it draws."""
    if not plan.facts.workload.chooses:
        return program
    repeated = [instruction for instruction in program.instructions if _is_repeated(instruction, plan)]
    ranks = tuple(sorted({rank for one in repeated if isinstance(one, RunStage) for rank in one.ranks}))
    first = program.instructions.index(repeated[0])
    return replace(
        program,
        instructions=tuple(one for one in program.instructions if one not in repeated),
        waves=Waves((*repeated, *_told_scores(plan, ranks)), first),
    )


def _is_repeated(instruction: Instruction, plan: Plan) -> bool:
    """Whether it draws, scores, or gives the one to the other."""
    match instruction:
        case RunStage(stage=stage):
            return sees_waves(plan.stage(stage))
        case Send(producer=producer, consumer=consumer) | Receive(producer=producer, consumer=consumer):
            return producer == GENERATE and sees_waves(plan.stage(consumer))
        case _:
            return False


def _told_scores(plan: Plan, ranks: tuple[int, ...]) -> Iterator[Instruction]:
    """All that decides what the samples of a wave are paid goes to all ranks that see waves."""
    drawn = (GENERATE, _OF_RESPONSES)
    scored = [(stage.name, stage.writes) for stage in plan.graph.stages if stage.role is Role.REWARD]
    for name, fields in (drawn, *scored, *((host.name, host.writes) for host in plan.graph.hosted)):
        ends = owners(plan, name)
        yield Send(producer=name, consumer=GENERATE, fields=fields, ranks=ends, targets=ranks)
        yield Receive(producer=name, consumer=GENERATE, fields=fields, ranks=ranks, owners=ends)
