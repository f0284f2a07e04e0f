"""The two sides: the generation engine and transformers' `generate`, each made to draw exactly the lengths asked."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.generation.work import BATCH, LONGEST_RESPONSE, Work
from benchmarks.small_worlds import join_alone
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.model.kernel_choice import choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.weight_copies import DTYPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = "bf16" if DEVICE.type == "cuda" else "fp32"
DTYPE = DTYPES[PRECISION]


def seconds(generate: Callable[[Work], list[list[int]]], work: Work) -> tuple[float, float]:
    """Wall time and processor time it takes; what is drawn must have the lengths asked for."""
    wall, processor = time.perf_counter(), time.process_time()
    drawn = generate(work)
    elapsed = time.perf_counter() - wall, time.process_time() - processor
    assert [len(tokens) for tokens in drawn] == list(work.lengths)
    return elapsed


class Engine:
    """One rank. Sequences end by length alone."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        temperature: float,
        seed: int,
        group_size: int = 1,
        num_slots: int = BATCH,
        num_blocks: int | None = None,
        longest_response: int = LONGEST_RESPONSE,
    ) -> None:
        """Prompts may have what the positions of the model leave beside the longest response."""
        if not dist.is_initialized():
            join_alone(DEVICE.type)
        spec, mesh = read_model(checkpoint), build_mesh(Layout(), 0)
        kernels = choose_kernels(device_capabilities(DEVICE.type), PRECISION, [spec])
        model = build_model(spec, mesh, dtype=DTYPE, kernels=kernels)
        load_weights(model, spec, mesh, checkpoint)
        self._through = functools.partial(
            Generator,
            model,
            spec,
            mesh,
            max_tokens=spec.max_positions,
            max_response=longest_response,
            eos_tokens=frozenset(),
            temperature=temperature,
            seed=seed,
            group_size=group_size,
        )
        self._generator = self._through(num_slots=num_slots, num_blocks=num_blocks)

    def set_slots(self, num_slots: int) -> None:
        """From now on so many sequences are decoded at a time."""
        del self._generator  # its cache makes room for the new one
        self._generator = self._through(num_slots=num_slots)

    def by_batches(self, work: Work) -> list[list[int]]:
        """Each batch alone, as transformers must: a slot that falls free stays free until the batch has ended."""
        return [tokens for batch in work.batches() for tokens in self.refilled(batch)]

    def refilled(self, work: Work) -> list[list[int]]:
        """All prompts at once, through as many slots as a batch has rows."""
        prompts = [
            Prompt(row=row, sample_id=row, tokens=tokens, max_response=length)
            for row, (tokens, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        return [list(response.tokens) for response in self._generator.generate(prompts)]


class Transformers:
    """`generate` with its defaults (SDPA, dynamic cache), prompts padded on the left as it wants them.

    It is not asked for log-probabilities, which the engine gives with every token.
    """

    def __init__(self, checkpoint: Path, *, greedy: bool = False) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPE)
        self._model: Any = model.to(DEVICE).eval()
        self._model.generation_config.eos_token_id = None
        self._choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}

    def generate(self, work: Work) -> list[list[int]]:
        return [tokens for batch in work.batches() for tokens in self._generate(batch)]

    def _generate(self, batch: Work) -> list[list[int]]:
        width = max(map(len, batch.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch.prompts])
        drawn = self._model.generate(
            ids.to(DEVICE),
            attention_mask=mask.to(DEVICE),
            max_new_tokens=max(batch.lengths),
            stopping_criteria=transformers.StoppingCriteriaList([_OwnLength(width, batch.lengths)]),
            pad_token_id=0,
            **self._choice,
        )
        assert drawn.shape[1] == width + max(batch.lengths)
        return [row[width : width + length].tolist() for row, length in zip(drawn, batch.lengths, strict=True)]


class _OwnLength(transformers.StoppingCriteria):
    """Each row is done when it has the length asked for; the call ends when all rows are."""

    def __init__(self, prompt_width: int, lengths: tuple[int, ...]) -> None:
        self._ends = prompt_width + torch.tensor(lengths, device=DEVICE)

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return input_ids.shape[1] >= self._ends
