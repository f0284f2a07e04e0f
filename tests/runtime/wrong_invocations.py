"""Wrong invocations of every command: what each is given, and that it ends in one sentence with everything in place.

`python -m tests.runtime.wrong_invocations` prints them all as a table. A worker calls the command line in its own
process, one invocation after the other, each with an alarm; the test and the table read what it tells.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import typer

from meshwright.runtime.cli import main
from meshwright.runtime.records.run_directory import locked
from tests.runtime.wrong_inputs import BAD_JOBS, BAD_MODELS, BAD_PLANS, BAD_PROMPTS, BAD_SCRIPTS, prepare

_WORKERS = 2
SECONDS = 30
"""After which an invocation is said to hang."""


@dataclass(frozen=True)
class Ended:
    """One invocation and how it ended; `peak_mib` is the most memory that the worker had by then."""

    arguments: tuple[str, ...]
    code: int
    sentence: str
    seconds: float
    peak_mib: float


_NOT_POSITIVE = ("0", "-1", "x", "")
_NOT_FINITE = ("nan", "inf", "-inf", "1e999")
_OUTPUTS = (".", "..", "/", "/dev/full", "/dev/null", "in", "in/pipe", "in/mine.txt", "in/plan.json/x", "/proc/x/y")
_INPUTS = ("in/none", "in", "in/pipe", "/dev/zero", "in/empty", "in/binary", "in/huge", "in/mine.txt", "in/deep.json")
_PLAN = "in/plan.json"


def invocations() -> Iterator[tuple[str, ...]]:
    """All of them, in the directory that `prepare` made."""
    yield from _usage()
    yield from _first_steps()
    yield from _trainers()
    yield from _numbers()
    yield from _outputs()
    yield from _inputs()
    yield from _documents()
    yield from _choices()
    yield from _odd_paths()
    yield from _odd_choices()
    yield from _odd_documents()


def _usage() -> Iterator[tuple[str, ...]]:
    yield from (("pln",), ("plan",), ("--plan",), ("verify",), ("whatif", _PLAN), ("schema", "jobs"), ("schema",))
    commands = "plan profile run export report calibrate simulate rehearse explain replan replay verify whatif schema"
    for command in commands.split():
        yield command, "--colour"
        yield command, *(["in/job.yaml"] * 9)
    explore = ("explore", "in/job.yaml")
    yield from ((*explore, "--port", port) for port in ("-1", "65536", "http"))
    yield from ((*explore, "--set", text) for text in ("cluster.nodes", "cluster.knots=2", "cluster.nodes=1,2", "=1"))
    yield from ((*explore, "-o", "out.json", "--pin", pin) for pin in ("actor_train", "actor_train.tp=3", "actor.tp=1"))
    yield from (("explore", wrong) for wrong in _INPUTS)
    yield from (("reward", "in/job.yaml"), ("reward", "tri", "in/job.yaml"), ("reward", "try", "in/job.yaml"))
    yield "run", _PLAN, "in/job.yaml"
    yield "run", _PLAN, "in/job.yaml", "--steps", "1"
    yield "export", _PLAN, "in/job.yaml", "-o", "out"
    yield "export", _PLAN, "in/job.yaml", "--to", "kubernetes", "-o", "out"
    yield "simulate", _PLAN, "--durations", "guessed"
    yield "profile", "in/job.yaml", "-o", "out.json", "--device", "tpu"
    yield "profile", "in/job.yaml", "-o", "out.json", "--from", "hearsay"
    yield "profile", "-o", "out.json"


def _first_steps() -> Iterator[tuple[str, ...]]:
    numbers = ("--batch", "8", "--prompt", "8", "--response", "8")
    first = ("init", "in/actor", "--device", "h100-sxm", *numbers, "-o", "out.yaml")
    for option in ("--batch", "--prompt", "--response", "--gpus"):
        for value in (*_NOT_POSITIVE, "1.5", "100000000000"):
            yield (*first, option, value)
    for wrong in (*_INPUTS, "in/job.yaml"):
        yield "init", wrong, "--device", "h100-sxm", *numbers, "-o", "out.yaml"
        yield "plan", "in/job.yaml", "-o", "out.json", "--pins", wrong
        yield "compare", _PLAN, wrong
        yield from (("fit", wrong),) if wrong in _INPUTS else ()
    yield (*first, "--device", "a100")
    yield (*first, "--gpus", "12")
    yield (*first[:-1], "in/job.yaml")
    for sizes in ("", "x", "0", "-8", "3", "1000000000000"):
        yield "fit", "in/job.yaml", "--sizes", sizes


def _trainers() -> Iterator[tuple[str, ...]]:
    for trainer in ("verl", "nemo-rl", "openrlhf", "slime", "skyrl", "areal"):
        for wrong in (*_INPUTS, "in/job.yaml", "in/plan.json"):
            yield "import", wrong, "--from", trainer, "--device", "h100-sxm", "-o", "out.yaml"
        yield "export", "in/job.yaml", "--to", trainer, "-o", "out"
        yield "export", _PLAN, "in/jobs/another.yaml", "--to", trainer, "-o", "out"
        yield "export", _PLAN, "in/job.yaml", "--to", trainer, "-o", "in"
        yield "export", _PLAN, "in/job.yaml", "--to", trainer, "--ranks", "2", "-o", "out"
    yield "plan", "in/job.yaml", "--for", "verll", "-o", "out.json"
    yield "import", "in/job.yaml", "--from", "verl", "--device", "h100-sxm", "-o", "in/job.yaml"


def _numbers() -> Iterator[tuple[str, ...]]:
    whole = (*_NOT_POSITIVE, "1.5", "nan", "100000000000")
    real = (*_NOT_FINITE, "-1", "x", "")
    plan, run = ("plan", "in/job.yaml", "-o", "out.json"), ("run", _PLAN, "in/job.yaml", "--out", "out")
    options: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
        (plan, "--time-limit", (*real, "0")),
        (
            ("import", "in/job.yaml", "--from", "verl", "--device", "h100-sxm", "-o", "out.yaml"),
            "--time-limit",
            (*real, "0"),
        ),
        (plan, "--gap", (*real, "1")),
        (plan, "--top", whole),
        (plan, "--price", real),
        (plan, "--per-steps", whole),
        (("reward", "try", "in/job.yaml"), "--rows", whole),
        (("whatif", _PLAN, "--set", "cluster.nodes=2"), "--price", real),
        (("whatif", _PLAN, "--set", "cluster.nodes=2"), "--gap", (*real, "1")),
        (("explain", _PLAN), "--price", real),
        (("explain", _PLAN), "--sizes", ("", "x", "0", "-8", "3", "1.5", "10^12", "1000000000000", "8,,16")),
        (("report", _PLAN, "-o", "out.html"), "--sizes", ("", "x", "0", "-8", "3", "1000000000000")),
        (("report", _PLAN, "-o", "out.html"), "--steps", whole),
        (("report", _PLAN, "-o", "out.html"), "--price", real),
        (("simulate", _PLAN), "--steps", whole),
        (("simulate", _PLAN), "--seed", ("-1", "x", "1.5", "100000000000000")),
        (("rehearse", _PLAN), "--steps", whole),
        (("rehearse", _PLAN), "--speed", (*real, "0")),
        (("rehearse", _PLAN), "--ranks-per-process", whole),
        (("profile", "in/job.yaml", "-o", "out.json"), "--minutes", (*real, "0")),
        (("replan", _PLAN, "in/run"), "--lost-nodes", ("-1", "x", "1.5", "1", "100000000000")),
        (("replan", _PLAN, "in/run"), "--gap", (*real, "1")),
        (("export", "in/run", "--to", "hf", "-o", "out"), "--ranks", whole),
        (run, "--steps", whole),
        ((*run, "--steps", "1"), "--checkpoint-every", ("-1", "x", "1.5")),
        ((*run, "--steps", "1"), "--checkpoint-minutes", (*real, "10000000")),
        ((*run, "--steps", "1"), "--keep", _NOT_POSITIVE),
        ((*run, "--steps", "1"), "--export-every", ("-1", "x", "1.5")),
        ((*run, "--steps", "1"), "--replan-every", ("-1", "x", "1.5")),
        ((*run, "--steps", "1"), "--nodes", ("0", "2", "x")),
        ((*run, "--steps", "1"), "--node-rank", ("-1", "1", "x")),
        ((*run, "--steps", "1"), "--rendezvous", ("x", "host:x", "127.0.0.1:99999999")),
    ]
    for base, option, values in options:
        for value in values:
            yield (*base, option, value)


def _outputs() -> Iterator[tuple[str, ...]]:
    bases = (
        ("plan", "in/job.yaml", "-o"),
        ("profile", "in/job.yaml", "-o"),
        ("report", _PLAN, "-o"),
        ("report", _PLAN, "-o", "out.html", "--trace"),
        ("simulate", _PLAN, "--trace"),
        ("rehearse", _PLAN, "--trace"),
        ("whatif", _PLAN, "--set", "workload.num_epochs=1,2", "--plot"),
        ("calibrate", _PLAN, "in/run", "-o"),
        ("replan", _PLAN, "in/run", "-o"),
        ("plan", "in/job.yaml", "-o", "out.json", "--proof"),
    )
    for base in bases:
        for output in (*_OUTPUTS, "a" * 300, base[1], "in/link", "in/hard"):
            yield (*base, output)
    yield "plan", "in/job.yaml", "-o", "in/spare.json", "--top", "2", "--profile", "in/spare.2.json"
    yield "report", _PLAN, "-o", "out", "--trace", "./out"
    for directory in ("in", "in/job.yaml", "/dev/null", "/proc/x", "in/pipe"):
        yield "export", _PLAN, "in/job.yaml", "--to", "slurm", "-o", directory
        yield "export", "in/run", "--to", "hf", "-o", directory
        yield "rehearse", _PLAN, "--out", directory
    for directory in ("in/job.yaml", "/dev/null", "/proc/x", "in/pipe", "in/held"):
        yield "run", _PLAN, "in/job.yaml", "--steps", "1", "--out", directory
    yield "run", _PLAN, "in/job.yaml", "--steps", "1", "--out", "in/half", "--resume"


def _inputs() -> Iterator[tuple[str, ...]]:
    for wrong in (*_INPUTS, "in/job.yaml", "in/table.json", "in/later.json", "in/twice.json", "in/nan.json"):
        yield "verify", wrong
        yield "explain", wrong
    for wrong in _INPUTS:
        yield "simulate", wrong
        yield "rehearse", wrong
        yield "whatif", wrong, "--set", "cluster.nodes=2"
        yield "report", wrong, "-o", "out.html"
        yield "export", wrong, "in/job.yaml", "--to", "slurm", "-o", "out"
        yield "run", wrong, "in/job.yaml", "--steps", "1", "--out", "out"
        yield "run", _PLAN, "in/job.yaml", "--steps", "1", "--out", "out", "--profile", wrong
        yield "calibrate", wrong, "in/run", "-o", "out.json"
        yield "plan", wrong, "-o", "out.json"
        yield "profile", wrong, "-o", "out.json"
        yield "run", _PLAN, wrong, "--steps", "1", "--out", "out"
        yield "plan", "in/job.yaml", "-o", "out.json", "--profile", wrong
        yield "simulate", _PLAN, "--profile", wrong
        yield "report", _PLAN, wrong, "-o", "out.html"
        yield "calibrate", _PLAN, wrong, "-o", "out.json"
        yield "replan", wrong, "in/run"
        yield "replan", _PLAN, wrong
        yield "replan", _PLAN, "in/run", "--job", wrong
        yield "replan", _PLAN, "in/run", "--profile", wrong
        yield "export", wrong, "--to", "hf", "-o", "out"
        yield "plan", "in/job.yaml", "-o", "out.json", "--from", wrong
        yield "verify", _PLAN, "--proof", wrong
        yield "replay", wrong
        yield "verify", _PLAN, "--profile", wrong
    for wrong in (
        "in/none",
        "in",
        "in/pipe",
        "/dev/zero",
        "in/binary",
        "in/huge",
        "in/mine.txt",
        "in/other/trace.jsonl",
    ):
        yield "simulate", _PLAN, "--beside", wrong


def _documents() -> Iterator[tuple[str, ...]]:
    for name in BAD_JOBS:
        yield "plan", f"in/jobs/{name}.yaml", "-o", "out.json"
    for name in ("batch-1073741824", "nodes-100000000", "bomb", "precision-twice"):
        yield "profile", f"in/jobs/{name}.yaml", "-o", "out.json"
        yield "run", _PLAN, f"in/jobs/{name}.yaml", "--steps", "1", "--out", "out"
        yield "export", _PLAN, f"in/jobs/{name}.yaml", "--to", "slurm", "-o", "out"
    yield "export", _PLAN, "in/jobs/another.yaml", "--to", "slurm", "-o", "out"
    for name in BAD_MODELS:
        yield "plan", f"in/jobs/model-{name}.yaml", "-o", "out.json"
    for name in BAD_PLANS:
        yield "verify", f"in/plans/{name}.json"
        yield "simulate", f"in/plans/{name}.json"


def _choices() -> Iterator[tuple[str, ...]]:
    settings = (
        "x", "=3", "cluster.nodes", "cluster.nodes=", "cluster.node=4", "cluster.nodes=0", "cluster.nodes=1.5",
        "cluster.nodes=1000000000", "workload.batch_size=1073741824", "workload.batch_size=NaN", "cluster.device=h900",
        "workload.response.max=Infinity", "workload.response={}", "precision=fp8", "staleness=99", "models.actor=3",
        "cluster.inter_node=string", "cluster.device.flops_per_second={\"bf16\": -1.0}", "facts=1", "cluster=[]",
    )  # fmt: skip
    for setting in settings:
        yield "whatif", _PLAN, "--set", setting
    yield "whatif", _PLAN, "--set", "cluster.nodes=2", "--set", "cluster.nodes=4"
    yield "whatif", _PLAN, "--set", f"cluster.nodes={','.join(map(str, range(1, 2001)))}"
    yield "whatif", _PLAN, "--set", "cluster.nodes=2", "--plot", "out.html"
    yield "whatif", _PLAN, "--set", "cluster.nodes=2,4", "--plot", "out.png"
    pins = (
        "x", "actor_train", "actor_train.layout", "actor_train.layout=", "actor_train.layout=tp3", "nobody.layout=tp1",
        "actor_train.colour=red", "actor_train.layout=tp1000000", "actor_train.pool=0:8", "actor_train.pool=x",
        "actor_train.micro_batch_size=0", "actor_train.micro_batch_size=x", "ref_logprob.recompute=full",
        "actor_train.offload=everything", "actor_train.generation_slots=4", "actor_train.layout=tp0",
    )  # fmt: skip
    for pin in pins:
        yield "plan", "in/job.yaml", "-o", "out.json", "--pin", pin
        yield "plan", "in/job.yaml", "-o", "out.json", "--forbid", pin
    yield "plan", "in/job.yaml", "-o", "out.json", "--pin", "actor_train.layout=tp1", "--pin", "actor_train.layout=tp2"
    yield "calibrate", _PLAN, "in/other", "-o", "out.json"
    yield "replan", _PLAN, "in/other"
    yield "export", "in/run", "--to", "slurm", "-o", "out"
    yield "export", "in/half", "--to", "hf", "-o", "out"
    yield "report", _PLAN, "in/other", "-o", "out.html"
    yield "report", _PLAN, "in/run", "in/run", "-o", "out.html"


_PLANNED = ("plan", "in/job.yaml", "-o", "out.json")
_RUN = ("run", _PLAN, "in/job.yaml", "--steps", "1", "--out", "out")


def _odd_paths() -> Iterator[tuple[str, ...]]:
    """Paths and addresses that are empty, lead in a circle, are another kind of file, or no path at all."""
    for blank in ("", " ", "\t"):
        yield "explain", blank
        yield *_RUN[:-1], blank
        yield "export", _PLAN, "in/job.yaml", "--to", "torchrun", "-o", blank
    for path in ("in/loop", "in/dangling", "in/job.yaml/x", "in/a\nb", "~", "$HOME", "https://x.org/plan.json", "-"):
        yield "plan", path, "-o", "out.json"
        yield "watch", path, "--once"
        yield "reward", "try", path
        yield *_PLANNED, "--from-trace", path
        yield *_RUN, "--token-file", path, "--nodes", "2", "--rendezvous", "127.0.0.1:29511", "--node-rank", "0"
    for output in ("in/loop/x", "in/job.yaml/x", "a" * 300):
        yield (*_RUN[:-1], output)
    for model in ("actor", "actor=", "=in/actor", "critic2=in/actor", "actor=in/none", "actor=in/mine.txt"):
        yield *_RUN, "--model", model
    for module in ("os.path:join", "../x", "not a module", "\U0001f680"):
        yield "reward", "try", "in/job.yaml", "--allow-module", module
    for address in ("::1:29500", "[::1", "host:-1", "http://host:29500", "host:29500:1", "a b:29500"):
        yield *_RUN, "--nodes", "2", "--node-rank", "0", "--rendezvous", address


def _odd_choices() -> Iterator[tuple[str, ...]]:
    """Pins, settings and sizes in another script or case, given twice, or against each other."""
    layouts = ("tp\u00b2", "tp1,tp1", "sp,sp", "TP1", "tp-1", "pp1e1", "tp1;dp2", "xx3", "tp1=dp2", f"tp{'9' * 400}")
    pins = (
        "", "=", ".", "a.b=c.d=e", "Actor_Train.layout=tp1", "\U0001f680.layout=tp1", "actor_train.pool=0:1:2",
        "actor_train.pool=-1:1", "actor_train.pool=1:2", "actor_train.micro_batch_size=7", "actor_train.recompute=FULL",
        "actor_generate.recompute=full", "actor_generate.batches_in_flight=3", "reward_score.steps_ahead=1",
    )  # fmt: skip
    for pin in (*(f"actor_train.layout={layout}" for layout in layouts), *pins):
        yield *_PLANNED, "--pin", pin
        yield "explore", "in/job.yaml", "-o", "out.json", "--pin", pin
    yield *_PLANNED, "--pin", "actor_train.layout=tp1", "--forbid", "actor_train.layout=tp1"
    yield *_PLANNED, "--pin", "actor_train.layout=tp2", "--pin", "actor_train.pool=0:1"
    yield *_PLANNED, "--pin", "actor_train.pool=0:1", "--pin", "actor_train.pool=1:1"
    yield *_PLANNED, "--profile", _PLAN
    yield *_PLANNED, "--from", "in/job.yaml"
    yield *_PLANNED, "--proof", "out.json"
    yield *_PLANNED, "--for", "VERL"
    yield *_PLANNED, "--trace-field", "prompt=a"
    yield *_PLANNED, "in/job.yaml"
    for sizes in ("8:4", "4-8", "1, x", "8;16", "2^3", "0x8", ","):
        yield "fit", "in/job.yaml", "--sizes", sizes
    settings = (
        "workload.response.scale=0", "workload.response.scale=x", "models.actor.num_layers=0", "cluster.device={",
        "cluster..nodes=2", "cluster.nodes.x=2", "cluster.nodes=\uff12", "cluster.nodes=01", "__class__=1",
        "algorithm=grpo", "models.actor=null", "staleness=true", "workload.response.scale=1e9",
    )  # fmt: skip
    for setting in settings:
        yield "whatif", _PLAN, "--set", setting
        yield "explore", _PLAN, "--set", setting, "-o", "out.json"
    for grid in ("cluster.nodes", "cluster.nodes=", "=1,2", "x=1,2", "cluster.nodes=,"):
        yield "whatif", _PLAN, "--sweep", grid
        yield "explore", "in/job.yaml", "--grid", grid, "-o", "out.json"
    yield "whatif", _PLAN, "--sweep", "cluster.nodes=1,2", "--sweep", "cluster.nodes=1,2"
    yield "whatif", _PLAN, "--sweep", "cluster.nodes=1,2", "--set", "cluster.nodes=1"
    yield "explore", "in/job.yaml", "-o", "out.json", "--beside", "cluster.nodes"


def _odd_documents() -> Iterator[tuple[str, ...]]:
    """Documents in each other's place, prompts and scripts that are broken, and words that are not known."""
    yield *_RUN, "--resample"
    yield "run", "in/job.yaml", _PLAN, "--steps", "1", "--out", "out"
    yield "run", _PLAN, _PLAN, "--steps", "1", "--out", "out"
    for name in BAD_PROMPTS:
        yield "run", _PLAN, f"in/jobs/{name}.yaml", "--steps", "1", "--out", "out"
    for script in BAD_SCRIPTS:
        yield from (
            ("import", f"in/{script}", "--from", trainer, "--device", "h100", "-o", "out.yaml")
            for trainer in ("verl", "nemo-rl", "slime")
        )
    first = ("init", "in/actor", "--batch", "8", "--prompt", "8", "--response", "8", "-o", "out.yaml")
    for option, value in (("--network", "string"), ("--algorithm", "sft"), ("--price", "2,5"), ("--gpus", "1e2")):
        yield *first, "--device", "h100", option, value
    for device in ("h\uff11\uff10\uff10", "gpu", "H100,H200", "rtx9090", "\u202eh100", "x" * 2000):
        yield *first, "--device", device
    yield from (("watch", "in/run", "--once", "--every", every) for every in ("0", "nan", "1e400"))
    yield "export", _PLAN, "in/job.yaml", "--to", "SLURM", "-o", "out"
    yield "report", _PLAN, _PLAN, "-o", "out.html"
    yield "calibrate", "in/run", _PLAN, "-o", "out.json"
    yield "verify", _PLAN, "--proof", _PLAN
    yield from (("schema", "Plan"), ("devices", "h100"), ("PLAN", "in/job.yaml"), ("help",), ("",))


