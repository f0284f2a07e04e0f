"""Every kind of file that a command reads, a good one of each, and the commands that read it.

A checkpoint is read by ranks: what they call to read it is called here as they call it, in one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml

from benchmarks.survival.job import Case, planned_ahead, write_job, write_models
from benchmarks.survival.matrix import PLAIN
from benchmarks.survival.mutations import Form
from meshwright.planner.plan.plan import write_plan
from meshwright.runtime.execution.resume import best_step, latest_checkpoint
from meshwright.runtime.inference.in_flight import read_all_in_flight_states
from meshwright.runtime.records.record import evaluations
from meshwright.runtime.records.restarts import Restart, read_restarts, write_restart
from meshwright.runtime.records.run_lines import elapsed_seconds, observations
from meshwright.runtime.training.checkpoint_integrity import find_damage, require_safe_pickles

OUT = "out"
"""Where commands may write."""
CASE = Case(name="job", num_ranks=1, pins=PLAIN, staleness=1, ahead=1)
TRAINERS: Mapping[str, str] = {"verl": "run.sh", "nemo-rl": "config.yaml", "openrlhf": "run.sh", "slime": "run.sh"}
"""The file of each that `export` writes."""
_GPUS = ("--device", "h100-sxm")

Read = tuple[str, ...] | Callable[[Path], object]
"""A command, or what is called with the directory."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file: where a good one is, how it is written, and what reads it."""

    name: str
    path: str
    form: Form
    reads: Sequence[Read]


def write(directory: Path) -> None:
    """A good file of every kind. Takes a minute: a table is measured, and two short runs are made."""
    directory.mkdir(exist_ok=True)
    write_models(directory, hidden_size=16)
    _write_prompts(directory)
    write_plan(directory / "plan.json", planned_ahead(_job(directory), CASE)[1])
    (directory / OUT).mkdir()
    _command(directory, "profile", "job.yaml", "-o", "table.json", "--minutes", "0.05")
    _command(directory, "plan", "job.yaml", "-o", "proven.json", "--proof", "proof.json")
    (directory / "pins.txt").write_text("actor_train.layout=tp1,pp1,dp1\nactor_train.micro_batch_size=4  # rows\n")
    _write_runs(directory)
    _write_configurations(directory)


def kinds(directory: Path) -> tuple[Kind, ...]:
    """All of them, in the directory that `write` made."""
    checkpoint = latest_checkpoint(directory / "run")
    assert checkpoint is not None
    here = checkpoint.relative_to(directory)
    skipped = next((directory / "bad" / "skipped").glob("*.safetensors")).relative_to(directory)
    return (
        *_of_planning(),
        *_of_models(),
        *_of_prompts(),
        *_of_runs(),
        Kind(name="manifest", path=f"{here}/manifest.json", form=Form.JSON, reads=(lambda d: find_damage(d / here),)),
        Kind(
            name="metadata",
            path=f"{here}/.metadata",
            form=Form.BYTES,
            reads=(lambda d: require_safe_pickles(d / here),),
        ),
        Kind(
            name="common", path=f"{here}/common.pt", form=Form.BYTES, reads=(lambda d: require_safe_pickles(d / here),)
        ),
        Kind(
            name="in flight",
            path=f"{here}/in_flight-00000.safetensors",
            form=Form.SAFETENSORS,
            reads=(lambda d: read_all_in_flight_states(d / here),),
        ),
        Kind(name="skipped batch", path=str(skipped), form=Form.SAFETENSORS, reads=(("replay", str(skipped)),)),
        *(
            Kind(
                name=f"{trainer} configuration",
                path=f"{trainer}/{file}",
                form=Form.YAML if file.endswith(".yaml") else Form.TEXT,
                reads=(("import", f"{trainer}/{file}", "--from", trainer, *_GPUS, "-o", f"{OUT}/job.yaml"),),
            )
            for trainer, file in TRAINERS.items()
        ),
    )


_BEGUN = ("--steps", "1", "--out", "run")
"""A run that is refused when everything was read: its directory holds a run already."""


