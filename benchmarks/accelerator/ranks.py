"""Layouts of several ranks beside one rank, all on one device: what their models say, learn and draw.

Tensors between the ranks go through the host, so nothing here tells of time. The ranks are launched once for all
layouts; where one fails, they are launched again for those behind it.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.accelerator.jobs import write_weights
from benchmarks.accelerator.staged import OnOneDevice
from benchmarks.accelerator.world import World
from meshwright.profiles.errors import MeshwrightError
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec, read_model
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.launch.launch import launch
from meshwright.runtime.model.kernel_choice import PLAIN, ChosenKernels, choose_kernels
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.training.losses import LossShare
from meshwright.runtime.training.replica_overlap import overlap_buckets
from meshwright.runtime.training.trainer import MicroBatch, Trainer, forward_logprobs
from meshwright.runtime.training.weight_copies import DTYPES

ONE_RANK = "tp1"
LAYOUTS = {
    "experts": ("dp2,ep2", "tp2,ep2,etp1,sp", "tp2,dp2,ep2,sp"),
    "dense": ("tp2", "pp2", "dp2", "tp2,pp2", "tp2,sp", "cp2"),
}
"""That are compared with one rank, by model."""

NUM_RANKS = 4

_KERNELS = {"cpu": {"fp32": ("plain",), "bf16": ("plain",)}, "cuda": {"fp32": ("plain", "chosen"), "bf16": ("chosen",)}}
"""That each precision is compared with, by kind of device: equality is a matter of fp32, and a processor has the plain
ones alone."""

_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
_REAL: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
_TINY: dict[str, int] = {**_REAL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}

_RATE, _EPSILON = 1e-3, 1e-4
"""AdamW divides a gradient by its own size: with its usual epsilon, rounding decides where the gradient is nothing."""
_PASSES = 2
"""Micro-batches of a replica."""

_SLOTS = 5
"""Fewer than a replica has prompts."""

_LOG = "rows.jsonl"
"""Where the first rank writes what it found, a line for each case."""
_CASE_SECONDS, _PATIENCE_SECONDS, _LAUNCHES = 45.0, 60.0, 4


class Case(NamedTuple):
    """What is compared with one rank of the same model and precision."""

    model: str
    precision: str
    kernels: str
    """plain, the reference, or chosen, as a run would have them."""
    layout: str


class Row(NamedTuple):
    """How far a layout is from one rank, at most; `moved` is how far the update moved one rank's weights."""

    case: Case
    logprobs: float
    grad_norm: float
    weights: float
    moved: float
    equal_tokens: int | None
    """Of each response those before the first other one, summed; None where sequences are cut, for which nothing
    generates."""
    num_tokens: int

    def __str__(self) -> str:
        drawn = "generates nothing" if self.equal_tokens is None else f"{self.equal_tokens} of {self.num_tokens}"
        weights = f"{self.weights:.1e} (moved by {self.moved:.1e})"
        return f"{_told(self.case)} | {self.logprobs:.1e} | {self.grad_norm:.1e} | {weights} | {drawn} |"


class Failed(NamedTuple):
    """A layout that could not be compared."""

    case: Case
    why: str

    def __str__(self) -> str:
        return f"{_told(self.case)} | {self.why.replace('|', '/')} | | | |"


@dataclass(frozen=True)
class Work:
    """What every layout is given, of a size: rows to score and learn from, and prompts to go on from."""

    rows: tuple[Tensor, ...]
    prompts: tuple[Prompt, ...]
    longest: int
    """Tokens of every response."""

    @classmethod
    def of(cls, *, tiny: bool) -> Work:
        draw, vocab_size = random.Random(0), (_TINY if tiny else _REAL)["vocab_size"]
        lengths, num_prompts, longest = ((24, 17, 9, 6), 6, 8) if tiny else ((200, 129, 64, 33), 12, 32)
        rows = [torch.tensor(draw.choices(range(vocab_size), k=length)) for length in lengths]
        prompts = [
            Prompt(row=row, sample_id=100 + row, tokens=tuple(draw.choices(range(vocab_size), k=3 + row % 5)))
            for row in range(num_prompts)
        ]
        return cls(tuple(rows), tuple(prompts), longest)

    @property
    def num_learned(self) -> int:
        """Tokens that have one before them."""
        return sum(len(row) - 1 for row in self.rows)


