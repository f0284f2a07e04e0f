"""Documents and files that are wrong in one thing each, for the wrong invocations."""

from __future__ import annotations

import copy
import gzip
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.plan.plan import write_plan
from meshwright.planner.simulation.simulate import simulate
from meshwright.profiles.documents import SCHEMA_VERSION
from meshwright.profiles.trace import write_spans
from tests.runtime.cli.test_report_command import small_plan
from tests.runtime.small_job import request, write_job

Tree = dict[str, Any]


def _sets(*keys: str | int, to: object) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        inside: Any = tree
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = to

    return edit


def _drops(*keys: str | int) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        inside: Any = tree
        for key in keys[:-1]:
            inside = inside[key]
        del inside[keys[-1]]

    return edit


_DEVICE = {
    "name": "thimble",
    "kind": "cpu",
    "memory_bytes": 100_000,
    "memory_bytes_per_second": 1e10,
    "flops_per_second": {"fp32": 1e10},
    "launch_seconds": 1e-5,
    "source": "made up",
}

_EDITS: Mapping[str, Callable[[Tree], None]] = {
    **{
        f"batch-{value}": _sets("workload", "batch_size", to=value)
        for value in (0, -1, 1.5, "many", None, True, 1073741824, 10**30)
    },
    **{f"nodes-{value}": _sets("cluster", "nodes", to=value) for value in (0, -1, 100_000_000, "two")},
    **{f"ranks-{value}": _sets("cluster", "ranks_per_node", to=value) for value in (0, -1, 1_000_000, 10**20)},
    **{f"response-{value}": _sets("workload", "response", "max", to=value) for value in (0, -1, 10**9, 122, 1.5)},
    **{f"median-{value}": _sets("workload", "response", "median", to=value) for value in (0.0, -1.0, 1e300, 100.0)},
    **{f"staleness-{value}": _sets("staleness", to=value) for value in (-1, 9, 1.5, "fresh")},
    **{f"precision-{value}": _sets("precision", to=value) for value in ("fp8", 16, None)},
    **{f"minibatches-{value}": _sets("workload", "num_minibatches", to=value) for value in (0, 10**9)},
    **{f"cluster-{value}": _sets("cluster", to=value) for value in ("h900", 8, None)},
    **{f"device-{value}": _sets("cluster", "device", to=value) for value in ("h900", 8, "A100")},
    **{
        f"ppo-{name}": _sets("ppo", name, to=value)
        for name, value in (
            ("gamma", 1.5),
            ("temperature", 0.0),
            ("clip_ratio", -1.0),
            ("seed", -1),
            ("top_p", 0.0),
            ("stop", [""]),
        )
    },
    "positions": _sets("workload", "prompt", to={"max": 128, "fixed": 6}),
    "network": _sets("cluster", to={"device": "a100-80gb", "nodes": 2, "network": "string"}),
    "histogram": _sets("workload", "prompt", to={"max": 8, "histogram": [[n, 1.0] for n in range(1, 2000)]}),
    "two-forms": _sets("workload", "prompt", to={"max": 8, "fixed": 6, "median": 3.0, "p99": 6.0}),
    "unknown-key": _sets("workload", "batch_sise", to=8),
    "unknown-model": _sets("models", "judge", to={"path": "actor"}),
    "no-models": _drops("models"),
    "no-actor": _drops("models", "actor"),
    "no-workload": _drops("workload"),
    "missing-model": _sets("models", "actor", "path", to="nowhere"),
    "model-is-a-pipe": _sets("models", "actor", "path", to="../pipe"),
    "flops": _sets("cluster", to={"device": {**_DEVICE, "flops_per_second": {"fp32": -1.0}}}),
    "memory": _sets("cluster", to={"device": {**_DEVICE, "memory_bytes": 10**25}}),
}
_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
_TEXTS: Mapping[str, str] = {
    "bomb": _BOMB,
    "merges": "m0: &m {k: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [{', '.join(['*m'] * 150)}]}}\n" for n in range(1, 3)),
    "deep": "a: " + "[" * 5000,
    "nested": "a: " + "[" * 100 + "]" * 100,
    "itself": "models: &m {actor: *m}",
    "unclosed": "models: [",
    "tabs": "models:\n\tactor: x",
    "list": "- 1\n- 2\n",
    "text": "models",
    "date": "models: 2020-13-01",
    "set": "models: !!set {x}",
    "object": "models: !!python/object:os.system {}",
    "infinite": "workload: {batch_size: .inf}",
    "long-number": f"workload: {{batch_size: {'9' * 5000}}}",
}
_ODD_EDITS: Mapping[str, Callable[[Tree], None]] = {
    **{
        f"odd-batch-{name}": _sets("workload", "batch_size", to=value)
        for name, value in (("wide", "\uff11\uff16"), ("quoted", "16"), ("k", "16k"), ("list", [16]), ("float", 16.0))
    },
    **{
        f"odd-device-{name}": _sets("cluster", "device", to=value)
        for name, value in (("null", None), ("rocket", "\U0001f680"), ("long", "h" * 3000), ("lines", "h100\nx"))
    },
    **{
        f"odd-path-{name}": _sets("models", "actor", "path", to=value)
        for name, value in (
            ("empty", ""),
            ("hub", "meta-llama/Llama-2-7b-hf"),
            ("url", "https://huggingface.co/gpt2"),
            ("list", ["../actor"]),
            ("nul", "a\0b"),
            ("long", "a/" * 3000),
            ("loop", "../loop"),
            ("reversed", "\u202eabc"),
            ("file", "../mine.txt"),
        )
    },
    **{
        f"odd-response-{name}": _sets("workload", "response", to={"max": 24, **value})
        for name, value in (
            ("p99", {"median": 20, "p99": 10}),
            ("no-bins", {"histogram": []}),
            ("half-a-bin", {"histogram": [[8]]}),
            ("negative", {"histogram": [[8, -1]]}),
            ("mapping", {"histogram": {"8": 1}}),
        )
    },
    **{
        f"odd-rewards-{number}": _sets("rewards", to=value)
        for number, value in enumerate(
            (
                [{}],
                "maths",
                {"name": "a"},
                [{"name": "a", "function": "os.system"}],
                [{"name": "a", "function": "a:c", "latency_seconds": 0.1}],
                [{"name": "a", "url": "ftp://x", "latency_seconds": {"fixed": 0.1}}],
            )
        )
    },
    **{
        f"odd-algorithm-{number}": _sets("algorithm", to=value)
        for number, value in enumerate(("PPO", 3, {"stages": []}))
    },
    "odd-grpo-too": _sets("grpo", to={"actor_learning_rate": 1e-3}),
    "odd-no-teacher": _sets("algorithm", to="distill"),
    "odd-adapter": _sets("models", "actor", "adapter", to={"rank": 10**9}),
    "odd-images": _sets("workload", "images", to={"number": {"max": 1, "fixed": 1}, "tokens": {"max": 2, "fixed": 2}}),
    "odd-seed": _sets("ppo", "seed", to=2**70),
    "odd-key": _sets("Workload", to={}),
    "odd-letter": _sets("models", "\u0430ctor", to={"path": "../actor"}),
}
_ENCODINGS: Mapping[str, Callable[[str], bytes]] = {
    "odd-utf16": lambda text: text.encode("utf-16"),
    "odd-latin": lambda text: f"# caf\u00e9\n{text}".encode("latin-1"),
    "odd-nul": lambda text: text.encode() + b"\0",
    "odd-zip": lambda text: gzip.compress(text.encode()),
    "odd-two": lambda text: f"{text}---\n{text}".encode(),
    "odd-tabs": lambda text: text.replace("  ", "\t").encode(),
}
BAD_JOBS = (*_EDITS, *_TEXTS, *_ODD_EDITS, *_ENCODINGS, "precision-twice", "model-twice")