def _run(job: str) -> Read:
    return "run", "plan.json", job, *_BEGUN


def _of_planning() -> tuple[Kind, ...]:
    out = ("-o", f"{OUT}/made.json")
    scripts = ("export", "plan.json", "job.yaml", "--to", "slurm", "-o", f"{OUT}/scripts")
    limited = ("--time-limit", "0.5", "--gap", "0.9")
    return (
        Kind(
            name="job",
            path="job.yaml",
            form=Form.YAML,
            reads=(scripts, scripts, scripts, ("plan", "job.yaml", "--pins", "plan.json", *limited, *out)),
        ),
        Kind(
            name="plan",
            path="plan.json",
            form=Form.JSON,
            reads=(
                *(("verify", "plan.json"), scripts, ("compare", "plan.json", "proven.json")),
                *(("explain", "plan.json"), ("simulate", "plan.json", "--steps", "2"), ("watch", "run", "--once")),
            ),
        ),
        Kind(
            name="table",
            path="table.json",
            form=Form.JSON,
            reads=(
                ("verify", "plan.json", "--profile", "table.json"),
                ("simulate", "plan.json", "--steps", "2", "--profile", "table.json"),
            ),
        ),
        Kind(
            name="proof", path="proof.json", form=Form.JSON, reads=(("verify", "proven.json", "--proof", "proof.json"),)
        ),
        Kind(
            name="pins",
            path="pins.txt",
            form=Form.TEXT,
            reads=(("plan", "job.yaml", "--pins", "pins.txt", *limited, *out),),
        ),
    )


def _of_models() -> tuple[Kind, ...]:
    init = ("init", "actor", *_GPUS, "--batch", "8", "--prompt", "8", "--response", "8", "-o", f"{OUT}/made.yaml")
    run = _run("job.yaml")
    return (
        Kind(name="model config", path="actor/config.json", form=Form.JSON, reads=(init, init, run)),
        Kind(name="generation config", path="actor/generation_config.json", form=Form.JSON, reads=(run,)),
        Kind(name="weights", path="actor/model.safetensors", form=Form.SAFETENSORS, reads=(run,)),
        Kind(name="index", path="indexed/model.safetensors.index.json", form=Form.JSON, reads=(_run("indexed.yaml"),)),
        Kind(name="tokenizer", path="tokenizer.json", form=Form.JSON, reads=(run,)),
    )


def _of_prompts() -> tuple[Kind, ...]:
    named = (
        ("prompts.jsonl", Form.LINES, "job.yaml"),
        ("prompts.parquet", Form.BYTES, "parquet.yaml"),
        ("dataset/dataset_dict.json", Form.JSON, "dataset.yaml"),
        ("dataset/train/state.json", Form.JSON, "dataset.yaml"),
        ("dataset/train/data-00000-of-00001.arrow", Form.BYTES, "dataset.yaml"),
    )
    return tuple(
        Kind(name=f"prompts: {Path(path).name}", path=path, form=form, reads=(_run(job),)) for path, form, job in named
    )


def _of_runs() -> tuple[Kind, ...]:
    out = ("-o", f"{OUT}/made.json")
    whole = (
        ("watch", "run", "--once"),
        ("report", "plan.json", "run", "-o", f"{OUT}/page.html", "--steps", "1"),
        ("calibrate", "plan.json", "run", "-o", f"{OUT}/table.json"),
        ("replan", "plan.json", "run", *out),
    )
    beside = ("simulate", "plan.json", "--steps", "1", "--beside", "run/trace.jsonl", "--trace", f"{OUT}/line.json")
    resumed = ("run", "plan.json", "job.yaml", "--steps", "9", "--out", "run", "--resume")
    nowhere = ("--rendezvous", "255.255.255.255:0")
    return (
        Kind(name="trace", path="run/trace.jsonl", form=Form.LINES, reads=(*whole, beside, _elapsed)),
        Kind(name="metrics", path="run/metrics.jsonl", form=Form.LINES, reads=(*whole, _observed)),
        Kind(name="evaluations", path="run/evaluations.jsonl", form=Form.LINES, reads=(whole[0], _evaluated)),
        Kind(name="restarts", path="run/restarts.jsonl", form=Form.LINES, reads=(lambda d: read_restarts(d / "run"),)),
        Kind(name="plan of a run", path="run/plan.json", form=Form.JSON, reads=whole),
        Kind(name="run.json", path="run/run.json", form=Form.JSON, reads=((*resumed, *nowhere),)),
    )


