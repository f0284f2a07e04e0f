"""A run as its ranks saw it: the experience of every step, what every update was given and said, and the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from meshwright.runtime.execution.request import RunRequest
from meshwright.runtime.execution.run import RankRun
from meshwright.runtime.model.weights import save_weights
from meshwright.runtime.training.trainer import MicroBatch
from tests.runtime.ranks import run_on_ranks

Held = dict[str, dict[int, Tensor]]
Given = dict[tuple[int, ...], dict[str, Tensor]]
"""What a loss was given of each row, by the row's tokens: the response's part of every field."""


@dataclass(frozen=True)
class Update:
    """One update of a role: the metrics, which every rank says alike, and the rows of this rank or of all."""

    metrics: dict[str, float]
    given: Given


@dataclass(frozen=True)
class Observed:
    """Of one rank, or of all together."""

    out: Path
    steps: list[Held] = field(default_factory=list)
    updates: dict[str, list[Update]] = field(default_factory=dict)
    """By the stage that trains."""

    def weights(self, role: str) -> dict[str, Tensor]:
        """The trained weights by their names in a Hugging Face directory."""
        files = (self.out / role).glob("*.safetensors")
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    def add(self, other: Observed) -> None:
        """Takes in what another rank saw."""
        for step, held in enumerate(other.steps):
            if step == len(self.steps):
                self.steps.append({name: {} for name in held})
            for name, rows in held.items():
                self.steps[step][name] |= rows
        for stage, updates in other.updates.items():
            if not (known := self.updates.setdefault(stage, [])):
                known += [Update(update.metrics, {}) for update in updates]
            for mine, update in zip(known, updates, strict=True):
                assert mine.metrics == update.metrics
                mine.given.update(update.given)


def observe(num_ranks: int, requests: Sequence[RunRequest]) -> list[Observed]:
    """Runs one after another, in one launch of the ranks."""
    of_ranks = run_on_ranks(num_ranks, _follow_all, list(requests), timeout=600)
    together = [Observed(asked.out) for asked in requests]
    for of_runs in of_ranks:
        for run, seen in zip(together, of_runs, strict=True):
            run.add(seen)
    return together


def _follow_all(requests: list[RunRequest]) -> list[Observed]:
    return [_follow(asked) for asked in requests]


def _follow(asked: RunRequest) -> Observed:
    run, seen = RankRun(asked), Observed(asked.out)
    run.recorder.open(0)
    graph = asked.plan.graph
    for stage in graph.train_stage.values():
        if trainer := run.copies[stage].trainer:
            trainer.train_step = _noted(trainer.train_step, seen.updates.setdefault(stage, []))  # type: ignore[method-assign]
    for turn in run.periods:
        experience = run.run_period(turn).experience
        if turn in run.steps:
            seen.steps.append({f: {row: experience.get(f, row) for row in experience.rows(f)} for f in graph.writer})
    run.finish()
    for role, stage in graph.train_stage.items():
        copy, source = run.copies[stage], asked.directory / asked.job.models.source(role).path
        if copy.model is not None:
            save_weights(copy.model, copy.spec, copy.mesh, asked.out / role.value, config_from=source)
    run.close()
    return seen


def _noted(train_step: Callable[..., dict[str, float]], updates: list[Update]) -> Callable[..., dict[str, float]]:
    def noted(blocks: Sequence[MicroBatch], loss: Any, **options: Any) -> dict[str, float]:
        metrics = train_step(blocks, loss, **options)
        updates.append(Update(metrics, {tokens: of for block in blocks for tokens, of in _rows_of(block)}))
        return metrics

    return noted


def _rows_of(block: MicroBatch) -> list[tuple[tuple[int, ...], dict[str, Tensor]]]:
    fields = {name: block.split_rows(values) for name, values in block.fields.items()}
    rows = []
    for index, tokens in enumerate(block.split_rows(block.tokens)):
        mask = fields["mask"][index].bool()
        rows.append((tuple(tokens.tolist()), {name: of_rows[index][mask] for name, of_rows in fields.items()}))
    return rows
