"""Costs of the encoder of images of a model of images and text.

The encoder is frozen, as the trainers of the field leave it by default: every pass over prompts runs it forward only,
also in training, and it has no gradients and no optimizer state. Its weights are held whole by every rank, beside those
of the fullest pipeline stage. A replica encodes the images of its rows one after another, and all of its ranks wait for
them; ranks that share rows (tp, cp) each encode the same images.
"""

from __future__ import annotations

from meshwright.cost_models.kernels import Heads, Kernels
from meshwright.profiles.elementwise import N
from meshwright.profiles.model_parts.image_encoder import ImageEncoder
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.workload import Images

IMAGE_ENCODER = "image encoder"
"""Name of the terms for the seconds of encoding images, and for the bytes that are alive meanwhile."""

_NORM_ELEMENTS = 10
"""Elements per patch that the two norms and residuals of a block read and write, over the hidden size."""


def prompt_seconds(encoder: ImageEncoder, images: Images, kernels: Kernels, element_bytes: int) -> float:
    """Return the mean seconds of encoding all images of a prompt."""
    counts = images.token_counts
    each = (image_seconds(encoder, float(tokens), kernels, element_bytes) for tokens in counts.tokens)
    return images.mean_number * sum(share * one for share, one in zip(counts.probabilities, each, strict=True))


def image_seconds(encoder: ImageEncoder, num_tokens: N, kernels: Kernels, element_bytes: int) -> N:
    """Return the seconds of encoding an image of `num_tokens` tokens, or each of several images.

    They are those of the products of patches and tokens, of attention and of element-wise work. Attention is not
    causal: a patch attends to all others of its image or window, which are as many pairs as in causal attention after
    half as many cached ones.
    """
    patches = num_tokens * encoder.patches_per_token
    heads = Heads(encoder.num_heads, encoder.num_heads, encoder.hidden_size / encoder.num_heads)

    def attending(rows: N, length: N) -> N:
        return kernels.attention(rows, length, length / 2, heads, cache_bytes=element_bytes)

    seconds = kernels.products([(encoder.patch_elements, encoder.hidden_size)])(patches)
    seconds = seconds + encoder.num_blocks * kernels.products(encoder.block_linears)(patches)
    seconds = seconds + encoder.num_mergers * kernels.products(encoder.merger_linears)(num_tokens)
    seconds = seconds + encoder.num_full_blocks * attending(1 + 0 * patches, patches)
    if windowed := encoder.num_blocks - encoder.num_full_blocks:
        length = encoder.window_patches + 0 * patches
        seconds = seconds + windowed * attending(patches / length, length)
    elements = _NORM_ELEMENTS * encoder.hidden_size + 4 * encoder.hidden_size + _mlp_elements(encoder)
    return seconds + encoder.num_blocks * kernels.elementwise(patches * elements * element_bytes)


def weight_params(model: ModelSpec) -> int:
    """Return the parameters of a model's encoder, which every rank holds; 0 for a model of text."""
    return model.image_encoder.num_params if model.image_encoder else 0


def working_bytes(encoder: ImageEncoder, images: Images, num_tokens: N, element_bytes: int) -> N:
    """Return the bytes alive while the images of a pass, of `num_tokens` tokens together, are encoded.

    They are those of the widest point of a block for the largest image, and the outputs for all images, which the first
    layers of the text model read.
    """
    patches = images.tokens.max * encoder.patches_per_token
    block = 2 * encoder.hidden_size + max(4 * encoder.hidden_size, _mlp_elements(encoder))
    return (patches * block + num_tokens * encoder.num_mergers * encoder.output_size) * element_bytes


def _mlp_elements(encoder: ImageEncoder) -> int:
    """Elements per patch inside an MLP: its projections, and their activation or product."""
    return (2 + encoder.gated_mlp) * encoder.ffn_size
