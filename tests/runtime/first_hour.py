"""Mistakes of a first hour: command lines that a new user types, and the words of each answer that say what to do.

All paths are in the directory that `prepare` makes. `prepare_plan` adds what takes longer: a plan.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.job.first_job import FirstJob
from meshwright.planner.job.job import read_job, resolve
from meshwright.planner.plan.plan import write_plan
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import write_job

_MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen2.5-7b"
_INIT = "init actor --batch 8 --prompt 8 --response 8 -o new.yaml --device"
_BIG = "plan big.yaml -o new.json"
_PIN = f"{_BIG} --pin actor_train"
_SET = "whatif plan.json --set"
_RUN = "run plan.json job.yaml --steps 1 --out new"
_IMPORT = "import script.sh -o new.yaml --from"

MISTAKES: Mapping[str, str] = {
    f"{_INIT} A100": "did you mean 'a100-40gb' or 'a100-80gb'?",
    f"{_INIT} t4": "known: a100-40gb",
    f"{_INIT} H100-80": "did you mean 'h100-sxm'?",
    f"{_INIT} h100 --gpus 16 --network infiniband": "did you mean 'ib-800-per-node', 'ib-edr-100'",
    f"{_INIT} h100 --gpus 16 --network efa": "did you mean 'efa-3200-per-node' or 'efa-400-per-node'?",
    f"{_INIT} h100 --algorithm GRPPO": "--algorithm 'GRPPO' is not known; did you mean 'grpo'?",
    f"{_INIT} h100 --gpus eight": "--gpus 'eight' is not a whole number; write one in digits.",
    f"{_INIT} h100 --batch 1k": "--batch 1k is not a whole number",
    f"{_INIT} h100 --cost 2": "see `meshwright init --help`.",
    f"{_INIT} h100 --price -2": "--price -2 is out of range; give 0 or more.",
    "init actor --device h100 --batch 8 --prompt 8": "missing option '--response'; see `meshwright init --help`.",
    f"{_INIT.replace('actor', 'Qwen/Qwen2.5-7B')} h100": "(`hf download NAME --local-dir DIR` fetches one).",
    f"{_INIT.replace('actor', 'tokenizer')} h100": "there is no tokenizer/config.json; give a Hugging Face directory",
    f"{_INIT.replace('actor', 'bert.json')} h100": "architecture 'BertForMaskedLM' is not known; known: Llama",
    f"{_INIT.replace('new', 'nowhere/new')} h100": "there is no directory nowhere; make it, or name another file.",
    "devices h100": "see `meshwright devices --help`.",
    "fit big.yaml --price free": "--price 'free' is not a number",
    "fit big.yaml --price -2": "--price -2 is out of range; give 0 or more.",
    "fit big.yaml --sizes 8-32": "write it like 8,16,32.",
    "fit big.yaml --sizes 12": "use 8 or 16.",
    "fit big.yaml --plot sizes.png": "name one that ends in .html.",
    "fit big.yaml --trace-field response=tokens": "give --from-trace too.",
    "fit big.yaml --from-trace prompts.jsonl": "name the key that has it with --trace-field response=KEY.",
    "plan job.yaml": "missing option '-o' / '--output'",
    "plan actor -o new.json": "it is a directory; name a file.",
    f"{_BIG} --price $2.50": "--price '$2.50' is not a number; write one, such as 0.5.",
    f"{_BIG} --gap 5%": "--gap '5%' is not a number",
    "plan big.yaml --output": "option '--output' requires an argument; see `meshwright plan --help`.",
    "plan nothing.yaml -o new.json": "the document is empty and should be an object",
    "plan list.yaml -o new.json": "...); give models.",
    "plan broken.yaml -o new.json": "is not YAML at line 2:",
    f"{_BIG} --profile broken.json": "line 1 column 8 (char 7); correct it there, or write the file anew.",
    f"{_BIG} --gap 1": "--gap 1 is out of range; give 0.99 at most.",
    f"{_BIG} --for trl": "--for 'trl' is not known; known: areal, nemo-rl, openrlhf, skyrl, slime, verl.",
    f"{_BIG} --from big.yaml": "a plan is JSON; give the plan that was written for it.",
    f"{_BIG} --proof new.json": "are the same file; name two.",
    f"{_BIG} --time-limit inf": "--time-limit inf is not a finite number; give one.",
    f"{_PIN}.tp=8": "tp=8 does not divide the 28 attention heads of qwen2.5-7b; use tp=4.",
    f"{_PIN}.ep=2": "since ep=2 spreads experts, and qwen2.5-7b has none; the nearest legal value is 1.",
    f"{_PIN}.pp=9": "its pool has 1, 2, 3, 4, 5, 6, 7 or 8; the nearest legal value is",
    f"{_PIN}.dp=16": "takes 16 ranks and its pool has 1, 2, 3, 4, 5, 6, 7 or 8; the nearest legal value is 8.",
    f"{_PIN}.vpp=5": "on each of pp=2 stages; the nearest legal value is 7.",
    f"{_PIN}.cp=4": "use cp=1 at most.",
    f"{_PIN}.micro_batch_size=3": "does not divide the 512 sequences of a replica; the nearest legal value is 2.",
    f"{_PIN}.tp:2": "is not of the form stage.key=value",
    f"{_PIN}.offload=params": "known: none, optimizer, weights.",
    f"{_PIN}.tp=2 --forbid actor_train.tp=2": "exclude each other; remove one.",
    f"{_BIG} --pin actor.tp=2": "did you mean 'actor_generate', 'actor_logprob' or 'actor_train'?",
    f"{_BIG} --pin rollout.tp=2": "there is no stage 'rollout'; known: actor_generate",
    f"{_BIG} --pin ref_logprob.vpp=2": "vpp=2 is only for a stage that trains; the nearest legal value is 1.",
    f"{_BIG} --pin actor_generate.slots=64": "did you mean 'generation_slots'?",
    f"{_BIG} --pin actor_generate.cp=2": "generation samples one token at a time; use cp=1.",
    "plan grpo.yaml -o new.json --pin critic_train.tp=2": "'critic_train'; did you mean 'actor_train'?",
    "verify job.yaml": "job.yaml is YAML, as a job is, and a plan is JSON; give the plan",
    "explore big.yaml --grid cluster.nodes=1..4": "cluster.nodes is '1..4': input should be a valid integer.",
    "explore big.yaml --grid cluster.gpus=1,2": "did you mean cluster.nodes or cluster.ranks_per_node?",
    "explore big.yaml --grid cluster.nodes=1,2,3,4,5,6,7 --grid staleness=0,1,2,3,4": "give at most 32.",
    "explore big.yaml --port 99999": "--port 99999 is out of range; give 65535 at most.",
    "explore big.yaml --set workload.response.scale=many": "is not a number above 0; use one, such as 2.",
    "watch empty --once": "empty holds no plan.json; give the --out of `meshwright run`.",
    "schema cluster": "argument 'cluster' is not known; known: job, plan, table.",
    "reward job.yaml": "argument 'job.yaml' is not known; known: try.",
    "reward try job.yaml": "add rewards, a list of functions and judges.",
    "reward try graded.yaml": "give --allow-module mine if you trust it.",
    "reward try answered.yaml": 'needs an "answer" text beside every prompt',
    "rollouts prompts.jsonl --tokenizer tokenizer": "write an object with messages",
    f"{_IMPORT} trl --device h100": "--from 'trl' is not known; known: areal, nemo-rl, openrlhf, skyrl, slime, verl.",
    f"{_IMPORT} verl": "missing option '--device'",
    "profile job.yaml -o new.json --device gpu": "--device 'gpu' is not cpu or cuda",
    "pln job.yaml": "there is no command 'pln'; did you mean 'plan'?",
    "train plan.json": "there is no command 'train'; known: calibrate, compare",
}
"""Command lines that need no plan."""

MISTAKES_WITH_A_PLAN: Mapping[str, str] = {
    "plan plan.json -o new.json": "plan.json is a plan, and a job is needed here; give the job.",
    f"{_BIG} --profile plan.json": "plan.json is a plan, and a table is needed here; give the table.",
    "verify plan.json --proof plan.json": "plan.json is a plan, and a proof is needed here; give the proof.",
    "explain plan.json --per-steps 1e3": "--per-steps 1e3 is not a whole number",
    "compare plan.json": "missing argument 'OTHER.json'",
    "simulate plan.json --durations real": "--durations 'real' is not known; known: planned, sampled.",
    "simulate plan.json --seed 99999999999": "--seed 99999999999 is out of range; give 4294967295 at most.",
    "rehearse plan.json --steps 100000": "--steps 100000 is out of range; give 10000 at most.",
    f"{_SET} workload.response.scale=0": "is not a number above 0; use one, such as 2.",
    f"{_SET} response.scale=2": "did you mean workload.prompt.scale or workload.response.scale?",
    f"{_SET} rewards.0.latency_seconds.scale=2": "rewards has no field 0.latency_seconds.scale in this job.",
    f"{_SET} cluster.device=h100s": "did you mean 'h100-sxm'?",
    f"{_SET} gpus=2": "did you mean cluster.nodes or cluster.ranks_per_node?",
    f"{_SET} models.actor=llama": "should be an object with keys (name, architecture",
    f"{_SET} cluster.nodes=1,2 --plot new.png": "name one that ends in .html.",
    f"{_RUN} --resample": "give --resume too.",
    f"{_RUN} --model actor": "write it like actor=/data/models/actor.",
    f"{_RUN} --model policy=actor": "there is no role 'policy'; known: actor",
    f"{_RUN} --nodes 2": "give --nodes 1, or plan the job again with cluster.nodes: 2.",
    f"{_RUN} --node-rank 1": "--node-rank 1 is not a node of the plan; give 0.",
    f"{_RUN} --rendezvous 10.0.0.1": "write it like 10.0.0.1:29500, or [fd00::1]:29500.",
    "run plan.json big.yaml --steps 1 --out new": "the plan was made for another job",
    "run job.yaml plan.json --steps 1 --out new": "job.yaml is YAML, as a job is, and a plan is JSON",
    "calibrate plan.json nowhere -o new.json": "nowhere is not a directory; give the --out of `meshwright run`.",
    "replan plan.json empty": "empty holds no plan.json; give the --out of `meshwright run`.",
    "replay plan.json": "give a file from a run's skipped directory.",
    "export plan.json --to slurm -o new": "export plan.json job.yaml --to slurm.",
    "export plan.json job.yaml --to kubernetes -o new": "--to 'kubernetes' is not known; known: hf, k8s",
    "export plan.json job.yaml --to ray -o empty": "name another directory.",
    "export empty --to hf -o new": "empty holds no plan.json; give the --out of `meshwright run`.",
    "report plan.json empty -o new.html": "empty holds no trace.jsonl; give the --out of",
    "report plan.json -o new.pdf": "-o new.pdf is not an HTML file; name one that ends in .html.",
}
"""Command lines about a plan, or beside one."""

_EDITS: Mapping[str, tuple[str, object, str]] = {
    "device": ("cluster.device", "A100", "did you mean 'a100-40gb' or 'a100-80gb'?"),
    "algorithm": ("algorithm", "GRPO", "algorithm is 'GRPO': input should be 'ppo', 'grpo'"),
    "path": ("models.actor", "actor", "models.actor is 'actor' and should be an object with keys (path, adapter"),
    "hub": ("models.actor.path", "Qwen/Qwen2.5-7B", "(`hf download NAME --local-dir DIR` fetches one)."),
    "response": (
        "workload.response",
        24,
        "object with keys (max, fixed, median, p99, histogram); give max.",
    ),
    "mean": ("workload.response", {"max": 24, "mean": 12}, "did you mean 'median'?"),
    "longer": ("workload.prompt", {"max": 8, "fixed": 9}, "workload.prompt: fixed=9 is longer than max=8."),
    "batch": ("workload.batch", 8, "did you mean 'batch_size'?"),
    "precision": ("precision", "fp16", "input should be 'fp32' or 'bf16'."),
    "gpus": ("cluster.gpus", 8, "write nodes and ranks_per_node."),
    "reward": ("rewards", [{"name": "m", "function": "maths_answers"}], "one of exact_match, maths_answer"),
    "dotted": ("rewards", [{"name": "m", "function": "mine.score"}], "nor of the form module:function."),
    "neither": ("rewards", [{"name": "m"}], "give one of: function, or url."),
    "twins": (
        "rewards",
        [{"name": "m", "url": "http://a"}, {"name": "m", "url": "http://b"}],
        "give each reward its own",
    ),
    "data": ("data", "prompts.jsonl", "should be an object with keys (prompts, held_out, tokenizer"),
    "rate": ("ppo.learning_rate", 1e-6, "did you mean 'actor_learning_rate'?"),
    "penalty": ("ppo.kl_coef", 0.1, "did you mean 'kl_coefficient'?"),
    "settings": ("grpo", {"kl_coefficient": 0.0}, "move them there or remove them."),
}
"""Values of one key of a job that is otherwise right, and the words that say what to write instead."""

EDITED_JOBS: Mapping[str, str] = {f"plan {name}.yaml -o new.json": words for name, (_, _, words) in _EDITS.items()}
"""Command lines that plan the edited jobs."""


def prepare(directory: Path) -> None:
    """Write what the command lines read, but for the plan."""
    job = write_job(directory, num_ranks=2).rename(directory / "job.yaml")
    good = yaml.safe_load(job.read_text())
    sizes: dict[str, Any] = {"device": "h100", "batch_size": 512, "prompt": 512, "response": 2048}
    (directory / "big.yaml").write_text(FirstJob(model=_MODEL, **sizes).text(directory))
    (directory / "grpo.yaml").write_text(FirstJob(model=_MODEL, algorithm="grpo", **sizes).text(directory))
    for name, function in (("graded", "mine:score"), ("answered", "maths_answer")):
        graded = {key: value for key, value in good.items() if key != "ppo"}
        graded["models"] = {role: good["models"][role] for role in ("actor", "ref")}
        graded["workload"] = {**good["workload"], "group_size": 4}
        graded |= {"algorithm": "grpo", "rewards": [{"name": "mine", "function": function}]}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(graded))
    for name, (path, value, _) in _EDITS.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(_edited(good, path.split("."), value)))
    (directory / "empty").mkdir()
    for name, text in (
        ("nothing.yaml", ""),
        ("list.yaml", "- 1\n"),
        ("broken.yaml", "a: [1\n"),
        ("broken.json", '{"a": 1'),
    ):
        (directory / name).write_text(text)
    (directory / "bert.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "hidden_size": 8}))
    (directory / "script.sh").write_text("python -m verl.trainer.main_ppo algorithm.adv_estimator=gae\n")


def prepare_plan(directory: Path) -> None:
    """Write the plan of the job, without a search."""
    facts = resolve(read_job(directory / "job.yaml"), directory)
    write_plan(directory / "plan.json", plan_by_hand(facts, {"other": Where("0:2", "dp2")}))


def _edited(job: dict[str, Any], keys: list[str], value: object) -> dict[str, Any]:
    edited = copy.deepcopy(job)
    inside = edited
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    return edited
