"""A config with keys left out, given twice or contradicting each other is the model that transformers makes of it, or
is refused in a sentence: none is silently another model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from torch import Tensor

from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import model_from_config, read_model, run_violations
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weight_check import weight_violations
from meshwright.runtime.model.weights import load_weights
from meshwright.runtime.training.trainer import MicroBatch, forward_logprobs
from tests.runtime.configs import SHAPES, Case, given_twice, left_out, write
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

TOLERANCE = 1e-4
FIRST = ("Llama", "Gemma", "Qwen3Moe")
"""Families whose configs are checked in the first tier: of norms, of activations and heads, and of experts."""
IDS = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(1))


def computed(directory: Path) -> Tensor | str:
    """Log-probabilities [B, S] of the tokens, or the sentence in which a run refuses the directory."""
    try:
        spec = read_model(directory).for_sequences(IDS.shape[1])
        require_none((*run_violations(spec), *weight_violations(spec, directory)))
    except BadInput as error:
        return str(error)
    mesh = build_mesh(Layout(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # megatron's advice where there are many experts
        model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    block = MicroBatch.pack(IDS)
    [answer] = forward_logprobs(model, mesh, [block])
    return torch.stack(block.split_rows(answer))


@torch.no_grad()
def expected(case: Case, directory: Path) -> Tensor:
    """Those of transformers, [B, S]; without a model_type it is told the class."""
    named = getattr(transformers, f"{case.family}ForCausalLM")
    found = transformers.AutoModelForCausalLM if "model_type" in case.config else named
    # The default products of experts want rows of a multiple of 16 bytes.
    model = found.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    logprobs = model(IDS).logits.log_softmax(-1)
    return torch.nn.functional.pad(logprobs[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1), (0, 1))


def distance(case: Case, directory: Path) -> float | str:
    """How far our log-probabilities are from those of transformers, or the sentence that refuses the config."""
    try:
        model_from_config(case.config, name="m")
    except BadInput as error:  # before weights of the default sizes are made
        return str(error)
    write(case, directory)
    known = expected(case, directory)
    [answer] = run_on_ranks(1, computed, directory)
    return answer if isinstance(answer, str) else float((answer - known).abs().max())


def check(some: Iterable[Case], directory: Path) -> tuple[int, int]:
    """None is another model; how many are the same, and how many are refused in one sentence."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found = {case.name: distance(case, directory / str(number)) for number, case in enumerate(some)}
    sentences = [told for told in found.values() if isinstance(told, str)]
    assert not [told for told in sentences if told.count("\n") or not told.endswith((".", "?"))]
    assert {name: told for name, told in found.items() if not isinstance(told, str) and not told < TOLERANCE} == {}
    return len(found) - len(sentences), len(sentences)


@cases("family", SHAPES, few=("Llama", "Mixtral", "Granite"))
def test_a_config_with_a_key_left_out_is_the_model_of_transformers_or_refused(tmp_path: Path, family: str) -> None:
    same, refused = check(left_out(family), tmp_path)
    assert same >= 8
    assert refused >= 5


@cases("family", SHAPES, few=FIRST)
def test_a_config_that_says_something_twice_is_the_model_of_transformers_or_refused(
    tmp_path: Path, family: str
) -> None:
    same, refused = check(given_twice(family), tmp_path)
    assert same >= 15
    assert refused >= 24


def test_the_configs_are_many() -> None:
    assert len([case for family in SHAPES for case in (*left_out(family), *given_twice(family))]) > 400
