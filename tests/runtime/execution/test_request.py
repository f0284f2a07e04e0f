"""A run that is asked for: what is wrong with it is told before anything starts, and nothing is left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.job.job import read_job, resolve
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.hardware import device_named
from meshwright.runtime.execution.request import RunRequest, check, check_launched_rank
from meshwright.runtime.launch.rendezvous import Rendezvous
from meshwright.runtime.launch.torchrun import LaunchedRank
from meshwright.runtime.records import run_directory
from meshwright.runtime.records.run_directory import locked, write_run_file
from meshwright.runtime.rollout.prompts import read_data
from tests.planner.jobs import image_facts
from tests.runtime.execution.test_resume import save
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import write_job

SEAT = LaunchedRank(rank=0, local_rank=0, num_ranks=1, ranks_per_node=1, address="127.0.0.1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunRequest:
    """Of a job on one rank, with nothing wrong."""
    path = write_job(tmp_path_factory.mktemp("job"), num_ranks=1)
    job = read_job(path)
    plan = plan_by_hand(resolve(job, path.parent), {"other": Where("0:1")})
    return RunRequest(plan=plan, job=job, directory=path.parent, out=path.parent / "unused", steps=3)


@pytest.fixture
def asked(whole: RunRequest, tmp_path: Path) -> RunRequest:
    return replace(whole, out=tmp_path / "out")


def refused(asked: RunRequest, said: str, rendezvous: Rendezvous | None = None) -> None:
    existed = asked.out.exists()
    with pytest.raises(BadInput, match=said):
        check(asked, rendezvous or Rendezvous())
    assert asked.out.exists() == existed


def test_a_run_with_nothing_wrong_gets_its_directory(asked: RunRequest) -> None:
    check(asked, Rendezvous())
    assert list(asked.out.iterdir()) == []


def test_a_finished_run_is_not_overwritten_and_a_missing_one_not_resumed(asked: RunRequest, tmp_path: Path) -> None:
    saved = asked.out / "checkpoints" / "step-000002"
    saved.mkdir(parents=True)
    refused(replace(asked, resume=True), "no checkpoint to resume from")  # an empty directory is none
    (saved / "manifest.json").touch()
    refused(asked, "holds a run of 2 steps; continue it with --resume")
    refused(replace(asked, steps=1, resume=True), "has 2 already; give a larger number")
    refused(replace(asked, out=tmp_path / "nothing", resume=True), "no checkpoint to resume from")


def test_a_run_that_was_cut_off_behind_its_last_checkpoint_is_resumed_to_its_end(asked: RunRequest) -> None:
    asked.out.mkdir()
    save(asked.out, asked.steps)
    write_run_file(asked.out, asked.run_file(read_data(asked.job, asked.directory)))
    check(replace(asked, resume=True), Rendezvous())
    (asked.out / "summary.json").write_text(json.dumps({"steps": asked.steps - 1}))  # of an earlier, shorter run
    check(replace(asked, resume=True), Rendezvous())
    (asked.out / "summary.json").write_text(json.dumps({"steps": asked.steps}))
    refused(replace(asked, resume=True), f"has {asked.steps} already; give a larger number")


def test_a_directory_that_a_run_holds_is_refused(asked: RunRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "WAIT_SECONDS", 0.1)
    asked.out.mkdir()
    with locked(asked.out):
        refused(asked, "is in use by a run that has not ended")


def test_models_with_experts_that_are_not_built_are_refused(asked: RunRequest) -> None:
    facts = asked.plan.facts
    mixture = replace(facts.models.ref, experts=Experts(num_experts=4, experts_per_token=2, ffn_size=32))
    models = facts.models.model_copy(update={"ref": mixture})
    plan = asked.plan.model_copy(update={"facts": facts.model_copy(update={"models": models})})
    refused(replace(asked, plan=plan), "has experts, which can be planned and simulated but not run")


def test_models_that_read_images_are_refused(asked: RunRequest) -> None:
    reader = image_facts().models.actor
    models = asked.plan.facts.models.model_copy(update={"ref": reader})
    plan = asked.plan.model_copy(update={"facts": asked.plan.facts.model_copy(update={"models": models})})
    refused(replace(asked, plan=plan), "reads images: it can be planned and simulated, and running models of images is")


def test_a_plan_for_the_engine_of_another_trainer_is_refused(asked: RunRequest) -> None:
    facts = asked.plan.facts.model_copy(update={"engine": "trtllm"})
    plan = asked.plan.model_copy(update={"facts": facts})
    refused(replace(asked, plan=plan), "the plan is for engine trtllm, which meshwright does not run; export it to a")


def test_an_engine_in_a_process_of_its_own_that_does_not_run_the_job_is_refused(asked: RunRequest) -> None:
    facts = asked.plan.facts.model_copy(update={"engine": "vllm"})
    job = asked.job.model_copy(update={"engine": "vllm"})
    served = replace(asked, job=job, plan=asked.plan.model_copy(update={"facts": facts}))
    refused(
        served, r"^engine vllm: its attention on a CPU has heads of .* elements, and the actor's have 16; plan the job"
    )


def test_a_plan_of_another_job_is_refused(asked: RunRequest) -> None:
    workload = asked.job.workload.model_copy(update={"batch_size": 8})
    other = replace(asked, job=asked.job.model_copy(update={"workload": workload}))
    refused(other, r"workload\.batch_size is 16 in the plan and 8 in the job")


def test_a_job_that_asks_for_controllers_refuses_a_plan_without_them(asked: RunRequest) -> None:
    other = replace(asked, job=asked.job.model_copy(update={"controllers": True}))
    refused(other, "controllers is False in the plan and True in the job; plan this job again")


def test_a_node_rank_that_the_plan_does_not_have_is_refused(asked: RunRequest) -> None:
    refused(asked, "--node-rank 1 is not a node of the plan; give 0.", Rendezvous(node_rank=1))


def test_prompts_that_are_not_there_are_refused(asked: RunRequest) -> None:
    assert asked.job.data is not None
    data = asked.job.data.model_copy(update={"prompts": "nowhere.jsonl"})
    refused(replace(asked, job=asked.job.model_copy(update={"data": data})), r"nowhere\.jsonl does not exist")


def test_torchrun_takes_what_it_has_started_and_joined_itself(asked: RunRequest) -> None:
    check_launched_rank(asked, Rendezvous(node_rank=0), SEAT)
    with pytest.raises(BadInput, match="1 of 2 ranks were started on this node and the plan has 1 nodes of 1"):
        check_launched_rank(asked, Rendezvous(), replace(SEAT, num_ranks=2))
    with pytest.raises(BadInput, match="torchrun has joined the nodes already; leave out --nodes and --rendezvous"):
        check_launched_rank(asked, Rendezvous(port=29500), SEAT)


def test_nodes_agree_on_what_is_run_and_not_on_where_their_files_are(asked: RunRequest, tmp_path: Path) -> None:
    moved = replace(asked, directory=tmp_path / "elsewhere", out=tmp_path / "another")
    assert moved.digest == asked.digest
    options = {
        "steps": 4,
        "resume": True,
        "checkpoint_every": 1,
        "checkpoint_minutes": 1.0,
        "keep": 3,
        "export_every": 1,
    }
    digests = {replace(asked, **{name: value}).digest for name, value in options.items()}  # type: ignore[arg-type]
    assert len(digests | {asked.digest}) == len(options) + 1


def test_what_was_asked_is_kept_with_the_digest_of_its_prompts(asked: RunRequest) -> None:
    data = read_data(asked.job, asked.directory)
    kept = asked.run_file(data)
    assert (kept.job, kept.directory, kept.prompts) == (asked.job, str(asked.directory.resolve()), data.digest)


def test_a_plan_for_devices_that_this_machine_lacks_is_refused(
    asked: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.runtime.device.host.num_cuda_devices", lambda: 0)
    cluster = asked.job.cluster.model_copy(update={"device": device_named("h200")[0]})
    job = asked.job.model_copy(update={"cluster": cluster})
    plan = plan_by_hand(resolve(job, asked.directory), {"other": Where("0:1")})
    refused(replace(asked, plan=plan, job=job), "the plan uses 1 CUDA devices per node and this machine has 0; run it")


def test_a_run_that_cannot_tell_how_long_stages_take_is_not_planned_again(asked: RunRequest) -> None:
    looking = replace(asked, replan_every=5)
    check(looking, Rendezvous())
    profiled = asked.plan.model_copy(update={"digests": {**asked.plan.digests, "profile": "0" * 64}})
    refused(
        replace(looking, plan=profiled), "--replan-every needs stage times .* a measured table; give it with --profile"
    )
    check(replace(asked, plan=profiled), Rendezvous())


def test_under_torchrun_no_other_plan_is_gone_over_to(asked: RunRequest) -> None:
    with pytest.raises(BadInput, match="--replan-every 5: torchrun restarts ranks only if one fails"):
        check_launched_rank(replace(asked, replan_every=5), Rendezvous(), SEAT)
