"""What becomes of responses that are cut by length, as they were once paid and as they are now.

    python -m benchmarks.truncation --out DIR [--seeds 5]

Three experiments, each with a cut row paid its score and the critic's value behind it (what was before), with a cut
that is an end, and with a cut that is bootstrapped. Every score is 1, whatever was said:

1. the critic knows it: advantages must be nothing;
2. a policy that is not trained, nine of ten of whose responses are cut: the critic's mean over 120 updates;
3. a policy that is trained, two of ten of whose responses are cut at first: the share of them over 40 steps.

Then the demo with several seeds: how far the held-out reward rises, in standard errors.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.demo import require_demo
from benchmarks.small_worlds import join_alone
from benchmarks.truncation.runs import FROZEN, Lines, rise_of_demo, run_alone, write_models
from benchmarks.truncation.treatments import TREATMENTS, advantages_at_ones
from meshwright.runtime.device import host

NUM_CRITIC_STEPS, NUM_POLICY_STEPS, NUM_DEMO_STEPS = 60, 40, 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truncation", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new directory for the runs")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the demo, each with another ppo.seed")
    asked = parser.parse_args()
    if asked.seeds:
        require_demo()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True)
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    _show_advantages()
    torch.set_num_threads(1)
    join_alone()
    host.install()
    write_models(out / "models")
    _show_critic(out)
    _show_policy(out)
    _show_demo(out, asked.seeds)


def _show_critic(out: Path) -> None:
    ppo = {"actor_learning_rate": FROZEN}
    found = [
        run_alone(out / "models", out / f"critic-{number}", NUM_CRITIC_STEPS, treatment, max_response=4, ppo=ppo)
        for number, treatment in enumerate(TREATMENTS)
    ]
    share = statistics.fmean(line["truncated_fraction"] for line in found[0])
    print(f"\n## A frozen policy, {share:.0%} cut: mean of V\n")
    _show_course(found, ("value",), (0, 9, 19, 29, 39, 49, 59), updates_a_step=2)


def _show_policy(out: Path) -> None:
    found = [
        run_alone(out / "models", out / f"policy-{number}", NUM_POLICY_STEPS, treatment, max_response=48, ppo={})
        for number, treatment in enumerate(TREATMENTS)
    ]
    print("\n## A policy that is trained: share of responses that are cut, and mean of V\n")
    _show_course(found, ("truncated_fraction", "value"), (0, 4, 9, 14, 19, 24, 29, 34, 39))


def _show_advantages() -> None:
    print("\n## Every score and every value is 1: advantages of 5 tokens\n")
    print("| | ended | cut |\n|---|---|---|")
    for treatment in TREATMENTS:
        rows = advantages_at_ones(treatment, num_tokens=5)
        print(f"| {treatment.name} | {' | '.join(', '.join(f'{a:+.2f}' for a in row) for row in rows)} |")


def _show_course(found: Sequence[Lines], metrics: Sequence[str], steps: Sequence[int], updates_a_step: int = 1) -> None:
    """Each metric along the run; a figure is of the steps since the one before it, one step at the beginning."""
    counted = "updates" if updates_a_step > 1 else "steps"
    print(f"| | after {counted} | {' | '.join(str((step + 1) * updates_a_step) for step in steps)} |")
    print("|---" * (len(steps) + 2) + "|")
    for treatment, lines in zip(TREATMENTS, found, strict=True):
        for metric in metrics:
            shown = course([line[metric] for line in lines], steps)
            print(f"| {treatment.name} | {metric} | {' | '.join(f'{value:.2f}' for value in shown)} |")


def course(values: Sequence[float], steps: Sequence[int]) -> list[float]:
    """The mean of what came since the step before, up to each of `steps`."""
    firsts = [0, *(step + 1 for step in steps[:-1])]
    return [statistics.fmean(values[first : step + 1]) for first, step in zip(firsts, steps, strict=True)]


def _show_demo(out: Path, num_seeds: int) -> None:
    if not num_seeds:
        return
    print(f"\n## The demo, {NUM_DEMO_STEPS} steps: rise of the held-out reward\n")
    print("| seed | rise | standard error | standard errors |\n|---|---|---|---|")
    for seed in range(num_seeds):
        rise, error = rise_of_demo(out / f"seed-{seed}", seed, NUM_DEMO_STEPS)
        print(f"| {seed} | {rise:.3f} | {error:.3f} | {rise / error:.1f} |", flush=True)


if __name__ == "__main__":
    main()
