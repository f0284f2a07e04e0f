"""The workload of a step: number and lengths of sequences, sampling, minibatches and epochs.

A workload can be updated with observed lengths, within its own maximum lengths.
"""

from __future__ import annotations

from functools import cached_property
from typing import Self

from pydantic import Field, model_validator

from meshwright.profiles.documents import Document
from meshwright.profiles.environment.dynamic_sampling import MIN_ACCEPTANCE, DynamicSampling
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.kv_cache_size import Arrivals, CacheNeed, LiveTokens
from meshwright.profiles.lengths import Histogram, LengthSpec
from meshwright.profiles.packing import rows_per_prompt
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.speculation import NO_DRAFTS, DraftRound, Speculation

_IMAGES = "images of the prompts, for models that read them; prompt lengths include the tokens of images"
_KEPT_TOKENS = (
    "size limit of the set of tokens that top_k and top_p leave for a position, which is kept with each sample; all "
    "log-probabilities are then those of the distribution over the set (keep sampling mask); 0 keeps none"
)
MAX_KEPT_TOKENS = 1024
"""Largest size of a set of tokens that is kept for a position."""
_BEST_OF = "samples of each prompt that are generated and scored, of which the best group_size are trained on"


class Images(Document):
    """Images of a prompt: their number, and the tokens that the image encoder makes of each of them."""

    number: LengthSpec = Field(description="images of each prompt; its lengths are numbers of images")
    tokens: LengthSpec = Field(description="tokens of each image, after neighbouring patches are merged")

    @cached_property
    def mean_number(self) -> float:
        """Mean number of images of a prompt."""
        return self.number.resolve().mean

    @cached_property
    def token_counts(self) -> Histogram:
        """Distribution of the tokens of an image."""
        return self.tokens.resolve()

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of all images of a prompt."""
        return self.number.max * self.tokens.max

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of all images of a prompt."""
        return self.mean_number * self.token_counts.mean


