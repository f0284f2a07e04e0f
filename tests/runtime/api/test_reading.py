"""Documents come back as they were written, wherever a path is a text or a Path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import api
from meshwright.profiles.trace import write_spans
from meshwright.runtime.api.run_files import read_training_curves
from meshwright.runtime.records.kept_responses import KeptResponse, write_samples


def test_a_plan_that_was_written_is_read_again(small_plan: api.Plan, tmp_path: Path) -> None:
    api.write_plan(str(tmp_path / "plan.json"), small_plan)
    assert api.read_plan(str(tmp_path / "plan.json")) == api.read_plan(tmp_path / "plan.json") == small_plan


def test_a_job_is_resolved_from_where_its_paths_start(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = api.read_job(str(job))
    facts = api.resolve(document, str(job.parent))
    monkeypatch.chdir(job.parent)
    assert api.resolve(document) == facts
    monkeypatch.chdir(job.parent.parent)
    with pytest.raises(api.BadInput, match="config"):
        api.resolve(document)


def test_a_run_is_its_spans_named_by_its_directory(small_plan: api.Plan, tmp_path: Path) -> None:
    spans = api.simulate(small_plan, steps=2, traced=True).spans
    api.write_plan(tmp_path / "plan.json", small_plan)
    write_spans(tmp_path / "trace.jsonl", spans)
    run = api.read_run(str(tmp_path), small_plan)
    assert (run.spans, run.name) == (spans, str(tmp_path))
    assert run.pools == {pool.name: pool.ranks for pool in small_plan.pools}
    with pytest.raises(api.BadInput, match="is a run of another plan"):
        api.read_run(tmp_path, small_plan.model_copy(update={"pins": ("actor_train.layout=tp1",)}))
    with pytest.raises(api.BadInput, match="nowhere is not a directory"):
        api.read_run(tmp_path / "nowhere", small_plan)


def test_what_a_run_learned_is_read_from_its_directory(tmp_path: Path) -> None:
    lines = [{"step": step, "seconds": 1.0, "score": 0.5 * step, "name": "x"} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = KeptResponse(step=2, row=0, prompt="a", response="b", score=1.0, response_tokens=1, truncated=False)
    write_samples(tmp_path, [kept])
    found = read_training_curves(tmp_path)
    assert found.curves == {"score": [(0, 0.0), (1, 0.5), (2, 1.0)], "seconds": [(0, 1.0), (1, 1.0), (2, 1.0)]}
    assert [(one.step, one.response, one.score) for one in found.samples] == [(2, "b", 1.0)]
    assert read_training_curves(tmp_path / "none").curves == {}
