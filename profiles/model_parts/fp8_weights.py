"""Generation with fp8 weights: the quantised linears, their scales, and the models and devices that allow it.

    y = (q(x) s) (q(W) t)^T        q(x) = x / s, q(W) = W / t, rounded to e4m3: 4 bits of exponent, 3 of mantissa
    s = max |x| / 448 of each token, t = max |W| / 448 of each output

Per-token and per-output scales factor out of the product, so that it multiplies 8-bit numbers only (Micikevicius et
al., FP8 Formats for Deep Learning, arXiv:2209.05433, sections 3 and 3.1). Embeddings, norms, biases and the head keep
their precision: the head is sensitive to rounding, and the rest is small.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import OWN_ENGINES, EngineName
from meshwright.profiles.hardware import AnyCluster
from meshwright.profiles.model_shape import ModelSpec

GenerationWeights: TypeAlias = Literal["fp8"]
"""Formats of generation weights other than the precision of the job."""

E4M3_MAX = 448.0
"""The largest finite number of e4m3."""

SCALE_BYTES = 4
"""Bytes of the fp32 scale of one output."""

FP8_MULTIPLE = 16
"""Both sides of an fp8 weight must be multiples of this on a GPU (torch.nn.functional.scaled_mm)."""

ENGINES: tuple[EngineName, ...] = (*OWN_ENGINES, "vllm")
"""Engines that quantise refitted weights to fp8. vLLM's scales are coarser, at the same cost."""


class Linears(NamedTuple):
    """Totals over the linears of one layer: weights, inputs per token, and outputs per token.

    Memory and the time of quantising depend on them: weights take a byte each, inputs are quantised for each token, and
    each output has a scale.
    """

    num_weights: int
    num_inputs: int
    num_outputs: int


def linears_of(model: ModelSpec) -> Linears:
    """Return the totals of a layer of a dense model, or of a shard of one."""
    shapes = linear_shapes(model)
    return Linears(
        num_weights=sum(inner * outer for inner, outer in shapes),
        num_inputs=sum(inner for inner, _ in shapes),
        num_outputs=sum(outer for _, outer in shapes),
    )


def linear_shapes(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (input size, output size) of each linear of a layer."""
    hidden = model.hidden_size
    return *model.attention_linears, (hidden, model.up_size), (model.ffn_size, hidden)


def fp8_shape_violations(model: ModelSpec, tp: int) -> tuple[str, ...]:
    """One sentence if a GPU cannot multiply the fp8 shards of one of `tp` ranks; tp must divide the sizes."""
    sides = (side for shape in linear_shapes(model.shard(tp)) for side in shape)
    odd = next((side for side in sides if side % FP8_MULTIPLE), None)
    if odd is None:
        return ()
    return (
        f"tp={tp} leaves a linear of {model.name} with a side of {odd}, and a GPU multiplies 8-bit floats only where "
        f"sides are multiples of {FP8_MULTIPLE}; use a smaller tp, or leave generation_weights out.",
    )


def require_quantisable(model: ModelSpec, cluster: AnyCluster, precision: str, engine: EngineName) -> None:
    """Raises BadInput if generation weights cannot be fp8.

    They cannot for models with experts or an adapter, GPUs without fp8 GEMMs, and engines that cannot quantise refitted
    weights. A CPU stores fp8 weights and casts them when they are used.
    """
    setting, advice = "generation_weights=fp8", "leave generation_weights out."
    if model.experts:
        raise BadInput(f"{setting} is for dense models, and {model.name} has experts; {advice}")
    if model.linear:
        raise BadInput(f"{setting} is for models with attention only, and {model.name} has recurrent layers; {advice}")
    if model.adapter:
        raise BadInput(
            f"{setting} is for actors without an adapter, and this one's weights are shared by all stages; {advice}"
        )
    if engine not in ENGINES:
        known = " or ".join(ENGINES)
        raise BadInput(f"{setting} is not supported by engine {engine} during weight updates; use {known}.")
    for part in cluster.parts:
        if part.kind == "cpu":
            continue
        if "fp8" not in part.device.flops_per_second:
            raise BadInput(
                f"{setting} is for GPUs with fp8 GEMMs, and {part.device.name} does not multiply 8-bit floats; {advice}"
            )
        if precision != "bf16":
            raise BadInput(f"{setting} has bf16 products on a GPU, and precision is {precision}; use bf16.")