def _elapsed(directory: Path) -> object:
    return elapsed_seconds(directory / "run")


def _observed(directory: Path) -> object:
    return observations(directory / "run", 9)


def _evaluated(directory: Path) -> object:
    return best_step([1, 2], evaluations(directory / "run"))


def _job(directory: Path) -> Path:
    """The job, and others that differ in where prompts and weights are."""
    written = yaml.safe_load(write_job(directory, CASE).read_text())
    written["data"]["held_out"] = "held-out.jsonl"
    indexed = {**written["models"], "actor": {"path": "indexed"}}
    data = {name: {**written["data"], "prompts": path} for name, path in _PROMPTS.items()}
    for name, change in (
        ("job", {}),
        ("indexed", {"models": indexed}),
        *((name, {"data": data[name]}) for name in data),
    ):
        (directory / f"{name}.yaml").write_text(yaml.safe_dump({**written, **change}))
    return directory / "job.yaml"


_PROMPTS = {"parquet": "prompts.parquet", "dataset": "dataset"}


def _write_prompts(directory: Path) -> None:
    """In every format, and the policy's weights behind an index."""
    rows = (directory / "prompts.jsonl").read_text().splitlines()[:16]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (directory / "held-out.jsonl").write_text("\n".join(rows[:4]) + "\n")
    table = pyarrow.Table.from_pylist([json.loads(row) for row in rows])
    pyarrow.parquet.write_table(table, directory / "prompts.parquet")
    train = directory / "dataset" / "train"
    train.mkdir(parents=True)
    file = "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(train / file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (train / "state.json").write_text(json.dumps({"_data_files": [{"filename": file}], "_split": "train"}))
    (directory / "dataset" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    indexed = directory / "indexed"
    indexed.mkdir()
    for path in (directory / "actor").iterdir():
        (indexed / path.name.replace("model.safetensors", "part.safetensors")).write_bytes(path.read_bytes())
    content = (indexed / "part.safetensors").read_bytes()
    names = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).keys() - {"__metadata__"}
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "part.safetensors")}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_runs(directory: Path) -> None:
    """One that went well, and one that skipped batches."""
    _command(directory, "run", "plan.json", "job.yaml", "--steps", "3", "--checkpoint-every", "1", "--out", "run")
    restart = Restart(number=1, host="one", reason="rank 0 failed", reached=2, saved=1)
    write_restart(directory / "run", restart)
    job = yaml.safe_load((directory / "job.yaml").read_text())
    job["ppo"]["actor_learning_rate"] = 1e30
    (directory / "bad.yaml").write_text(yaml.safe_dump(job))
    _command(directory, "run", "plan.json", "bad.yaml", "--steps", "6", "--out", "bad", may_fail=True)


def _write_configurations(directory: Path) -> None:
    """Of each trainer, for a plan that it can say."""
    job = yaml.safe_load((directory / "job.yaml").read_text())
    job |= {"cluster": {"device": "h100-sxm", "ranks_per_node": 2}, "precision": "bf16", "staleness": 0}
    (directory / "gpus.yaml").write_text(yaml.safe_dump(job))
    for trainer, file in TRAINERS.items():
        plan = f"{trainer}.json"
        _command(directory, "plan", "gpus.yaml", "--for", trainer, "--gap", "0.5", "-o", plan)
        _command(directory, "export", plan, "gpus.yaml", "--to", trainer, "-o", trainer)
        assert (directory / trainer / file).exists()


def _command(directory: Path, *arguments: str, may_fail: bool = False) -> None:
    program = str(Path(sys.executable).with_name("meshwright"))
    ended = subprocess.run([program, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if ended.returncode and not may_fail:
        raise RuntimeError(f"{arguments}: {ended.stderr}")
