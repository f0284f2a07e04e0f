"""An engine in its own process is timed at every point that a plan may ask for, and only at those that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.planner.job.job import Facts, read_job, resolve
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.stages import Role
from meshwright.profiles.table import EngineTimings, Table, TimedPass, shape_of
from meshwright.runtime.inference.engine_process import EngineProcess
from meshwright.runtime.profiling import engine_benchmarks
from meshwright.runtime.profiling.engine_benchmarks import TimedEngine, measure_engine, missing_of_engine
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


class CountingProcess(EngineProcess):
    """The process of an engine without a model."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings, server=SERVER)  # type: ignore[arg-type]


def times(engine: str, directory: Path, table: Table, seconds: float, num_ranks: int = 1) -> EngineTimings:
    python = VLLM_PYTHON
    if engine == "counting":
        engine_benchmarks.EngineProcess = CountingProcess  # type: ignore[misc, attr-defined]
        engine_benchmarks.VLLM_VERSION = "1.2."  # type: ignore[attr-defined]
        python = Path(sys.executable)
    timed = TimedEngine(
        name=VLLM, python=python, model=directory / "actor", top_k=5, top_p=0.9, log=directory / "engine"
    )
    return measure_engine(facts_of(directory, num_ranks), table, timed, seconds)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_points_of_a_job_are_timed_and_only_missing_ones_again(engine: str, directory: Path) -> None:
    facts = facts_of(directory)
    shape = shape_of(facts.models.spec(Role.ACTOR), 1)
    [found] = run_on_ranks(1, times, engine, directory, EMPTY, 60.0, timeout=300.0)
    assert found.has_rounds_of(shape)
    assert {one.point.timed_pass for one in found.measurements} == {TimedPass.PREFILL, TimedPass.DECODE}
    assert all(one.seconds and one.repeats >= 3 for one in found.measurements)
    assert (found.load_seconds(shape, 3) or 0.0) > 0.0
    table = EMPTY.with_timings(found)
    assert missing_of_engine(facts, table, VLLM) == ((), ())
    fewer = found.model_copy(update={"measurements": found.measurements[:-1], "loads": found.loads})
    [again] = run_on_ranks(1, times, engine, directory, EMPTY.with_timings(fewer), 60.0, timeout=300.0)
    kept = {one.point: one for one in again.measurements}
    assert set(kept) == {one.point for one in found.measurements}
    assert [kept[one.point] == one for one in found.measurements] == [True] * len(fewer.measurements) + [False]
    assert again.loads == found.loads


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
