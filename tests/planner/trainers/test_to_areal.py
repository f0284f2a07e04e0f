"""AReaL's own rules hold in what is written for it (trainer/rl_trainer.py and api/alloc_mode.py of its package)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.planner.job.algorithm_settings import GRPO, RLOO, LearningSettings, Reinforce
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.areal import settings
from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from tests.planner.drawn import model_of
from tests.planner.trainers.configurations import configuration, plan_ahead
from tests.planner.trainers.plans import best


def with_layout(plan: Plan, layout: Layout) -> Plan:
    placements = tuple(
        one.model_copy(update={"layout": layout}) if one.stage == "actor_train" else one for one in plan.placements
    )
    return plan.model_copy(update={"placements": placements})


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        (Layout(tp=2, dp=2, sp=True), "megatron:d2p1t2"),
        (Layout(dp=2, cp=2), "megatron:d2p1t1c2"),
        (Layout(tp=2, dp=2, ep=4, etp=1, sp=True), "megatron:(attn:d2p1t2|ffn:d1p1t1e4)"),
        (Layout(tp=2, dp=2, ep=2, sp=True), "megatron:(attn:d2p1t2|ffn:d1p1t2e2)"),
        (Layout(pp=2, dp=2, ep=2, etp=1), "megatron:(attn:d2p2t1|ffn:d1p2t1e2)"),
    ],
)
def test_degrees_of_experts_have_as_many_ranks_as_the_others(layout: Layout, backend: str) -> None:
    assert configuration("areal", with_layout(best("areal").plan, layout))["actor.backend"] == backend


def test_engines_on_the_ranks_of_the_actor_need_offload_and_take_weights_from_a_disk() -> None:
    found = configuration("areal")
    assert (found["rollout.scheduling_strategy.type"], found["rollout.scheduling_strategy.target"]) == (
        "colocation",
        "actor",
    )
    assert (found["enable_offload"], found["actor.offload"], found["actor.weight_update_mode"]) == (True, True, "disk")
    ahead = configuration("areal", plan_ahead("areal"))
    assert "rollout.scheduling_strategy.type" not in ahead
    assert (ahead["rollout.max_head_offpolicyness"], ahead["actor.weight_update_mode"]) == (1, "xccl")
    assert ahead["rollout.max_concurrent_rollouts"] == 2 * int(str(ahead["train_dataset.batch_size"]))


GROUP = "actor.reward_norm"


@pytest.mark.parametrize(
    ("algorithm", "learning", "expected"),
    [
        ("grpo", GRPO(), {f"{GROUP}.mean_level": "group", f"{GROUP}.std_level": "group"}),
        ("grpo", GRPO(normalise_by_std=False), {f"{GROUP}.mean_level": "group", f"{GROUP}.std_level": None}),
        ("rloo", RLOO(), {f"{GROUP}.mean_leave1out": True, f"{GROUP}.std_level": None}),
        ("reinforce++", Reinforce(), {"actor.adv_norm.mean_level": "batch"}),
        (
            "reinforce++",
            Reinforce(group_baseline=True),
            {"actor.adv_norm.std_level": "batch", f"{GROUP}.mean_level": "group", f"{GROUP}.std_level": None},
        ),
    ],
)
def test_an_algorithm_is_what_is_normalised_over(
    algorithm: Algorithm, learning: LearningSettings, expected: dict[str, ConfigValue]
) -> None:
    class Given(ExportInput):
        @property
        def settings(self) -> LearningSettings:
            return learning

    plan = best("areal").plan
    source = Given(plan=plan.model_copy(update={"facts": plan.facts.model_copy(update={"algorithm": algorithm})}))
    found = {one.key: one.value for one in settings(source) if one.key.startswith((GROUP, "actor.adv_norm"))}
    assert {key: found.get(key, "absent") for key in expected} == expected
    has_whitening = algorithm == "reinforce++"
    assert ("actor.adv_norm.mean_level" in found) is has_whitening


def test_several_epochs_and_an_entropy_bonus_are_refused() -> None:
    plan = best("areal").plan
    workload = plan.facts.workload.model_copy(update={"num_epochs": 2})
    facts = plan.facts.model_copy(update={"workload": workload})
    with pytest.raises(BadInput, match=r"workload.num_epochs=2: AReaL trains for one epoch in a step; use 1"):
        configuration("areal", plan.model_copy(update={"facts": facts}))


AREAL = {
    "areal/__init__.py": """\
import importlib

class PPOTrainer:
    def __init__(self, config, train_dataset):
        self.config = config

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def train(self, workflow, workflow_kwargs):
        module, _, name = workflow_kwargs["reward_fn"].rpartition(".")
        hook = importlib.import_module(module)
        hook.score = lambda samples: [len(samples[0].response) + (samples[0].answer == "4")]
        print(self.config.arguments, workflow, getattr(hook, name)("2 + 2", "abc", [1], [2], answer=4))
""",
    "areal/api/__init__.py": "",
    "areal/api/cli_args.py": """\
from types import SimpleNamespace

PPOConfig = SimpleNamespace

def load_expr_config(arguments, cls):
    return cls(arguments=arguments, train_dataset=None, tokenizer_path="t", gconfig=None), ""
""",
    "areal/dataset.py": "def get_custom_dataset(split, dataset_config, tokenizer): ...\n",
    "areal/utils/__init__.py": "",
    "areal/utils/hf_utils.py": "def load_hf_tokenizer(path): ...\n",
}
"""What an export needs of AReaL, in a few lines."""


def test_areal_is_run_with_the_function(tmp_path: Path) -> None:
    exported, installed = tmp_path / "exported", tmp_path / "installed"
    exported.mkdir()
    found = export(TRAINERS["areal"], best("areal").plan, model_of)
    assert found is not None
    for file, text in found.files.items():
        (exported / file).write_text(text)
    for file, text in AREAL.items():
        (installed / file).parent.mkdir(parents=True, exist_ok=True)
        (installed / file).write_text(text)
    bins = tmp_path / "bin"
    bins.mkdir()
    (bins / "python3").symlink_to(sys.executable)
    done = subprocess.run(
        ["bash", str(exported / "run.sh"), "train_dataset.path=p"],
        env={"PYTHONPATH": str(installed), "PATH": f"{bins}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    given = ["--config", f"{exported}/config.yaml", "train_dataset.path=p"]
    assert done.stdout.strip() == f"{given} areal.workflow.rlvr.RLVRWorkflow 4.0"
