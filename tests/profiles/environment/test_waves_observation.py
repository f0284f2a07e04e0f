"""Waves as a run's trace tells them: lengths are of all that was drawn."""

from __future__ import annotations

from meshwright.profiles.observations import WavesObservation, observe_waves
from meshwright.profiles.trace import NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS, NUM_SAMPLES, Span


def wave(rows: float, drawn: float, prompts: float) -> Span:
    return Span(
        step=1,
        instruction="actor_generate",
        kind="stage",
        rank=0,
        start_seconds=0.0,
        end_seconds=1.0,
        clock="measured",
        facts={NUM_SAMPLES: rows, NUM_SAMPLED_TOKENS: drawn, NUM_PROMPT_TOKENS: prompts},
    )


def test_tokens_are_means_over_all_waves_of_all_replicas() -> None:
    of_replicas = [wave(8.0, 80.0, 24.0), wave(4.0, 100.0, 12.0)]
    assert observe_waves([*of_replicas, *of_replicas], 2, num_steps=3) == WavesObservation(4.0, 15.0, 3.0)
    assert WavesObservation(4.0, 15.0, 3.0).sequence_tokens == 18.0


def test_a_generation_without_waves_tells_of_none() -> None:
    assert observe_waves([Span(**{**vars(wave(1.0, 1.0, 1.0)), "facts": {NUM_SAMPLES: 4.0}})], 1, num_steps=1) is None
