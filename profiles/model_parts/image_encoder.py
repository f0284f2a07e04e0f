"""The encoder of images of a model of images and text, and how its config and that of its text model are read.

Known are the vision transformers of Qwen2.5-VL (Bai et al., arXiv:2502.13923, section 2.1.1) and Qwen3-VL (Bai et al.,
arXiv:2511.21631, section 2). An image is cut into patches, which pass all blocks; squares of neighbouring patches are
then merged into one token of the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.profiles.errors import BadInput
from meshwright.profiles.model_parts.hf_config import count_or_zero, required_size


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """The sizes of a vision transformer and of the mergers that bring its patches to the size of the text model.

    In `num_full_blocks` of its `num_blocks` blocks a patch attends to all patches of its image, in the others to the
    `window_patches` of its window. Besides its output the encoder hands on the patches of `num_deepstack` blocks, each
    through a merger of its own, which are added to the hidden states of as many first layers of the text model.
    """

    num_blocks: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    output_size: int  # hidden size of the text model
    patch_elements: int  # values of a patch: channels x frames x height x width
    merge_size: int  # patches along each edge of a merged square
    num_full_blocks: int
    window_patches: int = 0  # 0: every block attends to all patches
    num_positions: int = 0  # learned positions
    num_deepstack: int = 0
    gated_mlp: bool = False
    has_all_biases: bool = False  # biases of the norms and of the projection of patches, besides those of all linears

    @property
    def patches_per_token(self) -> int:
        """Number of patches that are merged into one token."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of a token side by side."""
        return self.patches_per_token * self.hidden_size

    @property
    def block_linears(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear of a block."""
        hidden, up_size = self.hidden_size, (1 + self.gated_mlp) * self.ffn_size
        return (hidden, 3 * hidden), (hidden, hidden), (hidden, up_size), (self.ffn_size, hidden)

    @property
    def merger_linears(self) -> tuple[tuple[int, int], ...]:
        """(input size, output size) of each linear of a merger, whose rows are tokens."""
        return (self.merged_size, self.merged_size), (self.merged_size, self.output_size)

    @property
    def num_mergers(self) -> int:
        return 1 + self.num_deepstack

    @property
    def num_params(self) -> int:
        """Number of parameters. The norm of the last merger is over a patch, those of the others over all patches of a
        token."""
        per_norm = 1 + self.has_all_biases
        patches = self.hidden_size * (self.patch_elements + self.has_all_biases + self.num_positions)
        block = 2 * per_norm * self.hidden_size + _with_biases(self.block_linears)
        merger_norms = per_norm * (self.hidden_size + self.num_deepstack * self.merged_size)
        return patches + self.num_blocks * block + merger_norms + self.num_mergers * _with_biases(self.merger_linears)


def _with_biases(linears: tuple[tuple[int, int], ...]) -> int:
    """Parameters of linears that have a bias."""
    return sum((inner + 1) * outer for inner, outer in linears)


class _Kind(NamedTuple):
    """A model of images and text: the family of its text model, and defaults of both configs in transformers 5.23.

    `ignored` are keys of the family that transformers does not read in the text config of such a model.
    """

    family: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


_COMMON: dict[str, Any] = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_DEEPSTACK: dict[str, Any] = _COMMON | {
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_WINDOWED: dict[str, Any] = _COMMON | {
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_WIDE: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
_KINDS: Mapping[str, _Kind] = {
    "qwen2_5_vl": _Kind(
        "Qwen2",
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_window_layers": 80,
            "max_position_embeddings": 32768,
            "rope_theta": 1_000_000.0,
        },
        _WINDOWED,
        ignored=("head_dim",),
    ),
    "qwen3_vl": _Kind("Qwen3", _WIDE | {"num_key_value_heads": 32, "head_dim": 128}, _DEEPSTACK),
    "qwen3_vl_moe": _Kind(
        "Qwen3Moe",
        _WIDE
        | {
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        _DEEPSTACK,
        ignored=("norm_topk_prob",),
    ),
}
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_TIED = "tie_word_embeddings"


def text_config_of(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the config of the text model of a model of images and text, as one of its family; None for other configs.

    Early configs have the keys of the text model beside those of the encoder. Positions of images are rotated in three
    dimensions ("mrope"), and those of text as by default. Raises BadInput for a config without that of its encoder.
    """
    kind = _KINDS.get(str(config.get("model_type")))
    if kind is None:
        return None
    nested = config.get("text_config")
    if not isinstance(config.get("vision_config"), dict):
        if isinstance(nested, dict):
            return None
        raise BadInput(f"model {name} reads images, and its config has no 'vision_config'; give the complete config.")
    given = {key: value for key, value in config.items() if key not in ("text_config", "vision_config")}
    given = dict(nested) if isinstance(nested, dict) else given
    given = {key: value for key, value in given.items() if key not in ("model_type", *kind.ignored)}
    for key in _ROPE_KEYS:
        if isinstance(given.get(key), dict):
            given[key] = {name: "default" if value == "mrope" else value for name, value in given[key].items()}
    defaults = dict(kind.text)
    if any(isinstance(given.get(key), dict) and "rope_theta" in given[key] for key in _ROPE_KEYS):
        defaults.pop("rope_theta")
    is_tied = config.get(_TIED) or given.get(_TIED) or False
    return {**defaults, **given, _TIED: is_tied, "architectures": [f"{kind.family}ForCausalLM"]}


def encoder_from_config(config: Mapping[str, Any], text_hidden_size: int, name: str) -> ImageEncoder:
    """Return the encoder of a config for which `text_config_of` returns one.

    Raises BadInput for an invalid size, and for an output that is not as wide as the text model.
    """
    vision = {**_KINDS[config["model_type"]].vision, **config["vision_config"]}
    where = f"{name}, vision_config"

    def need(key: str) -> int:
        return required_size(vision, key, where)

    is_windowed = "fullatt_block_indexes" in _KINDS[config["model_type"]].vision
    num_blocks, merge_size, patch_size = need("depth"), need("spatial_merge_size"), need("patch_size")
    if need("hidden_size") % need("num_heads"):
        raise BadInput(
            f"model {where}: num_heads={need('num_heads')} does not divide hidden_size={need('hidden_size')}; correct "
            "the one that does not match the weights."
        )
    if need("out_hidden_size") != text_hidden_size:
        raise BadInput(
            f"model {where}: out_hidden_size={need('out_hidden_size')} is not the hidden_size={text_hidden_size} of "
            "its text model; correct the one that does not match the weights."
        )
    num_full_blocks, window_patches, num_deepstack = num_blocks, 0, 0
    if is_windowed:
        num_full_blocks = len(_blocks(vision, "fullatt_block_indexes", num_blocks, where))
        window_patches = (max(1, need("window_size") // merge_size // patch_size) * merge_size) ** 2
    else:
        num_deepstack = len(_blocks(vision, "deepstack_visual_indexes", num_blocks, where))
    return ImageEncoder(
        num_blocks=num_blocks,
        hidden_size=need("hidden_size"),
        ffn_size=need("intermediate_size"),
        num_heads=need("num_heads"),
        output_size=text_hidden_size,
        patch_elements=need("in_channels") * need("temporal_patch_size") * patch_size**2,
        merge_size=merge_size,
        num_full_blocks=num_full_blocks,
        window_patches=window_patches,
        num_positions=0 if is_windowed else count_or_zero(vision, "num_position_embeddings", where),
        num_deepstack=num_deepstack,
        gated_mlp=is_windowed,
        has_all_biases=not is_windowed,
    )


def _blocks(vision: Mapping[str, Any], key: str, num_blocks: int, where: str) -> tuple[int, ...]:
    """The blocks that a key lists, counted from 0. Raises BadInput unless it is a list of different ones."""
    listed = vision[key]
    if not isinstance(listed, list | tuple) or not all(type(each) is int and 0 <= each < num_blocks for each in listed):
        raise BadInput(f"model {where}: {key}={listed!r:.60} must list blocks between 0 and {num_blocks - 1}.")
    if len({*listed}) != len(listed):
        raise BadInput(f"model {where}: {key} lists a block twice; name each once.")
    return tuple(listed)
