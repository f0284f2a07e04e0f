"""A check that the weights in a Hugging Face directory match its config.json.

It reads only the headers of files, with one exception: if config.json ties the output head to the embedding and both
are stored, their values are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.model_shape import MAX_CONFIG_BYTES, ModelSpec
from meshwright.profiles.untrusted_text import json_value, read_text
from meshwright.runtime.model.hf_checkpoint import (
    Header,
    StoredTensor,
    TensorFiles,
    has_stacks,
    parameters_of_stage,
    recipe,
    starts_at_zero,
    unstack_experts,
)

_DTYPES = ("F32", "BF16", "F16")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096
"""Number of rows of an embedding that are compared at once."""
_UNUSED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")
"""Stored tensors that are not read: a head that is tied or replaced, and the rotary frequencies that old versions of
transformers saved."""


_WITH_UNREAD_PARTS = ("Qwen3Next", "Qwen3_5", "Llama4")
"""Families whose published weights have parts that a model of text does not have."""
_UNREAD_PARTS = re.compile(r"mtp\.|model\.visual\.|vision_model\.|multi_modal_projector\.")
"""Names of these parts: layers that predict further tokens, and an encoder of images."""

_WITH_PREDICTION_LAYERS = ("Glm4Moe", "DeepseekV3")
"""Families whose published weights have more layers than transformers builds."""


def require_weights(plan: Plan, job: Job, directory: Path) -> None:
    """Raises BadInput for a model of the job whose weights the ranks could not load, or would load wrongly.

    `directory` is the base of the job's relative paths.
    """
    for role in job.models.roles:
        path = directory / job.models.source(role).path
        require_none(weight_violations(plan.facts.models.spec(role), path), role.value)


def weight_violations(spec: ModelSpec, directory: Path) -> Iterator[str]:
    """Yields a sentence for each reason why `directory` does not hold the weights of `spec`."""
    yield from _unsupported_config(directory / "config.json")
    try:
        with TensorFiles(directory, spec.name) as files:
            headers = files.headers()
            untied_head = tuple(_untied_head(spec, files, headers, directory))
    except BadInput as error:
        yield str(error)
        return
    yield from untied_head
    extra = _prediction_layers(spec, directory / "config.json")
    headers = {name: header for name, header in headers.items() if _layer_of(name) not in extra}
    if spec.experts and not has_stacks(spec):
        headers = unstack_experts(headers)
    yield from _wrong_depth(spec, headers, directory)
    needed = {
        stored.name: stored
        for parameter in parameters_of_stage(spec, 1, 0)
        if not starts_at_zero(spec, parameter)
        for stored in recipe(spec, parameter).tensors
    }
    yield from _mismatches(needed, headers, spec, directory)
    has_unread_parts = spec.architecture.startswith(_WITH_UNREAD_PARTS)
    for name in sorted(headers.keys() - needed.keys()):
        if not _UNUSED.fullmatch(name) and not (has_unread_parts and _UNREAD_PARTS.match(name)):
            yield (
                f"checkpoint {directory} holds {name!r}, which {spec.architecture} does not have with this "
                "config.json; give the config.json that belongs to the weights."
            )


def _prediction_layers(spec: ModelSpec, config_path: Path) -> range:
    """The numbers of stored layers that predict further tokens: they come after the others, and are not read."""
    if not spec.architecture.startswith(_WITH_PREDICTION_LAYERS):
        return range(0)
    config = json_value(read_text(config_path, "model config", MAX_CONFIG_BYTES), f"model config {config_path}")
    found = [config.get(key) for key in ("num_nextn_predict_layers", "num_mtp_layers")]
    num_extra = next((count for count in found if isinstance(count, int)), 1)
    return range(spec.num_layers, spec.num_layers + num_extra)


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _unsupported_config(config_path: Path) -> Iterator[str]:
    """Yields a sentence for each setting that changes the model beyond its shape."""
    if not config_path.is_file():
        yield f"model {config_path.parent} has no config.json; run needs a Hugging Face directory."
        return
    config = json_value(read_text(config_path, "model config", MAX_CONFIG_BYTES), f"model config {config_path}")
    if config.get("auto_map"):
        yield (
            f"model config {config_path} has auto_map: the model is defined by code of its own, which is not run here; "
            "convert it to a family that transformers has, and remove auto_map."
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "quantised") if isinstance(quantization, dict) else quantization
        yield (
            f"model config {config_path} has quantization_config ({method}): quantised weights cannot be trained here; "
            "give the model in bf16 or fp32."
        )


def _untied_head(spec: ModelSpec, files: TensorFiles, headers: Mapping[str, Header], directory: Path) -> Iterator[str]:
    """Yields a sentence if the stored head differs from the embedding that the config ties it to.

    Transformers 5.23 then uses the stored head (`tie_weights` in its modeling_utils.py).
    """
    shape = (spec.vocab_size, spec.hidden_size)
    if not spec.tied_embeddings or spec.scalar_head:
        return
    if any(name not in headers or headers[name].shape != shape for name in (_EMBEDDING, _HEAD)):
        return
    for first in range(0, spec.vocab_size, _ROWS):
        embedding, head = (
            files.read(StoredTensor(name, shape), start=first, stop=first + _ROWS) for name in (_EMBEDDING, _HEAD)
        )
        if not torch.equal(embedding.float(), head.float()):
            yield (
                f"checkpoint {directory} stores a {_HEAD!r} other than {_EMBEDDING!r}, and config.json ties them; set "
                "tie_word_embeddings to false, or remove the tensor."
            )
            return


def _wrong_depth(spec: ModelSpec, headers: Mapping[str, Header], directory: Path) -> Iterator[str]:
    stored = {int(match[1]) for name in headers if (match := _LAYER.match(name))}
    if stored and max(stored) + 1 != spec.num_layers:
        yield (
            f"checkpoint {directory} holds {max(stored) + 1} layers and config.json says {spec.num_layers}; give the "
            "config.json that belongs to the weights."
        )


def _mismatches(
    needed: Mapping[str, StoredTensor], headers: Mapping[str, Header], spec: ModelSpec, directory: Path
) -> Iterator[str]:
    """Yields a sentence for each tensor that is missing, or has another shape or an unsupported dtype."""
    for name, stored in needed.items():
        header = headers.get(name)
        if header is None and name == "score.weight":
            yield (
                f"checkpoint {directory} has no 'score.weight', the head that gives a score; give a model trained as "
                f"{spec.architecture} with one label."
            )
        elif header is None:
            yield (
                f"checkpoint {directory} has no tensor {name!r}, which model {spec.name} needs; give the weights that "
                "belong to its config.json."
            )
        elif header.shape != stored.whole_shape:
            yield (
                f"checkpoint {directory}: tensor {name!r} has shape {header.shape} and model {spec.name} needs "
                f"{stored.whole_shape}; give the weights that belong to its config.json."
            )
        elif header.dtype not in _DTYPES:
            yield (
                f"checkpoint {directory}: tensor {name!r} is {header.dtype}, not one of {', '.join(_DTYPES)}; give the "
                "model in bf16 or fp32."
            )
