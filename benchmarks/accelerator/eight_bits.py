"""Generation in 8 bits on this device: its products beside those of the same numbers cast up, and what they save."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accelerator.agreement import Apart
from benchmarks.accelerator.jobs import config_of
from benchmarks.accelerator.world import World, tell
from meshwright.profiles.harness import measure
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.fp8_weights import E4M3_MAX
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.table import Point, TimedPass, shape_of
from meshwright.runtime.device import host
from meshwright.runtime.device.capabilities import device_capabilities
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.inference.cuda_graphs import CudaGraphs, Work
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.launch.launch import ProcessSetup, launch
from meshwright.runtime.model.fp8_linears import (
    FP8_DTYPE,
    QuantisedColumnParallelLinear,
    QuantisedRowParallelLinear,
    QuantisedWeight,
    largest_of_rows,
    quantise_linears,
    quantise_rows,
)
from meshwright.runtime.model.kernel_choice import ChosenKernels, choose_kernels
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.profiling.bench import Bench
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs

_PRODUCTS = (
    (64, 4096, 6144),
    (64, 4096, 28672),
    (64, 14336, 4096),
    (1, 4096, 4096),
    (17, 896, 1152),
    (8192, 1536, 8960),
)
_TINY_PRODUCTS = ((4, 64, 160), (1, 64, 32))
"""Rows, inputs and outputs: linears of decode steps of Llama-3.1-8B with 64 rows and one, an odd number of rows of
Qwen2.5-0.5B, and a micro-batch of Qwen2.5-1.5B."""
_TOGETHER = 20
"""Products that are timed one behind the other, each with a weight of its own: as in a decode step, no cache has it."""
_COMPARED = "qwen2.5-0.5b"
_DECODED = ("qwen2.5-1.5b", "llama-3.1-8b")
_ROWS = 64
_REPEATS, _SECONDS = 20, 10.0


def report(world: World) -> str:
    """Three tables of Markdown. A piece that fails says so in its place."""
    found: str = launch(_measured, world, num_ranks=1, setup=ProcessSetup(world.kind))[0]
    return found


def _measured(world: World) -> str:
    """On the one rank."""
    lines = []
    for piece in (_products, _answers, _rounds):
        for line in _or_failure(piece, world):
            lines.append(line)
            tell(line)
    return "\n".join(lines)


def _or_failure(piece: Callable[[World], Iterator[str]], world: World) -> Iterator[str]:
    """Its lines, up to the first line of what it raises."""
    try:
        yield from piece(world)
    except Exception as error:  # whatever a device that never ran this raises, the other pieces are to be seen
        yield f"\nfailed: {_first_line(error)}"
    instruments().release()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _products(world: World) -> Iterator[str]:
    """Each product of 8-bit numbers beside the fp32 product of the same numbers, and what it takes with the rounding of
    its inputs, and this rounding alone, beside the product that it stands for."""
    name = world.precision
    yield f"| rows, inputs, outputs | relative error | of {name} alone | ms | rounding alone, ms | {name} ms |"
    yield "|---|---|---|---|---|---|"
    for rows, inputs, outputs in _TINY_PRODUCTS if world.tiny else _PRODUCTS:
        torch.manual_seed(0)
        given, *weights = (
            torch.randn(n, inputs, device=host.device(), dtype=world.dtype) for n in (rows, *[outputs] * _TOGETHER)
        )
        try:
            yield f"| {rows}, {inputs}, {outputs} | {_product(given, weights)} |"
        except (RuntimeError, ValueError) as error:
            yield f"| {rows}, {inputs}, {outputs} | failed: {_first_line(error)} | | | | |"


def _product(given: Tensor, weights: Sequence[Tensor]) -> str:
    """The row of the products with weights of one size."""
    quantised = [_quantised(weight) for weight in weights]
    exact = _CastUp(quantised[0]).in_fp32(given)
    errors = (_relative(one, exact) for one in (quantised[0].multiply(given), exact.to(given.dtype)))
    ours = _milliseconds([functools.partial(weight.multiply, given) for weight in quantised])
    rounding = _milliseconds([functools.partial(_values, given)] * len(weights))
    whole = _milliseconds([functools.partial(F.linear, given, weight) for weight in weights])
    return " | ".join([*(f"{error:.1e}" for error in errors), f"{ours:.4f}", f"{rounding:.4f}", f"{whole:.4f}"])


def _values(rows: Tensor) -> Tensor:
    values, _ = quantise_rows(rows)
    return values


def _answers(world: World) -> Iterator[str]:
    """Log-probabilities and draws of one model with linears in 8 bits beside those of the same numbers cast up."""
    spec = model_from_config(config_of(world, _COMPARED), name=_COMPARED)
    mesh, kernels = build_mesh(Layout(), 0), _kernels(world, spec)
    whole, quantised, cast_up = (_built(spec, mesh, world, kernels) for _ in range(3))
    for model in (quantised, cast_up):
        _quantise(model)
    _cast_up(cast_up)
    torch.manual_seed(0)
    rows = [torch.randint(spec.vocab_size, (n,)) for n in ((24, 9, 2) if world.tiny else (1024, 700, 33, 2))]
    expected, found, unrounded = (_logprobs(model, mesh, rows) for model in (cast_up, quantised, whole))
    yield f"\n{_COMPARED}, log-probabilities of {len(expected)} tokens, apart from those of the same 8-bit numbers cast"
    yield f"up, mean and most: 8 bits {Apart.of(found, expected)}; {world.precision} {Apart.of(unrounded, expected)}."
    del whole
    drawn = [
        _drawn(model, spec, mesh, world, records)
        for model, records in ((cast_up, False), (quantised, False), (quantised, True))
    ]
    alike = [sum(map(_before_the_first_difference, drawn[0], other)) for other in drawn[1:]]
    both = sum(map(_before_the_first_difference, drawn[1], drawn[2]))
    of_all = sum(map(len, drawn[0]))
    yield f"Of {of_all} tokens drawn at temperature 1 by one seed, so many come before the first of their response that"
    yield f"differs: 8 bits and cast up {alike[0]}, 8 bits recorded and cast up {alike[1]}, recorded and not {both}.\n"


def _rounds(world: World) -> Iterator[str]:
    """What a decode step takes with linears in 8 bits and without."""
    context = 60 if world.tiny else 1000
    yield f"| model | decode, {_ROWS} rows of {context} tokens: ms in {world.precision} | ms in 8 bits | less by |"
    yield "|---|---|---|---|"
    for name in _DECODED[:1] if world.tiny else _DECODED:
        spec = model_from_config(config_of(world, name), name=name)
        point = Point(
            shape=shape_of(spec, 1),
            num_layers=spec.num_layers,
            timed_pass=TimedPass.DECODE,
            rows=_ROWS,
            tokens=1,
            context=context,
        )
        kernels = _kernels(world, spec)
        found = []
        for kind in (Bench, _QuantisedBench):
            bench = kind(
                build_mesh(Layout(), 0),
                instruments(),
                precision=world.precision,
                max_positions=2 * context + 2,
                kernels=kernels,
            )
            found.append(bench.measure_point(point, repeats=_REPEATS, budget_seconds=_SECONDS))
            del bench
            instruments().release()
        before, after = (one.seconds for one in found)
        if before is None or after is None:
            yield f"| {name} | {found[0].reason or before} | {found[1].reason or after} | |"
        else:
            yield f"| {name} | {before * 1e3:.3f} | {after * 1e3:.3f} | {1 - after / before:.0%} |"


class _QuantisedBench(Bench):
    """Of models whose linears are in 8 bits."""

    def _build(self, spec: ModelSpec, key: tuple[object, ...]) -> Decoder:
        known = self.model
        model = super()._build(spec, key)
        if model is not known:
            _quantise(model)
        return model


class _CastUp(QuantisedWeight):
    """The same numbers, multiplied in fp32."""

    def __init__(self, weight: QuantisedWeight) -> None:
        vars(self).update(vars(weight))

    def in_fp32(self, inputs: Tensor) -> Tensor:
        values, scales = _rounded(inputs.reshape(-1, inputs.shape[-1]))
        return F.linear(values.float() * scales, self.dequantised).view(*inputs.shape[:-1], -1)

    def multiply(self, inputs: Tensor) -> Tensor:
        return self.in_fp32(inputs).to(self.meta_parameter.dtype)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit numbers of each row and its scale."""
    scales = largest_of_rows(values) / E4M3_MAX + 1e-12
    return (values / scales).to(FP8_DTYPE), scales


