"""Resuming under another plan: the prompts in flight, and the tokens sampled for them, are taken over by the new plan.

Keys, values, slots and scores belong to a plan; which prompts no update has used, and what was sampled for them, do
not. The prompts are assigned to batches again, in the order of their sample ids, so that each is trained on once
whatever the old plan had deferred or admitted early. A partial response is continued if the new plan would have allowed
the policy version that started it, with keys and values of the current version; any other, and any rollout between
two turns, is sampled again, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.inference.in_flight import GenerationState, InFlightState
from meshwright.runtime.inference.slots import Finish, PartialResponse, Response, ResumedSample
from meshwright.runtime.messages.sampling_masks import kept_sets


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The prompts and samples taken over from another plan.

    `reassigned` has, by step, the sample ids of each batch that is not the original one; `samples` is by sample id.
    """

    reassigned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    samples: Mapping[int, ResumedSample] = field(default_factory=dict)
    num_resampled: int = 0
    """Responses that were started and are sampled again."""
    num_wave_prompts: int = 0
    """Prompts that the waves of dynamic sampling have used, under any plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on what became of the responses in flight; none if there were none."""
        if not self.samples and not self.num_resampled:
            return ()
        return (
            f"{len(self.samples)} responses in flight are continued under this plan, and {self.num_resampled} are "
            "sampled again",
        )


def resume_under_new_plan(
    states: Sequence[InFlightState],
    plan: Plan,
    num_updates: int,
    batch_size: int,
    *,
    max_response: int,
    resamples: bool,
) -> Resumed:
    """Return what a run under this plan takes over after `num_updates` updates, from what was in flight on all ranks
    under another plan.

    With `resamples` it takes over prompts and no tokens. Raises BadInput if prompts are missing.
    """
    generations = [state.generation for state in states if state.generation]
    if plan.facts.workload.selects_samples:
        return _resume_waves(states, generations, num_updates)
    if not generations:
        return Resumed()
    batches = _assign_batches(generations, states[0].reassigned, num_updates, batch_size)
    steps = {sample_id: step for step, sample_ids in batches.items() for sample_id in sample_ids}
    started = {
        sample_id: response
        for sample_id, response in _all_sampled(states, generations)
        if steps.get(sample_id, -1) >= num_updates
    }
    resumed = {
        sample_id: response
        for sample_id, response in started.items()
        if not resamples and _is_within_staleness(plan, response, steps[sample_id]) and _fits(response, max_response)
        # Which turn an unfinished rollout is in does not follow from its tokens.
        if response.finish or not plan.facts.workload.turns
    }
    original = {step: tuple(range(step * batch_size, (step + 1) * batch_size)) for step in batches}
    return Resumed(
        reassigned={step: sample_ids for step, sample_ids in batches.items() if sample_ids != original[step]},
        samples=resumed,
        num_resampled=len(started) - len(resumed),
    )


def _resume_waves(states: Sequence[InFlightState], generations: Sequence[GenerationState], done: int) -> Resumed:
    """Return what a run with waves resumes from: the number of prompts used, which all replicas record.

    No sequence of a wave is in flight between two periods. The prompts of batches that were sampled and not trained on
    are sampled again, so the count is that before the first of these.
    """
    if not generations:
        raise BadInput(
            "the checkpoint does not record how many prompts were used so far, as its in_flight-*.safetensors "
            "are missing; resume from a checkpoint that has them, or start a new run in another --out."
        )
    sampled = {step: count for step, count in generations[0].wave_prompts_before.items() if step >= done}
    rows = {
        (step, row) for state in states for step, fields in state.experience.items() for row in fields.get("tokens", ())
    }
    return Resumed(
        num_wave_prompts=min(sampled.values(), default=generations[0].num_wave_prompts),
        num_resampled=len([step for step, _ in rows if step in sampled]),
    )


