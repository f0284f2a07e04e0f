"""The program of a period with dynamic sampling or best-of-n: instructions that are repeated for every wave of prompts.

A simulation and a rehearsal give generation and the reward model the time of all waves at once, and execute the program
as `lower` makes it. Real ranks do not know the number of waves: they sample one, score it, exchange the scores, and
sample the next one if groups with unequal scores are missing. All of that takes the place of generation; the kept
groups are then sent to other stages. With best-of-n there is one wave of all prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost_models.waves import processes_all_samples
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.program import Instruction, Program, Receive, RunStage, Send, Waves, output_owners
from meshwright.profiles.stages import GENERATE, RESPONSE_LENGTHS, SEQUENCE_DIGESTS, Role

_RESPONSE_FIELDS = ("truncated", RESPONSE_LENGTHS, SEQUENCE_DIGESTS)
"""Fields of the responses that the reward of a sample depends on, besides its score."""


def split_waves(program: Program, plan: Plan) -> Program:
    """Return the program with its waves split off; the same program if a step trains on all of its samples."""
    if not plan.facts.workload.selects_samples:
        return program
    repeated = [instruction for instruction in program.instructions if _is_repeated(instruction, plan)]
    ranks = tuple(sorted({rank for one in repeated if isinstance(one, RunStage) for rank in one.ranks}))
    first = program.instructions.index(repeated[0])
    return replace(
        program,
        instructions=tuple(one for one in program.instructions if one not in repeated),
        waves=Waves((*repeated, *_score_exchange(plan, ranks)), first),
    )


def _is_repeated(instruction: Instruction, plan: Plan) -> bool:
    """Return True if the instruction samples, scores, or transfers samples to be scored."""
    match instruction:
        case RunStage(stage=stage):
            return processes_all_samples(plan.stage(stage))
        case Send(producer=producer, consumer=consumer) | Receive(producer=producer, consumer=consumer):
            return producer == GENERATE and processes_all_samples(plan.stage(consumer))
        case _:
            return False


def _score_exchange(plan: Plan, ranks: tuple[int, ...]) -> Iterator[Instruction]:
    """Yield the sends and receives that give all ranks of the waves everything that decides the samples' rewards."""
    responses = (GENERATE, _RESPONSE_FIELDS)
    scored = [(stage.name, stage.writes) for stage in plan.graph.stages if stage.role is Role.REWARD]
    for name, fields in (responses, *scored, *((host.name, host.writes) for host in plan.graph.host_stages)):
        owner_ranks = output_owners(plan, name)
        yield Send(producer=name, consumer=GENERATE, fields=fields, ranks=owner_ranks, targets=ranks)
        yield Receive(producer=name, consumer=GENERATE, fields=fields, ranks=ranks, owners=owner_ranks)