def _quantised(weight: Tensor) -> QuantisedWeight:
    found = QuantisedWeight(nn.Parameter(weight, requires_grad=False))
    found.set(weight, largest_of_rows(weight))
    return found


@torch.no_grad()
def _quantise(model: Decoder) -> None:
    """Puts linears in 8 bits in the place of a model's, with its numbers."""
    blocks = [block for layer in model.decoder.layers for block in (layer.self_attention, layer.mlp)]
    before = [{name: linear.weight for name, linear in block.named_children() if _is_linear(name)} for block in blocks]
    quantise_linears(model)
    for block, weights in zip(blocks, before, strict=True):
        for name, weight in weights.items():
            getattr(block, name).weight.set(weight, largest_of_rows(weight))


def _is_linear(name: str) -> bool:
    return name.startswith("linear_")


def _cast_up(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, QuantisedColumnParallelLinear | QuantisedRowParallelLinear):
            module.weight = _CastUp(module.weight)


def _kernels(world: World, spec: ModelSpec) -> ChosenKernels:
    return choose_kernels(device_capabilities(host.device().type), world.precision, [spec]).without_overlap


def _built(spec: ModelSpec, mesh: Mesh, world: World, kernels: ChosenKernels) -> Decoder:
    found = build_model(spec, mesh, dtype=world.dtype, seed=0, kernels=kernels)
    assert isinstance(found, Decoder)
    found.eval()
    return found