def _assign_batches(
    generations: Sequence[GenerationState], reassigned: Mapping[int, tuple[int, ...]], done: int, batch_size: int
) -> dict[int, tuple[int, ...]]:
    """Return, by step, the sample ids of the batches after `done` updates."""
    end_step = generations[0].end_step
    unused = sorted({sample_id for generation in generations for sample_id in _unused_sample_ids(generation, done)})
    if len(unused) != (end_step - done) * batch_size:
        raise BadInput(
            f"the checkpoint has {len(unused)} prompts for the batches of steps {done} to {end_step - 1}, which take "
            f"{(end_step - done) * batch_size}; resume under the plan of the run, in plan.json of its --out."
        )
    batches = (tuple(unused[first : first + batch_size]) for first in range(0, len(unused), batch_size))
    assigned = dict(zip(range(done, end_step), batches, strict=True))
    return {step: sample_ids for step, sample_ids in reassigned.items() if step >= end_step} | assigned


def _unused_sample_ids(generation: GenerationState, done: int) -> Iterator[int]:
    """Yield the sample ids of a replica's prompts that none of the first `done` updates has used."""
    yield from generation.unadmitted
    yield from (sample_id for step, rows in generation.delivered.items() if step >= done for sample_id in rows.values())
    if flight := generation.in_flight:
        yield from (one.prompt.sample_id for group in (*flight.live, flight.paused) for one in group)
        yield from (prompt.sample_id for prompt in flight.waiting)
        yield from (response.prompt.sample_id for response in flight.ended)


def _all_sampled(
    states: Sequence[InFlightState], generations: Sequence[GenerationState]
) -> Iterator[tuple[int, ResumedSample]]:
    """Yield sample ids with what has been sampled for the prompt, delivered or not; equal on all ranks of a replica."""
    rows = {
        (step, row): sample_id
        for generation in generations
        for step, sample_ids in generation.delivered.items()
        for row, sample_id in sample_ids.items()
    }
    for state in states:
        yield from _delivered_samples(state, rows)
    for generation in generations:
        yield from generation.resumed.items()
        if generation.in_flight:
            flight = generation.in_flight
            yield from _in_flight_samples(one for group in (*flight.live, flight.paused, flight.ended) for one in group)


def _in_flight_samples(sequences: Iterable[PartialResponse]) -> Iterator[tuple[int, ResumedSample]]:
    for sequence in sequences:
        yield (
            sequence.prompt.sample_id,
            ResumedSample(
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                versions=sequence.versions,
                kept=sequence.kept,
                finish=sequence.finish if isinstance(sequence, Response) else None,
            ),
        )


def _delivered_samples(
    state: InFlightState, rows: Mapping[tuple[int, int], int]
) -> Iterator[tuple[int, ResumedSample]]:
    """Yield the responses of batches that no update has used.

    Per-token values are at the position that predicts the token, which is one before it.
    """
    for step, fields in state.experience.items():
        for row in fields.get("behaviour_logprobs", ()):
            if (step, row) not in rows:
                continue
            first = int(fields["prompt_lengths"][row])
            yield (
                rows[step, row],
                ResumedSample(
                    tokens=tuple(fields["tokens"][row][first:].tolist()),
                    logprobs=tuple(fields["behaviour_logprobs"][row][first - 1 : -1].tolist()),
                    versions=tuple(fields["versions"][row][first - 1 : -1].tolist()),
                    kept=tuple(kept_sets(fields, row)[first - 1 : -1]),
                    finish=Finish.LENGTH if fields["truncated"][row] else Finish.EOS,
                ),
            )


def _is_within_staleness(plan: Plan, response: ResumedSample, step: int) -> bool:
    """True if the plan could have started the response for the batch of `step`.

    A plan that overcommits may deliver a response after the step of its batch, and needs the rest of the staleness
    bound for that; so the response may be at most `steps_ahead` versions old.
    """
    placement = plan.placement(GENERATE)
    allowed = placement.steps_ahead if placement.schedule.overcommit else plan.staleness
    return step - response.versions[0] <= allowed


def _fits(response: ResumedSample, max_response: int) -> bool:
    """True if the response is within the length limit, and below the limit if it has not ended."""
    return len(response.tokens) <= max_response - (response.finish is None)
