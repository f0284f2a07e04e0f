"""A run without a critic beside its reference: what each step computed, and what each update said."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.runtime.execution.request import RunRequest
from tests.reference.critic_free import Compared, CriticFreeReference, CriticFreeSettings
from tests.reference.low_rank import AdaptedReference
from tests.reference.ppo import Row, picked
from tests.runtime.observed import Observed
from tests.runtime.refereed import END_TOKENS, Distances, drawn_in


def are_groups(drawn: Sequence[Row], group_size: int) -> None:
    """The rows of a group have one prompt, and draws of their own."""
    prompts = [tuple(row.ids[: row.num_prompt].tolist()) for row in drawn]
    assert all(len(set(prompts[first : first + group_size])) == 1 for first in range(0, len(drawn), group_size))
    assert len({tuple(row.response.tolist()) for row in drawn}) > len(drawn) / 2


def compare_experience(found: Distances, run: Observed, step: int, drawn: Sequence[Row], compared: Compared) -> None:
    """Notes how far the experience of a step is from what the reference computed."""
    held = run.steps[step]
    assert [bool(held["truncated"][row]) for row in range(len(drawn))] == compared.cut
    assert compared.draws_explained > 0.99
    if compared.scores and "scores" in held:  # what hosts score is in no field: see the advantages
        found.add("scores", torch.cat([held["scores"][row] for row in range(len(drawn))]), torch.stack(compared.scores))
    known = {
        "behaviour_logprobs": compared.behaviour,
        "proximal_logprobs": compared.proximal,
        "ref_logprobs": compared.ref,
        **dict(zip(("teacher_logprobs", "teacher_2_logprobs"), compared.teachers, strict=False)),
    }
    assert len([name for name in held if "teacher" in name and "top" not in name]) == len(compared.teachers)
    for role, expected in zip(("teacher", "teacher_2"), compared.distributions, strict=False):
        found_tokens = torch.cat([held[f"{role}_top_tokens"][row] for row in range(len(drawn))])
        tokens, logprobs = (torch.cat([of_row[place].flatten() for of_row in expected]) for place in (0, 1))
        found.worst["top tokens"] = max(found.worst["top tokens"], float((found_tokens != tokens).double().mean()))
        found_logprobs = torch.cat([held[f"{role}_top_logprobs"][row] for row in range(len(drawn))])
        found.add(f"{role}_top_logprobs", found_logprobs, logprobs)
    assert ("ref_logprobs" in held) == (compared.ref is not None)
    for name, expected in known.items():
        if expected is not None and name in held:
            of_responses = [held[name][index][row.num_prompt - 1 : -1] for index, row in enumerate(drawn)]
            found.add(name, torch.cat(of_responses), torch.cat(expected))


def compare_updates(found: Distances, run: Observed, step: int, drawn: Sequence[Row], compared: Compared) -> None:
    """Notes how far what the updates of a step were given and said is from the reference's."""
    count = len(compared.minibatches)
    updates = run.updates["actor_train"][step * count : (step + 1) * count]
    for metric in compared.actor_updates[0]:
        floor = 1e-3 if metric in ("policy_loss", "kl_to_ref_estimate") else 0.0  # small beside the terms of its sum
        of_step = torch.tensor([known[metric] for known in compared.actor_updates], dtype=torch.float64) + floor
        said = torch.tensor([update.metrics[metric] for update in updates], dtype=torch.float64) + floor
        found.add(metric, said, of_step)
    for update, chosen in zip(updates, compared.minibatches, strict=True):
        given = [update.given[tuple(drawn[index].ids.tolist())] for index in chosen]
        for name, expected in (("advantages", compared.advantages), ("weights", compared.weights)):
            if name in given[0] and any(values.any() for values in expected):
                found.add(name, torch.cat([of_row[name] for of_row in given]), picked(expected, chosen))


def judged(
    run: Observed, judge: CriticFreeReference | AdaptedReference, *, num_steps: int, batch_size: int, group_size: int
) -> Distances:
    """How far the steps of a run are from what the reference makes of the same draws."""
    found = Distances()
    assert ("proximal_logprobs" in run.steps[0]) == (judge.settings.old_logprobs == "recompute")
    for step in range(num_steps):
        drawn = drawn_in(run, step, batch_size)
        are_groups(drawn, group_size)
        compared = judge.step(step, drawn)
        compare_experience(found, run, step, drawn, compared)
        compare_updates(found, run, step, drawn, compared)
    return found


def settings_of(asked: RunRequest) -> CriticFreeSettings:
    """Of a run, as the reference takes them."""
    workload, own = asked.job.workload, asked.job.settings
    return CriticFreeSettings(
        **{name: getattr(own, name) for name in CriticFreeSettings.__annotations__ if hasattr(own, name)},
        algorithm=asked.job.algorithm,
        group_size=workload.group_size,
        num_minibatches=workload.num_minibatches,
        num_epochs=workload.num_epochs,
        max_response=workload.response.max,
        end_tokens=frozenset(END_TOKENS),
        decoupled=asked.plan.staleness > 0,
        old_logprobs=asked.plan.facts.old_logprobs,
        kept_tokens=workload.kept_tokens,
    )
