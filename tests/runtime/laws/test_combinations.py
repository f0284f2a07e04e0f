"""Features of a job that go together run together, and those that do not are refused before any rank starts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
import transformers

from meshwright.profiles.errors import BadInput
from meshwright.runtime.execution.request import RunRequest, check
from meshwright.runtime.execution.train import run_plan
from meshwright.runtime.launch.rendezvous import Rendezvous
from tests.docs.test_combinations import PAGE, combinations
from tests.runtime.checkpoints import name_end_tokens
from tests.runtime.rewarded import lines
from tests.runtime.small_job import EOS, write_job

RULES = combinations()
NAMES = {one.title: one.name for one in RULES.FEATURES}


def listed() -> dict[str, frozenset[str]]:
    """The combinations of the page, by what it says of them."""
    section = PAGE.read_text().split("## The jobs that run")[1].split("##")[0]
    said = [line.split(". ", 1)[1] for line in section.strip().splitlines()]
    return {title: frozenset(NAMES[one] for one in title.split(", ")) for title in said}


JOBS = listed()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random models of the page's configurations, prompts and their tokenizer."""
    directory = tmp_path_factory.mktemp("combinations")
    write_job(directory, num_ranks=1)
    for seed, (name, config) in enumerate(RULES.MODELS.items()):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
        shape = transformers.AutoConfig.from_pretrained(directory / name)
        if name == "scalar":
            shape.num_labels = 1
            model = transformers.AutoModelForSequenceClassification.from_config(shape)
        else:
            model = transformers.AutoModelForCausalLM.from_config(shape)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(directory / name)
        name_end_tokens(directory / name, EOS)
    return directory


def asked(place: Path, names: frozenset[str], out: Path) -> RunRequest:
    job, plan = RULES.planned(names, place)
    modules = (RULES.HOST_FUNCTION.partition(":")[0],)
    return RunRequest(plan=plan, job=job, directory=place, out=out, steps=2, allowed_modules=modules)


def runs_two_steps(request: RunRequest) -> None:
    run_plan(request)
    found = lines(request.out)
    assert [line["step"] for line in found] == [0, 1]
    assert all(math.isfinite(value) for line in found for value in line.values() if isinstance(value, float))


DISTRIBUTED = (
    {"distill", "turns", "in_flight", "host", "groups", "adapter"},
    {"distill", "best_of", "ahead", "model", "generator", "experts"},
)
"""Everything that may be beside whole distributions of a teacher."""


@pytest.mark.check_all
@pytest.mark.parametrize("names", DISTRIBUTED, ids=lambda names: ", ".join(sorted(names)))
def test_whole_distributions_run_beside_whatever_a_distillation_does(
    place: Path, tmp_path: Path, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RULES.job_of
    cut = {"distill": {"teacher_top_k": 5}}
    monkeypatch.setattr(RULES, "job_of", lambda chosen: plain(chosen) | cut)
    runs_two_steps(asked(place, frozenset(names), tmp_path / "run"))
    assert all(0 < line["teacher_top_mass"] < 1 for line in lines(tmp_path / "run"))


@pytest.mark.check_all
@pytest.mark.parametrize("title", JOBS)
def test_a_combination_of_the_page_runs(place: Path, tmp_path: Path, title: str) -> None:
    request = asked(place, JOBS[title], tmp_path / "run")
    assert (request.plan.staleness > 0) >= (JOBS[title] >= {"ahead"})
    runs_two_steps(request)


def drawn(seed: int) -> frozenset[str]:
    """Features of a job, drawn axis by axis."""
    rng, names = random.Random(seed), set()
    for axis, least, most in (("algorithm", 1, 1), ("time", 0, 2), ("samples", 0, 1), ("scores", 0, 2)):
        of_axis = [one.name for one in RULES.FEATURES if one.axis == axis]
        names.update(rng.sample(of_axis, rng.randint(least, most)))
    names.update(name for name in ("groups", "adapter", "experts", "mask") if rng.random() < 0.4)
    return frozenset(names)


def combination(seed: int) -> frozenset[str]:
    """The first drawn features that make one job."""
    return next(names for number in range(1000) if RULES.is_one_job(names := drawn(1000 * seed + number)))


@pytest.mark.check_all
def test_two_hundred_random_combinations_run_or_are_refused_in_a_sentence(place: Path, tmp_path: Path) -> None:
    runnable: list[RunRequest] = []
    refused: dict[int, str] = {}
    for seed in range(200):
        try:
            request = asked(place, combination(seed), tmp_path / str(seed))
            check(request, Rendezvous())
        except BadInput as error:
            refused[seed] = str(error)
        else:
            runnable.append(request)
    assert {seed: said for seed, said in refused.items() if "\n" in said or not said.endswith(".")} == {}
    assert not any((tmp_path / str(seed)).exists() for seed in refused)
    assert len(refused) >= 40
    assert len(runnable) >= 40
    for request in runnable[::20]:
        runs_two_steps(request)
