"""Lengths that sequences were seen to have, for a workload that keeps its own greatest lengths."""

from __future__ import annotations

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.dynamic_sampling import LEAST_ACCEPTANCE
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload


class SeenLengths(Document):
    """How long prompts and responses were, how many turns a rollout had, and how many groups had a signal."""

    prompt: LengthSpec = Field(description="prompt lengths in tokens")
    response: LengthSpec = Field(description="response lengths in tokens; with turns, of each")
    turns: ToolTurns | None = Field(default=None, description="of generation and a tool, where a rollout had several")
    groups_with_signal: tuple[float, ...] = Field(default=(), description="share of a step's groups, where it is told")


def with_lengths(workload: Workload, seen: SeenLengths) -> Workload:
    """The workload with lengths as likely as they were seen; longer ones than its own greatest are cut there. Its
    dynamic sampling keeps as many groups as had a signal.

    Raises BadInput where one of both has rollouts of several turns and the other has not.
    """
    if workload.turns and not seen.turns:
        raise BadInput(
            "--from-trace has rollouts of one turn, and workload.turns of the job says that there are several; name "
            "fields that hold a list of each rollout's turns with --trace-field, or remove workload.turns."
        )
    if seen.turns and not workload.turns:
        raise BadInput(
            "--from-trace has rollouts of several turns, and the job has none; give it workload.turns, with their "
            "greatest lengths."
        )
    update: dict[str, object] = {
        "prompt": _cut(seen.prompt, workload.prompt.max),
        "response": _cut(seen.response, workload.response.max),
    }
    if workload.turns and seen.turns:
        turns = {
            "number": _cut(seen.turns.number, workload.turns.number.max),
            "result": _cut(seen.turns.result, workload.turns.result.max),
            "latency_seconds": seen.turns.latency_seconds,
        }
        update["turns"] = workload.turns.model_copy(update=turns)
    if workload.dynamic_sampling and seen.groups_with_signal:
        shares = tuple((max(LEAST_ACCEPTANCE, share), 1.0) for share in seen.groups_with_signal)
        sampling = workload.dynamic_sampling.model_copy(update={"acceptance": None, "histogram": shares})
        update["dynamic_sampling"] = sampling
    return workload.model_copy(update=update)


def as_seen(workload: Workload) -> SeenLengths:
    """The lengths that a workload expects."""
    return SeenLengths(prompt=workload.prompt, response=workload.response, turns=workload.turns)


def _cut(lengths: LengthSpec, longest: int) -> LengthSpec:
    """The lengths as a histogram, and another greatest one."""
    resolved = lengths.resolve()
    pairs = lengths.histogram or tuple(zip(resolved.tokens, resolved.probabilities, strict=True))
    return LengthSpec(max=longest, histogram=pairs)