def _logprobs(model: Decoder, mesh: Mesh, rows: Sequence[Tensor]) -> Tensor:
    block = MicroBatch.pack(rows)
    (logprobs,) = forward_logprobs(model, mesh, [block])
    return torch.cat([values[:-1] for values in block.split_rows(logprobs.float().cpu())])


def _drawn(model: Decoder, spec: ModelSpec, mesh: Mesh, world: World, records: bool) -> list[tuple[int, ...]]:
    prompts, tokens = (4, 8) if world.tiny else (16, 64)
    generator = Generator(
        model,
        spec,
        mesh,
        num_slots=prompts,
        max_tokens=16 + tokens,
        max_response=tokens,
        eos_tokens=frozenset(),
        temperature=1.0,
        seed=0,
        use_cuda_graphs=records,
    )
    asked = [Prompt(row=row, sample_id=row, tokens=tuple(range(row + 1, row + 9))) for row in range(prompts)]
    return [tuple(response.tokens) for response in generator.generate(asked)]


def _before_the_first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def _milliseconds(products: Sequence[Work]) -> float:
    """Of one of them. On a GPU all are recorded one behind the other, as in a decode step: eagerly the host decides,
    which takes longer to ask for a small one than it takes."""
    work: Work = functools.partial(_last, products)
    if host.on_cuda():
        work()
        work = CudaGraphs()(work)
    sample = measure(
        work,
        timer=instruments().timer,
        clock=time.perf_counter,
        warmup=3,
        repeats=_REPEATS,
        budget_seconds=_SECONDS,
    )
    return 1e3 * sample.median_seconds / len(products)


def _last(products: Sequence[Work]) -> Tensor:
    """What the last one answers, once all have been made."""
    for product in products[:-1]:
        product()
    return products[-1]()