@dataclass
class Found:
    """What a model said, learned and drew, as a rank or all of them have it."""

    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """[T] of each row."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of the response to each prompt."""
    grad_norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After an update."""


def report(world: World) -> str:
    """As a table of Markdown."""
    lines = [
        "Each layout is compared with one rank of the same model, precision and kernels. In bf16 a token whose two "
        "best experts score nearly the same may go to the other one.\n",
        "| model | precision | kernels | layout | ranks | messages | log-probabilities apart by | "
        "gradient norm, relatively | weights after an update | equal tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(str, compare(world, cases_on(world.kind), num_ranks=NUM_RANKS)),
    ]
    return "\n".join(lines)


def cases_on(kind: str) -> list[Case]:
    """All that are compared on a device of this kind."""
    sides = [(precision, kernels) for precision, found in _KERNELS[kind].items() for kernels in found]
    return [Case(model, *side, layout) for side in sides for model, found in LAYOUTS.items() for layout in found]


def compare(world: World, cases: Sequence[Case], *, num_ranks: int) -> list[Row | Failed]:
    """What became of each case, in their order."""
    directory = write_models(world)
    preparation = OnOneDevice(world.kind, timeout_seconds=_PATIENCE_SECONDS)
    found: list[Row | Failed] = []
    for _ in range(_LAUNCHES):
        left, problem = cases[len(found) :], ""
        (directory / _LOG).write_text("")
        try:
            launch(rows_of, left, directory, world.tiny, num_ranks=num_ranks, setup=preparation)
        except MeshwrightError as error:
            problem = str(error).splitlines()[0]
        found += read_rows(directory)
        if len(found) == len(cases):
            return found
        found.append(Failed(cases[len(found)], f"failed: {problem}"))
        print(found[-1], file=sys.stderr, flush=True)
    return found + [Failed(case, "not tried: too many failed before it") for case in cases[len(found) :]]


def write_models(world: World) -> Path:
    """Where the random weights of every model are, and nothing else."""
    directory = world.directory("ranks")
    shutil.rmtree(directory)  # what a call that was cut off has left
    for model, config in _MODELS.items():
        size = {**(_TINY if world.tiny else _REAL), "max_position_embeddings": 512}
        write_weights(directory / model, {**config, **size}, torch.float32, world.kind)
    return directory


def rows_of(cases: Sequence[Case], directory: Path, tiny: bool) -> None:
    """Measures the cases on all ranks together; the first one writes their rows into the directory. A rank that hangs
    ends itself."""
    work = Work.of(tiny=tiny)
    for case in cases:
        faulthandler.dump_traceback_later(_CASE_SECONDS, exit=True)
        known, found = _known(case, directory, work), _found(case, directory, work)
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            row = _row(case, found, known, before=_written(directory / case.model))
            print(row, file=sys.stderr, flush=True)  # a call that is cut off has told it
            with (directory / _LOG).open("a") as log:
                log.write(f"{json.dumps(row)}\n")


def _told(case: Case) -> str:
    return f"| {' | '.join(case)} | {Layout.parse(case.layout).num_ranks} | staged, gloo"


def read_rows(directory: Path) -> list[Row]:
    """What the ranks of one launch have measured."""
    written = [json.loads(line) for line in (directory / _LOG).read_text().splitlines()]
    return [Row(Case(*case), *figures) for case, *figures in written]


def _row(case: Case, found: Found, known: Found, before: Mapping[str, Tensor]) -> Row:
    assert found.tokens.keys() in ({}.keys(), known.tokens.keys())
    equal = sum(_num_equal(tokens, known.tokens[row]) for row, tokens in found.tokens.items())
    return Row(
        case,
        logprobs=_apart(found.logprobs, known.logprobs),
        grad_norm=abs(found.grad_norm / known.grad_norm - 1),
        weights=_apart(found.weights, known.weights),
        moved=_apart(known.weights, before),
        equal_tokens=equal if found.tokens else None,
        num_tokens=sum(map(len, known.tokens.values())),
    )


def _apart(some: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> float:
    """The largest difference of numbers under the same names, nan where there is a nan."""
    assert some.keys() == others.keys()
    return float(torch.stack([(some[name].float() - others[name].float()).abs().max() for name in some]).max())


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that is another."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (token, same) in pairs if token != same), len(one))


def _known(case: Case, directory: Path, work: Work) -> Found:
    """As one rank has it; kept for the cases and launches to come."""
    path = directory / f"{'-'.join(case[:-1])}.pt"
    is_there = path.exists()
    dist.barrier()  # until every rank has looked, nothing may appear
    if is_there:
        return Found(**torch.load(path))
    found = _found(case._replace(layout=ONE_RANK), directory, work)
    if dist.get_rank() == 0:
        torch.save(vars(found), path)
    dist.barrier()
    return found


def _found(case: Case, directory: Path, work: Work) -> Found:
    """What all ranks found together; on the first rank with the weights."""
    source, target = directory / case.model, directory / "-".join(case)
    spec, layout, mine = read_model(source), Layout.parse(case.layout), Found()
    mesh, drawing = build_mesh(layout, 0), build_mesh(replace(layout, sp=False), 0)
    chosen = choose_kernels(device_capabilities(host.device().type), case.precision, [spec])
    kernels = chosen if case.kernels == "chosen" else PLAIN
    if mesh.is_member:
        model = _loaded(case, spec, mesh, source, kernels.without_overlap, trainable=False)
        mine.logprobs = _logprobs(model, mesh, work)
        if layout.cp == 1:
            model = _loaded(case, spec, drawing, source, kernels.without_overlap, trainable=False)
            mine.tokens = _drawn(model, spec, drawing, work)
        model = _loaded(case, spec, mesh, source, kernels, trainable=True)
        mine.grad_norm = _learned(model, spec, mesh, work, kernels)
        save_weights(model, spec, mesh, target, config_from=source)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other in reversed(everyone):  # the first rank is always a member
        mine.logprobs |= other.logprobs
        mine.tokens |= other.tokens
    mine.weights = _written(target) if dist.get_rank() == 0 else {}
    return mine


def _loaded(
    case: Case, spec: ModelSpec, mesh: Mesh, source: Path, kernels: ChosenKernels, *, trainable: bool
) -> Decoder:
    model = build_model(spec, mesh, dtype=DTYPES[case.precision], trainable=trainable, kernels=kernels)
    assert isinstance(model, Decoder), f"{case.layout} is cut in chunks"
    load_weights(model, spec, mesh, source)
    return model


def _written(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _logprobs(model: Decoder, mesh: Mesh, work: Work) -> dict[int, Tensor]:
    """Of this replica's rows, packed in one pass, on the last stage."""
    mine = range(mesh.dp_rank, len(work.rows), mesh.layout.dp)
    block = MicroBatch.pack(work.rows[row] for row in mine)
    found = forward_logprobs(model, mesh, [block])
    return {
        row: values.cpu() for logprobs in found for row, values in zip(mine, block.split_rows(logprobs), strict=True)
    }


