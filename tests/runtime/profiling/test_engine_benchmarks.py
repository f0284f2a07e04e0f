"""An engine in its own process is timed at every point that a plan may ask for, and only at those that are missing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.stages import Role
from meshwright.profiles.table import EngineTimings, Table, TimedPass, shape_of
from meshwright.runtime.inference.engine_process import EngineProcess
from meshwright.runtime.profiling import engine_benchmarks
from meshwright.runtime.profiling.engine_benchmarks import TimedEngine, measure_engine, missing_of_engine
from meshwright.runtime.rollout.external_engine import VERSIONS
from tests.cost_models.tables import PROVENANCE
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.inference.test_engine_process import SERVER
from tests.runtime.inference.vllm_environment import VLLM_PYTHON, needs_vllm
from tests.runtime.ranks import run_on_ranks
from tests.runtime.small_job import VOCAB_SIZE, write_job

EMPTY = Table(
    provenance=PROVENANCE.model_copy(update={"device": "local", "kind": "cpu", "precision": "fp32", "num_ranks": 1})
)
ENGINES = (
    pytest.param("counting", marks=pytest.mark.slow),
    pytest.param("vllm", marks=(pytest.mark.check_all, needs_vllm)),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("job"), num_ranks=1)
    write_job(path.parent, num_ranks=2)
    write_checkpoint(path.parent / "actor", vocab_size=VOCAB_SIZE, head_dim=32)
    return path.parent


def facts_of(directory: Path, num_ranks: int = 1) -> Facts:
    return resolve(read_job(directory / f"job-{num_ranks}.yaml"), directory)


def with_adapter(facts: Facts) -> Facts:
    actor = replace(facts.models.actor, adapter=Adapter(rank=4, alpha=8.0))
    return facts.model_copy(update={"models": facts.models.model_copy(update={"actor": actor})})


class CountingProcess(EngineProcess):
    """The process of an engine without a model."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings, server=SERVER)  # type: ignore[arg-type]


def times_of_adapter(engine: str, directory: Path, seconds: float) -> tuple[EngineTimings, list[list[str]]]:
    """The times of a job whose actor has an adapter, and the names of the tensors of each load."""
    loads: list[list[str]] = []
    plain = EngineProcess._send_tensors

    def send(process: EngineProcess, tensors: Iterable[tuple[str, Tensor]]) -> None:
        sent = [*tensors]
        loads.append([name for name, _ in sent])
        plain(process, sent)

    EngineProcess._send_tensors = send  # type: ignore[method-assign]
    try:
        return times(engine, directory, EMPTY, seconds, adapted=True), loads
    finally:
        EngineProcess._send_tensors = plain  # type: ignore[method-assign]


def times(
    engine: str, directory: Path, table: Table, seconds: float, num_ranks: int = 1, *, adapted: bool = False
) -> EngineTimings:
    is_counting = engine == "counting"
    python = Path(sys.executable) if is_counting else VLLM_PYTHON
    engine_benchmarks.EngineProcess = CountingProcess if is_counting else EngineProcess  # type: ignore[misc, attr-defined]
    engine_benchmarks.VERSIONS = {VLLM: "1.2."} if is_counting else VERSIONS  # type: ignore[attr-defined]
    timed = TimedEngine(
        name=VLLM, python=python, model=directory / "actor", top_k=5, top_p=0.9, log=directory / "engine"
    )
    facts = facts_of(directory, num_ranks)
    return measure_engine(with_adapter(facts) if adapted else facts, table, timed, seconds)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_points_of_a_job_are_timed_and_only_missing_ones_again(engine: str, directory: Path) -> None:
    facts = facts_of(directory)
    shape = shape_of(facts.models.spec(Role.ACTOR), 1)
    [found] = run_on_ranks(1, times, engine, directory, EMPTY, 60.0, timeout=300.0)
    assert found.has_rounds_of(shape)
    assert {one.point.timed_pass for one in found.measurements} == {TimedPass.PREFILL, TimedPass.DECODE}
    assert all(one.seconds and one.repeats >= 3 for one in found.measurements)
    assert (found.load_seconds(shape, 3) or 0.0) > 0.0
    assert found.sleep is not None
    assert 2**24 < (found.process_bytes or 0.0) < 2**30
    table = EMPTY.with_timings(found)
    assert missing_of_engine(facts, table, VLLM) == ((), ())
    fewer = found.model_copy(update={"measurements": found.measurements[:-1], "loads": found.loads})
    [again] = run_on_ranks(1, times, engine, directory, EMPTY.with_timings(fewer), 60.0, timeout=300.0)
    kept = {one.point: one for one in again.measurements}
    assert set(kept) == {one.point for one in found.measurements}
    assert [kept[one.point] == one for one in found.measurements] == [True] * len(fewer.measurements) + [False]
    assert again.loads == found.loads


@pytest.mark.check_all
@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_timed_with_what_a_refit_gives_to_the_engine(engine: str, directory: Path) -> None:
    actor = with_adapter(facts_of(directory)).models.actor
    [(found, loads)] = run_on_ranks(1, times_of_adapter, engine, directory, 60.0, timeout=300.0)
    shape = shape_of(actor, 1)
    assert found.has_rounds_of(shape)
    assert (found.load_seconds(shape, 3) or 0.0) > 0.0
    assert not found.has_rounds_of(shape_of(facts_of(directory).models.actor, 1))
    assert [{"lora_" in name for name in names} for names in loads[:3]] == [{False}, {True}, {True}]
    assert sum("model.norm.weight" in names for names in loads) == 2  # once at each depth


@pytest.mark.check_all
@needs_vllm
def test_ranks_are_timed_alone_and_sharing_a_model(directory: Path) -> None:
    facts, table = facts_of(directory, 2), EMPTY
    found, other = run_on_ranks(2, times, "vllm", directory, table, 60.0, 2, timeout=500.0)
    assert found == other
    for tp in (1, 2):
        shape = shape_of(facts.models.spec(Role.ACTOR), tp)
        assert found.has_rounds_of(shape)
        assert (found.load_seconds(shape, 3) or 0.0) > 0.0
    assert missing_of_engine(facts, table.with_timings(found), VLLM) == ((), ())


@pytest.mark.slow
def test_what_the_time_does_not_suffice_for_is_counted_as_missing(directory: Path) -> None:
    [found] = run_on_ranks(1, times, "counting", directory, EMPTY, 0.0)
    assert found.measurements == ()
    points, loads = missing_of_engine(facts_of(directory), EMPTY.with_timings(found), VLLM)
    assert points
    assert loads == ()
