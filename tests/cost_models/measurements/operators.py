"""Operators of an A100 as somebody might have measured them: each kind as far from the laws as it says here."""

from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.profiles.aiconfigurator import Attention, Gemm, HeadCounts, Message, Operators
from meshwright.profiles.efficiency import efficiency_of

EFFICIENCY = efficiency_of("cuda", "a100-80gb")
HEADS = HeadCounts(32, 32, 128)
SIZES = (128, 1024, 4096, 16384)


def operators_by(laws: Kernels) -> Operators:
    """GEMMs take twice what the laws say, prompts three times, decoding half."""
    return Operators(
        device="a100-80gb",
        system="a100_sxm",
        precision="bf16",
        versions={"aiconfigurator-core": "0.12.0", "vllm": "0.14.0", "nccl": "2.27.3"},
        gemms={Gemm(m, k, n): 2 * laws.gemm(m, k, n) for m in SIZES for k in SIZES for n in SIZES if m * n < 2**27},
        prefill_attention={
            HEADS: {Attention(r, t): 3 * prompt(laws, r, t) for r in (1, 8) for t in SIZES if r * t < 65536}
        },
        decode_attention={HEADS: {Attention(r, t): 0.5 * decode(laws, r, t) for r in (1, 8, 64) for t in SIZES}},
        collectives={Message("all_reduce", 8, n): 1e-4 * n / 2**20 for n in (2**20, 2**24)},
    )


def prompt(kernels: Kernels, rows: float, tokens: float) -> float:
    return kernels.attention(rows, tokens, 0, Heads(*HEADS), cache_bytes=2)


def decode(kernels: Kernels, rows: float, context: float) -> float:
    return kernels.attention(rows, 1, context, Heads(*HEADS), cache_bytes=2)