_CONFIGS: Mapping[str, tuple[str, object]] = {
    "layers": ("num_hidden_layers", 1_000_000_000),
    "layers-zero": ("num_hidden_layers", 0),
    "layers-text": ("num_hidden_layers", "four"),
    "hidden": ("hidden_size", 10**400),
    "heads": ("num_attention_heads", 3),
    "kv-heads": ("num_key_value_heads", 3),
    "kv-heads-text": ("num_key_value_heads", "two"),
    "head-dim": ("head_dim", "x"),
    "head-dim-negative": ("head_dim", -16),
    "vocabulary": ("vocab_size", -1),
    "vocabulary-huge": ("vocab_size", 10**12),
    "architecture": ("architectures", ["GPT5ForCausalLM"]),
    "architectures": ("architectures", "LlamaForCausalLM"),
    "activation": ("hidden_act", "relu6"),
    "rope": ("rope_parameters", {"rope_type": "yarm"}),
    "rope-text": ("rope_parameters", "yes"),
    "rope-parts": ("rope_parameters", {"rope_type": "llama3"}),
    "epsilon": ("rms_norm_eps", "small"),
}
BAD_MODELS = (*_CONFIGS, "list", "deep", "empty", "twice")

_PLANS: Mapping[str, Callable[[Tree], None]] = {
    "refit-source": _sets("refits", 0, "source", to="actor_trains"),
    "refit-target": _sets("refits", 0, "target", to="nobody"),
    "refit-role": _sets("refits", 0, "role", to="critic"),
    "no-refit": _sets("refits", to=[]),
    "pool": _sets("placements", 0, "pool", to="elsewhere"),
    "pools": _sets("pools", to=[]),
    "pool-ranks": _sets("pools", 0, "num_ranks", to=10**9),
    "stage": _sets("placements", 0, "stage", to="actor_thinks"),
    "stages": _sets("placements", to=[]),
    "tp": _sets("placements", 0, "layout", "tp", to=3),
    "tp-zero": _sets("placements", 0, "layout", "tp", to=0),
    "tp-huge": _sets("placements", 0, "layout", "tp", to=10**18),
    "rows": _sets("placements", 6, "schedule", "micro_batch_size", to=3),
    "steps_ahead": _sets("placements", 0, "steps_ahead", to=7),
    "starts": _sets("placements", 0, "start_seconds", to=1e9),
    "objective": _sets("solver", "objective_seconds", to=0.0),
    "gap": _sets("solver", "gap", to=0.5),
    "period": _sets("period_seconds", to=1e300),
    "peaks": _sets("peak_bytes_per_rank", to=[]),
    "digest": _sets("digests", "models", to="0"),
    "batch": _sets("facts", "workload", "batch_size", to=2**40),
    "nodes": _sets("facts", "cluster", "nodes", to=10**12),
    "layers": _sets("facts", "models", "actor", "num_layers", to=10**12),
    "edge": _sets("edges", 0, "producer", to="nobody"),
    "edges": _sets("edges", to=[]),
    "pins": _sets("pins", to=["nonsense"]),
    "staleness": _sets("staleness", to=5),
    "version": _sets("schema_version", to=99),
    "version-text": _sets("schema_version", to="3"),
    "version-half": _sets("schema_version", to=2.5),
    "no-facts": _sets("facts", to=None),
    "layout-text": _sets("placements", 0, "layout", to="tp1"),
    "start-negative": _sets("placements", 0, "start_seconds", to=-1.0),
    "rank-negative": _sets("pools", 0, "first_rank", to=-1),
    "comment": _sets("comment", to="mine"),
}
_PLAN_TEXTS: Mapping[str, Callable[[str], str]] = {
    "half": lambda text: text[: len(text) // 2],
    "two": lambda text: text * 2,
    "slashes": lambda text: f"// mine\n{text}",
    "apostrophes": lambda text: text.replace('"', "'"),
    "huge-number": lambda text: text.replace('"pins"', '"pins": 1e400, "more"', 1),
    "surrogate": lambda text: text.replace('"pools"', '"po\\ud800ols"', 1),
    "number": lambda _: "1",
    "null": lambda _: "null",
}
BAD_PLANS = (*_PLANS, *_PLAN_TEXTS)


_PROMPTS = {
    "prompts-half": b'{"prompt": "w1"}\n{"prompt": "w1"\n',
    "prompts-number": b'{"prompt": 3}\n',
    "prompts-array": b'[{"prompt": "w1"}]\n',
    "prompts-latin": '{"prompt": "caf\u00e9"}\n'.encode("latin-1"),
    "prompts-blank": b"\n\n",
}
BAD_PROMPTS = tuple(_PROMPTS)
_SCRIPTS = {
    "comments.sh": "# nothing\n",
    "unclosed.sh": 'python3 -m verl.trainer.main_ppo "data.train_batch_size=8\n',
    "unset.sh": "python3 -m verl.trainer.main_ppo data.train_batch_size=$BATCH\n",
    "command.sh": "python3 -m verl.trainer.main_ppo data.train_batch_size=$(cat x)\n",
    "equals.sh": "python3 -m verl.trainer.main_ppo a==b data.train_batch_size=\n",
    "cycle.yaml": "defaults: cycle.yaml\n",
    "list.yaml": "- 1\n",
}
BAD_SCRIPTS = tuple(_SCRIPTS)


def prepare(directory: Path) -> None:
    """Everything that the invocations read, under `in`."""
    folder = directory / "in"
    folder.mkdir(parents=True)
    job = write_job(folder, num_ranks=2).rename(folder / "job.yaml")
    write_plan(folder / "plan.json", request(job, directory / "unused").plan)
    _write_jobs(folder, yaml.safe_load(job.read_text()))
    _write_plans(folder)
    _write_files(folder)
    _write_runs(folder)


def _write_jobs(folder: Path, good: Tree) -> None:
    jobs = folder / "jobs"
    jobs.mkdir()
    for source in good["models"].values():
        source["path"] = f"../{source['path']}"
    good["data"] = {"prompts": "../prompts.jsonl", "tokenizer": "../tokenizer"}
    for name, edit in (_EDITS | _ODD_EDITS).items():
        tree = copy.deepcopy(good)
        edit(tree)
        (jobs / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    for name, encode in _ENCODINGS.items():
        (jobs / f"{name}.yaml").write_bytes(encode(yaml.safe_dump(good)))
    for name, text in _TEXTS.items():
        (jobs / f"{name}.yaml").write_text(text)
    text = yaml.safe_dump(good)
    (jobs / "precision-twice.yaml").write_text(text + "precision: bf16\n")
    (jobs / "model-twice.yaml").write_text(text.replace("  actor:\n", "  actor:\n    path: x\n  actor:\n", 1))
    for name in BAD_PROMPTS:
        data = {**good["data"], "prompts": f"../{name}.jsonl"}
        (jobs / f"{name}.yaml").write_text(yaml.safe_dump({**good, "data": data}))
    other = copy.deepcopy(good)
    other["workload"]["batch_size"] = 32
    (jobs / "another.yaml").write_text(yaml.safe_dump(other))
    config = json.loads((folder / "actor" / "config.json").read_text())
    texts = {name: json.dumps({**config, key: value}) for name, (key, value) in _CONFIGS.items()}
    texts |= {"list": "[]", "deep": "[" * 100_000, "empty": "", "twice": '{"vocab_size": 1, "vocab_size": 2}'}
    for name, said in texts.items():
        (jobs / f"{name}.json").write_text(said)
        (jobs / f"model-{name}.yaml").write_text(
            yaml.safe_dump({**good, "models": {**good["models"], "actor": {"path": f"{name}.json"}}})
        )


def _write_plans(folder: Path) -> None:
    (folder / "plans").mkdir()
    path = folder / "plans" / "good.json"
    write_plan(path, small_plan(1))
    for name, edit in _PLANS.items():
        tree = json.loads(path.read_text())
        edit(tree)
        (folder / "plans" / f"{name}.json").write_text(json.dumps(tree))
    for name, change in _PLAN_TEXTS.items():
        (folder / "plans" / f"{name}.json").write_text(change(path.read_text()))
    tree = json.loads((folder / "plan.json").read_text())
    (folder / "later.json").write_text(json.dumps({**tree, "schema_version": SCHEMA_VERSION + 1}))
    (folder / "twice.json").write_text((folder / "plan.json").read_text().replace("{", '{"schema_version": 1,', 1))
    (folder / "nan.json").write_text(json.dumps({**tree, "period_seconds": float("nan")}))


def _write_files(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 16)
    (folder / "mine.txt").write_text("what a user wrote\n")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "table.json").write_text('{"collectives": []}')
    (folder / "spare.2.json").write_text("{}")
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)
    (folder / "link").symlink_to(folder / "mine.txt")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    for name, text in _PROMPTS.items():
        (folder / f"{name}.jsonl").write_bytes(text)
    for name, text in _SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "hard").hardlink_to(folder / "mine.txt")
    (folder / "held").mkdir()
    (folder / "held" / "run.lock").touch()
    (folder / "half" / "checkpoints" / "step-000005").mkdir(parents=True)


def _write_runs(folder: Path) -> None:
    """A run of the plan and a rehearsal of another."""
    for name, plan in (("run", folder / "plan.json"), ("other", folder / "plans" / "good.json")):
        (folder / name).mkdir()
        shutil.copy(plan, folder / name / "plan.json")
        write_spans(folder / name / "trace.jsonl", simulate(small_plan(1), steps=2, traced=True).spans)