def is_listed(one: Ended) -> bool:
    """Whether several sentences are the answer: one for each rule that a plan breaks."""
    return one.arguments[0] == "verify"


def call_all(directory: Path) -> list[Ended]:
    """Has workers call everything in a directory that was prepared; one that dies leaves its rest out."""
    script = "import sys; from tests.runtime.wrong_invocations import work; work(sys.argv[1], int(sys.argv[2]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with locked(directory / "in" / "held"):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(directory), str(number)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for number in range(_WORKERS)
        ]
        told = [line for worker in workers for line in worker.communicate()[0].splitlines()]
    return [Ended(**{**line, "arguments": tuple(line["arguments"])}) for line in map(json.loads, told)]


def work(where: str, number: int) -> None:
    """Calls a worker's part; tells each end as one line of JSON. The commands are put together once for all."""
    directory = Path(where)
    os.chdir(directory)
    signal.signal(signal.SIGALRM, _hangs)
    tell = os.fdopen(os.dup(1), "w")
    command = typer.main.get_command(main.app)
    mine = list(dict.fromkeys(invocations()))[number::_WORKERS]
    with mock.patch.object(main, "app", command):
        for arguments in mine:
            tell.write(json.dumps(asdict(_called(arguments))) + "\n")
            tell.flush()


def _hangs(_signal: int, _frame: object) -> None:
    raise AssertionError("this invocation hangs")


def _called(arguments: tuple[str, ...]) -> Ended:
    """Runs the command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), -1
    began = time.perf_counter()
    signal.alarm(SECONDS)
    try:
        redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with mock.patch.object(sys, "argv", ["meshwright", *arguments]), redirected[0], redirected[1]:
            main.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        err.write(f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    return Ended(arguments, code, err.getvalue().strip(), time.perf_counter() - began, _peak_mib())


def _peak_mib() -> float:
    """Of this program alone: what getrusage tells begins with the memory of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return float(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


def _table(found: list[Ended]) -> str:
    rows = ["| command | exit | sentence |", "|---|---|---|"]
    for one in found:
        words = [word if len(word) <= 60 else f"{word[:57]}..." for word in one.arguments]
        told = " ".join(repr(word) if " " in word or not word else word for word in words)
        sentence = one.sentence if len(one.sentence) <= 240 else f"{one.sentence[:237]}..."
        rows.append(f"| `{told}` | {one.code} | {sentence.replace('|', '/').replace(chr(10), ' ')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        sys.stdout.write(_table(call_all(Path(scratch))) + "\n")
