"""What runs and an independent reference are compared in: four models that all differ, what was drawn, distances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from torch import Tensor

from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.steps_ahead import steps_ahead_patterns
from meshwright.runtime.execution.request import RunRequest
from tests.reference.ppo import Row
from tests.runtime.checkpoints import edit_config, write_checkpoint
from tests.runtime.observed import Observed, observe
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import VOCAB_SIZE, write_job

T = TypeVar("T")

END_TOKENS = (1, 7, 19)


def write_models(directory: Path) -> None:
    """A policy, a reference, and two models with scalar heads."""
    small = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for seed, name in enumerate(("policy", "ref")):
        write_checkpoint(directory / name, "Qwen2", seed=seed, tie_word_embeddings=True, **small)
        edit_config(directory / name, eos_token_id=END_TOKENS[0])
        (directory / name / "generation_config.json").write_text(f'{{"eos_token_id": {list(END_TOKENS)}}}')
    for seed, name in enumerate(("values", "scores"), start=2):
        write_checkpoint(directory / name, head="ForSequenceClassification", seed=seed, **small)


def request_of(
    job: Mapping[str, Any], directory: Path, name: str, where: Mapping[str, Where], *, steps: int, steps_ahead: int = 0
) -> RunRequest:
    """A run of this job, under a plan whose stages are where it is said and generate so many steps ahead."""
    path, out = directory / f"{name}.yaml", directory / name
    path.write_text(yaml.safe_dump(job))
    out.mkdir()
    facts = resolve(read_job(path), directory)
    plan = plan_by_hand(facts, where, steps_ahead_patterns(facts.graph, facts.staleness)[steps_ahead])
    return RunRequest(plan=plan, job=read_job(path), directory=directory, out=out, steps=steps)


def requests_of(
    directory: Path, cases: Mapping[str, T], request: Callable[[Path, str, T], RunRequest]
) -> dict[str, RunRequest]:
    """The run that is asked of each case, all with the same prompts, tokenizer and models, which all differ."""
    write_job(directory, num_ranks=1)  # prompts and their tokenizer
    write_models(directory)
    return {name: request(directory, name, case) for name, case in cases.items()}


class Runs(Mapping[str, Observed]):
    """What the run of each case did; it runs when it is first asked for."""

    def __init__(self, requests: Mapping[str, RunRequest]) -> None:
        self._requests = requests
        self._observed: dict[str, Observed] = {}

    def __getitem__(self, name: str) -> Observed:
        if name not in self._observed:
            asked = self._requests[name]
            [self._observed[name]] = observe(asked.plan.facts.cluster.num_ranks, [asked])
        return self._observed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def drawn_in(run: Observed, step: int, batch_size: int) -> list[Row]:
    """What chance and the clock decided in a step."""
    held, drawn = run.steps[step], []
    for row in range(batch_size):
        num_prompt = int(held["prompt_lengths"][row])
        versions = tuple(held["versions"][row][num_prompt - 1 : -1].tolist())
        drawn.append(Row(held["tokens"][row], num_prompt, versions, draw=step * batch_size + row))
    return drawn


class Distances:
    """By name, the largest relative distance between what a run and what the reference computed."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, name: str, found: Tensor, expected: Tensor) -> None:
        distance = (found.double() - expected).norm() / expected.norm()
        self.worst[name] = max(self.worst[name], float(distance))

    def add_all(self, name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Of tensors under the same names."""
        assert found.keys() == expected.keys()
        for each, values in expected.items():
            self.add(name, found[each], values)

    def beyond(self, tolerance: float) -> dict[str, float]:
        return {name: distance for name, distance in self.worst.items() if not distance <= tolerance}
