"""The settings of vLLM that follow from a plan: `run` starts it with them on a CPU, and an export writes them there.

On a GPU, where another trainer starts vLLM, the trainer's own defaults hold except for the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.job.job import Facts
from meshwright.planner.plan.engine_rules import generates_with_vllm
from meshwright.profiles.packing import max_prefill_tokens
from meshwright.profiles.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Arguments of vLLM, by its own names."""

    max_num_seqs: int
    """Sequences that are decoded at a time on each replica."""
    max_model_len: int
    """Tokens of the longest sequence, its prompt included."""
    max_num_batched_tokens: int
    """Tokens of one round, prefilled ones included; no less than `max_model_len`, because no prefill is split."""
    enable_chunked_prefill: bool = False
    """Splitting a prefill would set back the random numbers of its request, which fails on a CPU
    (v1/worker/gpu_model_runner.py of vLLM 0.32)."""
    enable_prefix_caching: bool = True
    """The samples of a prompt share its keys and values."""
    enforce_eager: bool = True
    """A CPU has no graphs, and what vLLM compiles there takes half a minute at the first round."""


def vllm_settings(facts: Facts, schedule: Schedule) -> VllmSettings | None:
    """Return the settings with which `run` starts vLLM for a schedule of generation; None where `run` does not."""
    return engine_arguments(facts, schedule) if generates_with_vllm(facts) else None


def engine_arguments(facts: Facts, schedule: Schedule) -> VllmSettings:
    """Return the settings of an engine in its own process for a schedule of generation."""
    slots, longest = schedule.generation_slots, facts.workload.max_tokens
    return VllmSettings(
        max_num_seqs=slots, max_model_len=longest, max_num_batched_tokens=max_prefill_tokens(slots, longest)
    )