def _drawn(model: Decoder, spec: ModelSpec, mesh: Mesh, work: Work) -> dict[int, tuple[int, ...]]:
    """For this replica's prompts, of which fewer fit into the slots."""
    prompts = work.prompts[mesh.dp_rank :: mesh.layout.dp]
    generator = Generator(
        model,
        spec,
        mesh,
        num_slots=_SLOTS,
        max_tokens=work.longest + max(len(prompt.tokens) for prompt in work.prompts),
        max_response=work.longest,
        eos_tokens=frozenset(),
        temperature=1.0,
        seed=5,
        use_cuda_graphs=False,
    )
    return {response.row: response.tokens for response in generator.generate(prompts)}


def _learned(model: Decoder, spec: ModelSpec, mesh: Mesh, work: Work, kernels: ChosenKernels) -> float:
    """The norm of the gradient of one update, before it is clipped."""
    trainer = Trainer(
        model,
        mesh,
        learning_rate=_RATE,
        weight_decay=0.1,
        max_grad_norm=0.5,
        epsilon=_EPSILON,
        buckets=overlap_buckets(model, mesh, kernels),
    )
    mine = work.rows[mesh.dp_rank :: mesh.layout.dp]
    size = len(mine) // _PASSES
    blocks = [learned_block(mine[first : first + size]) for first in range(0, len(mine), size)]
    return trainer.train_step(blocks, functools.partial(share_of_loss, spec, mesh, work.num_learned))["grad_norm"]


def learned_block(rows: Sequence[Tensor]) -> MicroBatch:
    """A micro-batch of rows of tokens [S], with a mask of the positions that have a next token."""
    return MicroBatch.pack(rows, {"mask": [torch.arange(len(row)) < len(row) - 1 for row in rows]})


def share_of_loss(spec: ModelSpec, mesh: Mesh, num_tokens: int, output: Tensor, block: MicroBatch) -> LossShare:
    """Mean over all rows' tokens of -log p - entropy / 10, as this micro-batch's share of it."""
    targets = block.next_tokens.to(output.device).unsqueeze(0)
    logprobs, entropy = token_logprobs(output, targets, mesh.groups.tp, vocab_size=spec.vocab_size, with_entropy=True)
    assert entropy is not None
    loss = (-(logprobs + 0.1 * entropy) * block.fields["mask"].to(output.device)).sum() / num_tokens
    return LossShare(loss, {"loss": loss.detach().double()})
