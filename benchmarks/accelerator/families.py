"""Small models of each family on this device: scored, trained, generated from, compared with `transformers` on a CPU.

Models have random weights and a few layers, with heads as small as those of the tests, so times are not measured.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.accelerator.ranks import learned_block, share_of_loss
from benchmarks.accelerator.world import World, tell
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels, choose_kernels
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs
from meshwright.runtime.training.weight_copies import DTYPES
from tests.runtime.checkpoints import FAMILIES, WINDOWS, expected_logprobs, tokens, write_checkpoint
from tests.runtime.laws.test_experts import FAMILIES as EXPERTS

_PROMPTS, _LONGEST = 6, 24
_SLOTS = 4
"""Slots of the generator, fewer than there are prompts, so that slots are used again."""


class _Case(NamedTuple):
    """A model: its family and the changes of its configuration."""

    name: str
    family: str
    changes: dict[str, object]


_CASES = (
    *(_Case(family, family, changes) for family, changes in reversed(EXPERTS.items())),
    *(_Case(family, family, changes) for family, changes in FAMILIES.items()),
    *(_Case(f"{family}, window", family, changes) for family, changes in WINDOWS.items()),
)


def report(world: World) -> str:
    """A table of Markdown. A family that fails says so in its row."""
    directory = world.directory("families")
    cases = _CASES[:2] if world.tiny else _CASES
    rows: list[str] = launch(_rows, cases, directory, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    return "\n".join(
        (
            "Largest difference of log-probabilities, with plain kernels and with those that a run chooses. For "
            "generated tokens, the log-probability in generation is compared with that of the scoring pass.\n",
            "| family | fp32, plain | fp32, chosen | gradient norm, chosen to plain | generated, fp32 | "
            "of recorded steps, fp32 | equal tokens | generated, bf16, mean | kernels of bf16 |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
        )
    )


def _rows(cases: tuple[_Case, ...], directory: Path) -> list[str]:
    """The rows of the table, computed on a single rank."""
    rows = []
    for case in cases:
        rows.append(f"| {case.name} | {' | '.join(_cells(case, directory / case.name.replace(', ', '-')))} |")
        tell(rows[-1])
    return rows


def _cells(case: _Case, directory: Path) -> Iterator[str]:
    write_checkpoint(directory, case.family, **case.changes)
    expected = expected_logprobs(directory, tokens())[:, :-1]
    model = _Model(directory)
    chosen, rounded = model.chosen("fp32"), model.chosen("bf16")
    for kernels in (PLAIN, chosen):
        yield _tried(lambda kernels=kernels: f"{float((model.scored(kernels) - expected).abs().max()):.1e}")
    yield _tried(lambda: f"{abs(model.grad_norm(chosen) / model.grad_norm(PLAIN) - 1):.1e}")
    responses: list[tuple[tuple[int, ...], ...]] = []
    for records in (False, True):

        def generated(records: bool = records) -> str:
            found, gaps = model.generated(chosen, "fp32", records=records)
            responses.append(found)
            return f"{max(gaps):.1e}"

        yield _tried(generated)
    yield _equal_tokens(*responses) if len(responses) > 1 else ""

    def mean_gap() -> str:
        gaps = model.generated(rounded, "bf16", records=True)[1]
        return f"{sum(gaps) / len(gaps):.1e}"

    yield _tried(mean_gap)
    yield rounded.description.removesuffix(", replicas exchange overlap computing")


def _equal_tokens(unrecorded: Sequence[tuple[int, ...]], recorded: Sequence[tuple[int, ...]]) -> str:
    same = [one == other for rows in zip(unrecorded, recorded, strict=True) for one, other in zip(*rows, strict=True)]
    return f"{sum(same)} of {len(same)}"


def _tried(measure: Callable[[], str]) -> str:
    """The text of a cell, or the first line of any exception, so that the other cells are shown."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        return f"failed: {type(error).__name__} {''.join(first_line)[:160]}".replace("|", "/")


class _Model:
    """A checkpoint, from which each measurement builds a model anew."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._spec, self._mesh = directory, read_model(directory), build_mesh(Layout(), 0)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def chosen(self, precision: str) -> ChosenKernels:
        return choose_kernels(device_capabilities(host.device().type), precision, [self._spec]).without_overlap

    def scored(self, kernels: ChosenKernels) -> Tensor:
        """The log-probabilities of the tokens after the first, [B, S - 1] fp32, on the host."""
        block = MicroBatch.pack(tokens())
        (logprobs,) = forward_logprobs(self._built(kernels, "fp32"), self._mesh, [block])
        return torch.stack(block.split_rows(logprobs.cpu()))[:, :-1]

    def grad_norm(self, kernels: ChosenKernels) -> float:
        """The norm of the gradient of one update, before it is clipped."""
        model = self._built(kernels, "fp32", trainable=True)
        trainer = Trainer(model, self._mesh, learning_rate=1e-3, epsilon=1e-4)
        blocks = [learned_block(list(tokens()))]
        num_learned = tokens().numel() - len(tokens())
        loss = functools.partial(share_of_loss, self._spec, self._mesh, num_learned)
        return trainer.train_step(blocks, loss)["grad_norm"]

    def generated(
        self, kernels: ChosenKernels, precision: str, *, records: bool
    ) -> tuple[tuple[tuple[int, ...], ...], list[float]]:
        """The responses, and for each token the difference of its log-probability in generation and in scoring."""
        model = self._built(kernels, precision)
        prompts = [
            Prompt(row=row, sample_id=row, tokens=tuple(ids[: 5 + row].tolist()))
            for row, ids in enumerate(tokens(_PROMPTS, seed=2))
        ]
        generator = Generator(
            model,
            self._spec,
            self._mesh,
            num_slots=_SLOTS,
            max_tokens=_LONGEST + 5 + _PROMPTS,
            max_response=_LONGEST,
            eos_tokens=frozenset(),
            temperature=1.0,
            seed=5,
            use_cuda_graphs=records,
        )
        found, gaps = generator.generate(prompts), list[float]()
        for prompt, response in zip(prompts, found, strict=True):
            block = MicroBatch.pack([torch.tensor(prompt.tokens + response.tokens)])
            (scored,) = forward_logprobs(model, self._mesh, [block])
            ours = scored.float().cpu()[len(prompt.tokens) - 1 : -1]
            gaps += (ours - torch.tensor(response.logprobs)).abs().tolist()
        return tuple(response.tokens for response in found), gaps

    def _built(self, kernels: ChosenKernels, precision: str, *, trainable: bool = False) -> Decoder:
        model = build_model(self._spec, self._mesh, dtype=DTYPES[precision], trainable=trainable, kernels=kernels)
        assert isinstance(model, Decoder)
        load_weights(model, self._spec, self._mesh, self._directory)
        return model if trainable else model.eval()
