"""Configurations that were written for a plan, to be read again."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.planner.plan.pins import parse_pin
from meshwright.planner.plan.plan import Plan
from meshwright.planner.trainers.exporter import export
from meshwright.planner.trainers.parsed_config import ParsedConfig
from meshwright.planner.trainers.registry import TRAINERS
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.stages import GENERATE
from tests.planner.drawn import model_of
from tests.planner.trainers.configurations import plan_ahead
from tests.planner.trainers.plans import best

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
FILES = {
    "verl": "run.sh",
    "nemo-rl": "config.yaml",
    "openrlhf": "run.sh",
    "slime": "run.sh",
    "skyrl": "run.sh",
    "areal": "config.yaml",
}


def plan_of(name: str, staleness: int, algorithm: Algorithm | None = None) -> Plan:
    """The best plan that a trainer can say; with a staleness, one in which generation works ahead."""
    return plan_ahead(name, algorithm) if staleness else best(name, algorithm=algorithm).plan


def assert_is_read(plan: Plan, found: ParsedConfig) -> None:
    """What a configuration says is what the plan that it was written for has."""
    pins = [one for one in found.fields if one.what.partition(".")[0] in plan.graph.by_name]
    assert len(pins) >= 3 * len(plan.graph.by_name)
    workload = plan.facts.workload
    for one in pins:
        pin = parse_pin(f"{one.what}={one.value}", plan.graph)
        has: object = plan.choice(pin.stage, pin.key)
        if pin.key == "micro_batch_tokens":  # of lengths that are one, so many rows are so many tokens
            has = plan.placement(pin.stage).schedule.max_tokens(workload.max_tokens)
        assert pin.allows(has), (one, has)
    assert found.by_name["workload.batch_size"] == workload.batch_size
    assert found.by_name["workload.num_minibatches"] == workload.num_minibatches
    assert found.steps_ahead == plan.ahead[GENERATE]


def written(name: str, plan: Plan, directory: Path) -> Path:
    """The configuration of a plan in a directory, with the shapes of its models beside it."""
    found = export(TRAINERS[name], plan, model_of)
    assert found is not None
    for file, text in found.files.items():
        (directory / file).write_text(text)
    for role in ("actor", "critic", "ref", "reward"):
        (directory / "models" / role).mkdir(parents=True)
        (directory / "models" / role / "config.json").write_text(json.dumps(CONFIG))
    return directory / FILES[name]
