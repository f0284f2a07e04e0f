"""Observed lengths, and a workload updated with them within its own maximum lengths."""

from __future__ import annotations

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.dynamic_sampling import MIN_ACCEPTANCE
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.workload import Workload


class ObservedLengths(Document):
    """Observed lengths of prompts and responses, turns, and shares of groups with non-zero reward variance."""

    prompt: LengthSpec = Field(description="prompt lengths in tokens")
    response: LengthSpec = Field(description="response lengths in tokens; with turns, of each")
    turns: ToolTurns | None = Field(default=None, description="turns of generation and a tool, in multi-turn rollouts")
    groups_with_signal: tuple[float, ...] = Field(
        default=(), description="share of groups in each step, if it was recorded"
    )


def workload_with_lengths(workload: Workload, observed: ObservedLengths) -> Workload:
    """Return the workload with the observed length distributions, truncated at its own maximum lengths.

    Its dynamic sampling gets the observed shares of groups. Raises BadInput if only one of workload and observation has
    multi-turn rollouts.
    """
    if workload.turns and not observed.turns:
        raise BadInput(
            "--from-trace has rollouts of one turn, and workload.turns of the job says that there are several; name "
            "fields that hold a list of each rollout's turns with --trace-field, or remove workload.turns."
        )
    if observed.turns and not workload.turns:
        raise BadInput(
            "--from-trace has rollouts of several turns, and the job has none; give it workload.turns, with their "
            "greatest lengths."
        )
    update: dict[str, object] = {
        "prompt": _with_max(observed.prompt, workload.prompt.max),
        "response": _with_max(observed.response, workload.response.max),
    }
    if workload.turns and observed.turns:
        turns = {
            "number": _with_max(observed.turns.number, workload.turns.number.max),
            "result": _with_max(observed.turns.result, workload.turns.result.max),
            "latency_seconds": observed.turns.latency_seconds,
        }
        update["turns"] = workload.turns.model_copy(update=turns)
    if workload.dynamic_sampling and observed.groups_with_signal:
        shares = tuple((max(MIN_ACCEPTANCE, share), 1.0) for share in observed.groups_with_signal)
        sampling = workload.dynamic_sampling.model_copy(update={"acceptance": None, "histogram": shares})
        update["dynamic_sampling"] = sampling
    return workload.model_copy(update=update)


def lengths_of_workload(workload: Workload) -> ObservedLengths:
    """Return the lengths of a workload in the form of observed ones."""
    return ObservedLengths(prompt=workload.prompt, response=workload.response, turns=workload.turns)


def _with_max(lengths: LengthSpec, longest: int) -> LengthSpec:
    """The lengths as a histogram with another maximum."""
    resolved = lengths.resolve()
    pairs = lengths.histogram or tuple(zip(resolved.tokens, resolved.probabilities, strict=True))
    return LengthSpec(max=longest, histogram=pairs)
