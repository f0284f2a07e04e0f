"""What a run that is resumed under another plan takes over of what was under way: prompts, and tokens drawn for them.

Keys, values, slots and scores belong to a plan; which prompts no update has used, and what was drawn for them, do not.
The prompts are dealt to batches again, in the order of their draws, so that each is trained on once whatever the old
plan had put off or taken ahead. A response that was begun goes on where the new plan would have allowed the policy that
began it, with keys and values of the present one; any other is drawn again, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.generation.in_flight_state import Drawing, Underway
from meshwright.runtime.generation.slots import Beginning, Finish, Partial, Response


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Over from another plan. `dealt_again` is by step and `begun` by draw."""

    dealt_again: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    begun: Mapping[int, Beginning] = field(default_factory=dict)
    num_drawn_again: int = 0
    """Responses that were begun and are drawn again."""
    num_dealt: int = 0
    """Prompts that waves were dealt, under whatever plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the responses under way, if there were any."""
        if not self.begun and not self.num_drawn_again:
            return ()
        return (
            f"{len(self.begun)} responses under way are carried over to this plan, and {self.num_drawn_again} are "
            "drawn again",
        )


def carry(
    found: Sequence[Underway], plan: Plan, done: int, batch_size: int, *, max_response: int, draws_again: bool
) -> Carried:
    """What a run under this plan takes over after `done` updates from what all ranks of another one had under way.

    With `draws_again` it takes over prompts and no tokens. Raises BadInput where prompts are missing.
    """
    drawings = [one.drawing for one in found if one.drawing]
    if plan.facts.workload.chooses:
        return Carried(num_dealt=_num_dealt(drawings))
    if not drawings:
        return Carried()
    dealt = _dealt(drawings, found[0].dealt_again, done, batch_size)
    steps = {draw: step for step, draws in dealt.items() for draw in draws}
    begun = {draw: one for draw, one in _all_begun(found, drawings) if steps.get(draw, -1) >= done}
    kept = {
        draw: one
        for draw, one in begun.items()
        if not draws_again and _is_young(plan, one, steps[draw]) and _fits(one, max_response)
    }
    natural = {step: tuple(range(step * batch_size, (step + 1) * batch_size)) for step in dealt}
    return Carried(
        dealt_again={step: draws for step, draws in dealt.items() if draws != natural[step]},
        begun=kept,
        num_drawn_again=len(begun) - len(kept),
    )


def _num_dealt(drawings: Sequence[Drawing]) -> int:
    """Prompts that waves were dealt, which replicas tell alike. Nothing is in flight between their steps."""
    if not drawings:
        raise BadInput(
            "the checkpoint does not tell how many prompts were dealt so far, for its underway-*.safetensors "
            "are missing; resume from a checkpoint that has them, or start a new run in another --out."
        )
    return drawings[0].num_dealt


def _dealt(
    drawings: Sequence[Drawing], before: Mapping[int, tuple[int, ...]], done: int, batch_size: int
) -> dict[int, tuple[int, ...]]:
    """By step, the draws of the batches behind `done` updates."""
    until = drawings[0].until
    left = sorted({draw for drawing in drawings for draw in _left(drawing, done)})
    if len(left) != (until - done) * batch_size:
        raise BadInput(
            f"the checkpoint has {len(left)} prompts for the batches of steps {done} to {until - 1} and they are "
            f"{(until - done) * batch_size}; resume under the plan of the run, in plan.json of its --out."
        )
    batches = (tuple(left[first : first + batch_size]) for first in range(0, len(left), batch_size))
    dealt = dict(zip(range(done, until), batches, strict=True))
    return {step: draws for step, draws in before.items() if step >= until} | dealt


def _left(drawing: Drawing, done: int) -> Iterator[int]:
    """The draws of a replica's prompts that none of the first `done` updates has used."""
    yield from drawing.left
    yield from (draw for step, rows in drawing.delivered.items() if step >= done for draw in rows.values())
    if flight := drawing.in_flight:
        yield from (one.prompt.draw for group in (*flight.live, flight.paused) for one in group)
        yield from (prompt.draw for prompt in flight.waiting)
        yield from (response.prompt.draw for response in flight.ended)


def _all_begun(found: Sequence[Underway], drawings: Sequence[Drawing]) -> Iterator[tuple[int, Beginning]]:
    """By draw, what has been drawn for a prompt, delivered or not; ranks of a replica tell the same."""
    rows = {
        (step, row): draw for drawing in drawings for step, of in drawing.delivered.items() for row, draw in of.items()
    }
    for underway in found:
        yield from _delivered(underway, rows)
    for drawing in drawings:
        yield from drawing.begun.items()
        if drawing.in_flight:
            flight = drawing.in_flight
            yield from _in_flight(one for group in (*flight.live, flight.paused, flight.ended) for one in group)


def _in_flight(sequences: Iterable[Partial]) -> Iterator[tuple[int, Beginning]]:
    for one in sequences:
        yield (
            one.prompt.draw,
            Beginning(
                tokens=one.tokens,
                logprobs=one.logprobs,
                versions=one.versions,
                finish=one.finish if isinstance(one, Response) else None,
            ),
        )


def _delivered(underway: Underway, rows: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, Beginning]]:
    """Of a batch that no update has used: fields have a value per token one position before its own."""
    for step, fields in underway.experience.items():
        for row in fields.get("behaviour_logprobs", ()):
            if (step, row) not in rows:
                continue
            first = int(fields["prompt_lengths"][row])
            yield (
                rows[step, row],
                Beginning(
                    tokens=tuple(fields["tokens"][row][first:].tolist()),
                    logprobs=tuple(fields["behaviour_logprobs"][row][first - 1 : -1].tolist()),
                    versions=tuple(fields["versions"][row][first - 1 : -1].tolist()),
                    finish=Finish.LENGTH if fields["truncated"][row] else Finish.EOS,
                ),
            )


def _is_young(plan: Plan, begun: Beginning, step: int) -> bool:
    """Whether the plan could have begun it for the batch of `step`. One that defers delivers it later than that, by as
    much as the bound leaves to a sequence that begins with the batch."""
    placement = plan.placement(GENERATE)
    allowed = placement.steps_ahead if placement.schedule.overcommit else plan.staleness
    return step - begun.versions[0] <= allowed


def _fits(begun: Beginning, max_response: int) -> bool:
    """Whether it is no longer than a response may be, and has a token to go if it goes on."""
    return len(begun.tokens) <= max_response - (begun.finish is None)
