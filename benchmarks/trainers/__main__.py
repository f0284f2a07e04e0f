"""verl's own example of a size beside the plan that is best within what verl can say.

    python -m benchmarks.trainers --out benchmarks/trainers/verl_<date>.md

Each example is the script that verl ships, as it is retyped in `tests/planner/trainers/shipped`, on H100 with
InfiniBand NDR. A function pays there, and in both plans. Seconds are PREDICTED, by analytic costs with vLLM.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from meshwright import api
from meshwright.planner.report.formatting import schedule

_ROOT = Path(__file__).parents[2]
_SHIPPED = _ROOT / "tests" / "planner" / "trainers" / "shipped" / "verl.yaml"
_MODELS = _ROOT / "examples" / "models"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A script by its name, the shape of its model, and the keys that it is given as arguments."""

    size: str
    script: str
    model: str
    changed: tuple[str, ...] = ()


EXAMPLES = (
    Example(size="7B x 8", script="run_qwen2-7b_math_megatron.sh", model="qwen2.5-7b"),
    Example(
        size="30B-A3B x 32",
        script="run_qwen3moe-30b_megatron.sh",
        model="qwen3-30b-a3b",
        # The verl of its time took enable_gradient_checkpointing for this, without which it does not fit.
        changed=("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",),
    ),
    Example(
        size="70B x 64",
        script="qwen2-70b_grpo_32_h800_fsdp_vllm.sh",
        model="qwen2-72b",
        changed=("trainer.nnodes=8",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The plan of an example as it is shipped, and the best that verl can say."""

    example: Example
    shipped: api.Plan
    best: api.Plan
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the search has missed nothing that is shipped."""
        return self.best.period_seconds <= self.shipped.period_seconds


def beside(example: Example, *, gap: float) -> Beside:
    """Reads the script, costs it and searches. Raises BadInput for a script that is not read, and RuntimeError where
    it fits into no memory."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / example.script
        path.write_text(text_of(example))
        _, found = api.import_configuration(
            path,
            directory,
            trainer="verl",
            device="h100-sxm",
            network="ib-ndr-400",
            shapes={"": _MODELS / example.model},
            limits=api.Limits(gap=gap),
        )
    if found.plan is None or found.best_in_trainer is None:
        raise RuntimeError(f"{example.script} fits into no memory: {found.notes}")
    return Beside(example=example, shipped=found.plan, best=found.best_in_trainer, notes=tuple(found.notes))


def report(rows: list[Beside]) -> str:
    """Tables of Markdown: the steps, and the choices of each stage."""
    head = "| GPUs | example | as shipped s | `plan --for verl` s | | bound s |\n|---|---|---|---|---|---|"
    steps = (
        f"| {row.example.size} | `{row.example.script}` | {row.shipped.period_seconds:.1f} | "
        f"{row.best.period_seconds:.1f} | {row.best.period_seconds / row.shipped.period_seconds - 1:+.0%} | "
        f"{row.best.solver.bound_seconds:.1f} |"
        for row in rows
    )
    stages = "| GPUs | stage | as shipped | s | `plan --for verl` | s |\n|---|---|---|---|---|---|"
    choices = (line for row in rows for line in _stages(row))
    notes = (f"- {row.example.size}: {note}" for row in rows for note in (*row.example.changed, *row.notes))
    return "\n".join((head, *steps, "", stages, *choices, "", *notes))


def text_of(example: Example) -> str:
    """The script, as it was retyped, with what is changed in it as its last arguments."""
    shipped = {Path(one["path"]).name: one["text"] for one in yaml.safe_load(_SHIPPED.read_text())}
    changed = " ".join(example.changed)
    return str(shipped[example.script]).rstrip().removesuffix("$@") + changed + "\n"


def _stages(row: Beside) -> Iterator[str]:
    for stage in row.shipped.graph.names:
        cells = (f"{_choice(plan, stage)} | {_seconds(plan, stage):.1f}" for plan in (row.shipped, row.best))
        yield f"| {row.example.size} | `{stage}` | {' | '.join(cells)} |"


def _choice(plan: api.Plan, stage: str) -> str:
    placement = plan.placement(stage)
    pool = plan.pool(placement.pool)
    return f"{pool.first_rank}:{pool.num_ranks} {placement.layout}, {schedule(placement.schedule)}"


def _seconds(plan: api.Plan, stage: str) -> float:
    placement = plan.placement(stage)
    return placement.end_seconds - placement.start_seconds


def main() -> int:
    """The exit code: 0, or 1 where what is shipped is faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=float, default=0.02, help="at which a search ends")
    parser.add_argument("--out", type=Path, help="where the report goes; printed in any case")
    asked = parser.parse_args()
    rows = [beside(example, gap=asked.gap) for example in EXAMPLES]
    text = report(rows)
    print(text)
    if asked.out:
        asked.out.write_text(f"# verl's examples beside the best plans within it\n\n{text}\n")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