class Workload(Document):
    """One step: `batch_size` sequences, `group_size` of them for each prompt, `num_minibatches` updates per epoch."""

    batch_size: int = Field(gt=0, description="sequences per step")
    group_size: int = Field(default=1, gt=0, description="sequences of each prompt: the samples of a group")
    best_of: int | None = Field(default=None, gt=1, description=_BEST_OF)
    prompt: LengthSpec = Field(description="prompt lengths in tokens")
    response: LengthSpec = Field(
        description="response lengths in tokens, the end token included; with turns, of one turn"
    )
    images: Images | None = Field(default=None, description=_IMAGES)
    turns: ToolTurns | None = Field(
        default=None, description="turns of generation and of a tool, where a rollout has several"
    )
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="prompts are sampled until enough groups have non-zero reward variance (DAPO)"
    )
    speculation: Speculation | None = Field(
        default=None, description="acceptance of drafted tokens; without it no plan decodes speculatively"
    )
    kept_tokens: int = Field(default=0, ge=0, le=MAX_KEPT_TOKENS, description=_KEPT_TOKENS)
    num_minibatches: int = Field(default=1, gt=0, description="optimizer updates per pass over the batch")
    num_epochs: int = Field(default=1, gt=0, description="passes over the batch per step")

    @model_validator(mode="after")
    def _has_complete_groups(self) -> Self:
        if self.batch_size % self.group_size:
            fewer = self.batch_size // self.group_size * self.group_size
            nearest = f"{fewer} or {fewer + self.group_size}" if fewer else f"{self.group_size}"
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of group_size={self.group_size}, the sequences of a "
                f"prompt; use {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _prompts_hold_their_images(self) -> Self:
        if not self.images:
            return self
        tokens, longest, mean = self.images.mean_tokens, self.images.tokens.max, self.prompt_lengths.mean
        if tokens > mean or longest > self.prompt.max:
            raise ValueError(
                f"images have {tokens:.0f} tokens a prompt on average and {longest} at most each, and prompts, which "
                f"include them, have {mean:.0f} and {self.prompt.max}; give longer prompts, or fewer or smaller images"
            )
        return self

    @model_validator(mode="after")
    def _turns_hold_a_response(self) -> Self:
        if self.turns and self.turns.max_tokens < self.response.max:
            raise ValueError(
                f"turns.max_tokens={self.turns.max_tokens} is less than response.max={self.response.max}, the most "
                "that one turn samples; raise it"
            )
        return self

    @model_validator(mode="after")
    def _samples_groups(self) -> Self:
        if not self.dynamic_sampling:
            return self
        if self.group_size == 1:
            raise ValueError(
                "dynamic_sampling keeps groups whose samples are scored differently, and group_size=1 has none; use "
                "2 or more"
            )
        factor = round(1 / MIN_ACCEPTANCE)
        of_wave, largest = self.dynamic_sampling.num_prompts, factor * self.num_prompts
        if of_wave and of_wave > largest:
            raise ValueError(
                f"dynamic_sampling.num_prompts={of_wave} is more than {factor} times the {self.num_prompts} prompts of "
                f"a batch, the most that a step samples; use {largest} or fewer"
            )
        return self

    @model_validator(mode="after")
    def _samples_more_than_it_keeps(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of <= self.group_size:
            raise ValueError(
                f"best_of={self.best_of} is not above group_size={self.group_size}, the samples of a prompt that are "
                "trained on; sample more of them, or remove best_of"
            )
        return self

    @property
    def selects_samples(self) -> bool:
        """True if a step trains on a subset of its samples, selected by their scores."""
        return self.dynamic_sampling is not None or self.best_of is not None

    @property
    def candidates(self) -> Workload:
        """The workload before selection by `best_of`: all samples of as many prompts as the batch has."""
        if self.best_of is None:
            return self
        update = {"batch_size": self.num_prompts * self.best_of, "group_size": self.best_of}
        return self.model_copy(update={**update, "best_of": None, "num_minibatches": 1})

    @property
    def wave(self) -> Workload:
        """The workload that is generated at once: all candidates, or with dynamic sampling those of one wave of
        prompts."""
        candidates = self.candidates
        if not self.dynamic_sampling:
            return candidates
        num_samples = self.dynamic_sampling.wave_size(self.num_prompts) * candidates.group_size
        return candidates.model_copy(update={"batch_size": num_samples, "dynamic_sampling": None, "num_minibatches": 1})

    def draft_round(self, draft_tokens: int) -> DraftRound:
        """Return what a sequence samples and verifies in a decode round with drafts of `draft_tokens` tokens."""
        if not (draft_tokens and self.speculation):
            return NO_DRAFTS
        return self.speculation.round_of(draft_tokens)

    @property
    def num_prompts(self) -> int:
        """Number of prompts of a step, each with a group of sequences."""
        return self.batch_size // self.group_size

    @cached_property
    def prompt_lengths(self) -> Histogram:
        return self.prompt.resolve()

    @cached_property
    def response_lengths(self) -> Histogram:
        """Lengths of all that follows a prompt: sampled tokens and, in multi-turn rollouts, tool tokens."""
        return self.turns.lengths(self.response) if self.turns else self.response.resolve()

    @cached_property
    def sampled_lengths(self) -> Histogram:
        """Number of sampled tokens of a response, over all turns."""
        return self.turns.sampled(self.response) if self.turns else self.response_lengths

    @property
    def max_response(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.turns.max_tokens if self.turns else self.response.max

    @cached_property
    def sequence_lengths(self) -> Histogram:
        """Lengths of prompt and response together, where the two are assumed independent."""
        return self.prompt_lengths.plus(self.response_lengths)

    @cached_property
    def live_tokens(self) -> LiveTokens:
        """Model of the tokens that sequences in flight hold in the KV cache."""
        return LiveTokens(self.prompt_lengths, self.response_lengths, self.max_tokens)

    def cache_need(self, schedule: Schedule, dp: int) -> CacheNeed:
        """Size of the KV cache that each of `dp` replicas needs under the schedule."""
        rows = -(-self.batch_size // dp)
        in_flight = schedule.batches_in_flight * rows - (-schedule.overcommit // dp)
        return self.live_tokens.need(
            min(schedule.generation_slots, in_flight),
            in_flight,
            num_rows=rows,
            arrivals=_arrivals(schedule, dp),
            rows_per_prompt=rows_per_prompt(self.batch_size, self.group_size, dp),
        )

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.prompt.max + self.max_response

    @property
    def mean_tokens(self) -> float:
        """Mean length of prompt and response together."""
        return self.prompt_lengths.mean + self.response_lengths.mean


def _arrivals(schedule: Schedule, dp: int) -> Arrivals:
    """How batches arrive at a replica; a single replica need not keep an even pace (`planner.simulation.pacing`)."""
    if not schedule.keeps_in_flight:
        return Arrivals.NEVER
    if schedule.overcommit:
        return Arrivals.FIRST_ENDED
    return Arrivals.EVENLY if dp > 1 else Arrivals.IN_ORDER


class ObservedLengths(Document):
    """Observed lengths of prompts and responses, turns, shares of groups with a signal, and acceptance of drafts."""

    prompt: LengthSpec = Field(description="prompt lengths in tokens")
    response: LengthSpec = Field(description="response lengths in tokens; with turns, of one turn")
    turns: ToolTurns | None = Field(default=None, description="turns of generation and a tool, in multi-turn rollouts")
    groups_with_signal: tuple[float, ...] = Field(
        default=(), description="share of groups with non-zero reward variance in each step, if it was recorded"
    )
    speculation: Speculation | None = Field(
        default=None, description="acceptance of drafted tokens, if it was recorded"
    )


def workload_with_lengths(workload: Workload, observed: ObservedLengths) -> Workload:
    """Return the workload with the observed length distributions, truncated at its own maximum lengths.

    Its dynamic sampling gets the observed shares of groups, its speculation the observed acceptance. Raises BadInput if
    only one of workload and observation has multi-turn rollouts.
    """
    if workload.turns and not observed.turns:
        raise BadInput(
            "--from-trace has rollouts of one turn, and workload.turns of the job says that there are several; name "
            "fields that hold a list of each rollout's turns with --trace-field, or remove workload.turns."
        )
    if observed.turns and not workload.turns:
        raise BadInput(
            "--from-trace has multi-turn rollouts, and the job has no workload.turns; add it, with their maximum "
            "lengths."
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
    if workload.speculation and observed.speculation:
        update["speculation"] = workload.speculation.updated(observed.speculation)
    return workload.model_copy(update=update)


def lengths_of_workload(workload: Workload) -> ObservedLengths:
    """Return the lengths of a workload, and the acceptance of its drafts, in the form of observed ones."""
    return ObservedLengths(
        prompt=workload.prompt, response=workload.response, turns=workload.turns, speculation=workload.speculation
    )


def _with_max(lengths: LengthSpec, longest: int) -> LengthSpec:
    """The lengths as a histogram with another maximum."""
    resolved = lengths.resolve()
    pairs = lengths.histogram or tuple(zip(resolved.tokens, resolved.probabilities, strict=True))
    return LengthSpec(max=longest, histogram=pairs)
