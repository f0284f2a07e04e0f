"""The linears of a generator in 8-bit floats, and what they are multiplied with:

    y = (q(x) s) (q(W) t)^T        q(x) = x / s, q(W) = W / t, rounded to e4m3: 4 bits of exponent, 3 of mantissa
    s = max |x| / 448 of each token, t = max |W| / 448 of each output

Scales of rows and of columns leave the product, so that it is one of 8-bit numbers (Micikevicius et al., FP8 Formats
for Deep Learning, arXiv:2209.05433, sections 3 and 3.1). Embeddings, norms, biases and the head stay as they are: the
head decides between words, and the rest is small.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from meshwright.profiles.cluster import AnyCluster
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import OWN, EngineName
from meshwright.profiles.model_shape import ModelSpec

GenerationWeights: TypeAlias = Literal["fp8"]
"""What the weights of a generator may be in, other than the precision of the job."""

LARGEST = 448.0
"""The largest number of e4m3."""

SCALE_BYTES = 4
"""Of the fp32 scale of an output."""

SIDE = 16
"""What both sides of a product of 8-bit numbers are multiples of on a GPU (torch.nn.functional.scaled_mm)."""

ENGINES: tuple[EngineName, ...] = (*OWN, "vllm")
"""Those that make 8-bit floats of what a refit brings. vLLM's scales are coarser, for which costs are the same."""


class Linears(NamedTuple):
    """Of one layer: weights, outputs, and the numbers of a token that they read and that they write."""

    num_weights: int
    num_inputs: int
    num_outputs: int


def linears_of(model: ModelSpec) -> Linears:
    """Of a dense model, or of a shard of one."""
    shapes = products_of(model)
    return Linears(
        num_weights=sum(inner * outer for inner, outer in shapes),
        num_inputs=sum(inner for inner, _ in shapes),
        num_outputs=sum(outer for _, outer in shapes),
    )


def products_of(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Inner and outer size of the products of a layer with weights."""
    hidden = model.hidden_size
    return *model.attention_products, (hidden, model.up_size), (model.ffn_size, hidden)


def odd_sides(model: ModelSpec, tp: int) -> tuple[str, ...]:
    """One sentence where a GPU cannot multiply what one of `tp` ranks holds, which tp divides."""
    sides = (side for shape in products_of(model.shard(tp)) for side in shape)
    odd = next((side for side in sides if side % SIDE), None)
    if odd is None:
        return ()
    return (
        f"tp={tp} leaves a linear of {model.name} with a side of {odd}, and 8-bit floats are multiplied in multiples "
        f"of {SIDE}; use a smaller tp, or leave generation_weights out.",
    )


def require_quantisable(model: ModelSpec, cluster: AnyCluster, precision: str, engine: EngineName) -> None:
    """Raises BadInput for a generator whose weights cannot be in 8 bits: one with experts or an adapter, GPUs that do
    not multiply 8-bit floats, or an engine with other scales. A CPU stores them, and casts them up where they are used.
    """
    begun, way_out = "generation_weights=fp8", "leave generation_weights out."
    if model.experts:
        raise BadInput(f"{begun} is for dense models, and {model.name} has experts; {way_out}")
    if model.adapter:
        raise BadInput(f"{begun}, and the actor has an adapter, whose weights all stages share; {way_out}")
    if engine not in ENGINES:
        known = " or ".join(ENGINES)
        raise BadInput(f"{begun} is not known of engine {engine} while it is given new weights; use {known}.")
    for part in cluster.parts:
        if part.kind == "cpu":
            continue
        if "fp8" not in part.device.flops_per_second:
            raise BadInput(f"{begun}, and {part.device.name} does not multiply 8-bit floats; {way_out}")
        if precision != "bf16":
            raise BadInput(f"{begun}, whose products are bf16 on a GPU, and precision is {precision}; use bf16.")
