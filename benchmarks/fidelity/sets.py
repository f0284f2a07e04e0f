"""The sets of rows, what turns each row into an answer, and the bar of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.fidelity.experts import is_balanced, is_large, is_whole, routed
from benchmarks.fidelity.grpo import by_stage, grpo_stage, grpo_step, unread_step
from benchmarks.fidelity.imported import imported_point
from benchmarks.fidelity.inference import (
    engine,
    is_dense_hopper,
    is_hopper,
    is_of_described_release,
    megatron_engine,
    rate_per_gpu,
    time_per_token,
)
from benchmarks.fidelity.inference import is_dense as is_dense_point
from benchmarks.fidelity.installed import EXPERTS, installed_stems, rows_of
from benchmarks.fidelity.layers import is_busy, layer_products
from benchmarks.fidelity.pairs import is_of_pairs, pairs, speedup
from benchmarks.fidelity.primitives import attention, collective, gemm, is_small, vidur_collective
from benchmarks.fidelity.realhf import real_heuristic
from benchmarks.fidelity.refits import in_place, is_in_place, is_loaded, loaded, otherwise, within_step
from benchmarks.fidelity.rows import MissingColumn, Row, RowFiles, Skip, matching, number, row_files, unknown
from benchmarks.fidelity.score import Answer, Bar, Score
from benchmarks.fidelity.shapes import has_experts
from benchmarks.fidelity.trainers import trainer_memory, trainer_step
from benchmarks.fidelity.training import is_dense, is_sixteen_bit, iteration, peak_memory
from meshwright.profiles.errors import BadInput

_TRAINING, _CI = "megatron_training", "megatron_ci"
_EVEN, _UNEVEN = "even", "power law"
"""Loads of experts."""


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows of one kind: the files that hold them (a * in a name stands for anything), which of their rows, and the
    answer to a row of a file.

    `joined` may put rows together before they are answered.
    """

    name: str
    files: tuple[str, ...]
    answer: Callable[[str, Row], Answer]
    where: Callable[[Row], bool] = lambda _: True
    joined: Callable[[Iterable[tuple[str, Row]]], Iterable[tuple[str, Row]]] = lambda rows: rows
    bar: Bar = field(default_factory=Bar)


def _of_dataset(*prefixes: str) -> Callable[[Row], bool]:
    return lambda row: row["dataset"].startswith(prefixes)


_RECIPES = "dgxc_nemo", "megatron_bridge", "mlm", "automodel", "dgxc_maxtext", "torchtitan", "gpu_recipes"


def _other_training(row: Row) -> bool:
    return not row["dataset"].startswith(("vtrain", "korthikanti", "narayanan", "mcore", "llmfoundry", *_RECIPES))


def _recipe(*, dense: bool, adapted: bool = False, sixteen_bit: bool = True) -> Callable[[Row], bool]:
    """Whether a row is of a published recipe of this kind."""

    def is_one(row: Row) -> bool:
        kind = is_dense(row), row["dataset"].endswith("_lora"), is_sixteen_bit(row)
        return row["dataset"].startswith(_RECIPES) and kind == (dense, adapted, sixteen_bit)

    return is_one


def _of_ci(*, dense: bool) -> Callable[[Row], bool]:
    return lambda row: row["dataset"].startswith("mcore_ci") and is_dense(row) == dense


def _training_recipes() -> Iterable[RowSet]:
    """Recipes that were published with their seconds, by what their models are and how they are trained."""
    recipes = RowSet(name="recipes", files=(_TRAINING,), answer=iteration)
    for kind, where in (
        ("dense", _recipe(dense=True)),
        ("experts", _recipe(dense=False)),
        ("adapters", _recipe(dense=True, adapted=True)),
        ("dense, 8 bits and less", _recipe(dense=True, sixteen_bit=False)),
        ("experts, 8 bits and less", _recipe(dense=False, sixteen_bit=False)),
        ("adapters, 8 bits and less", _recipe(dense=True, adapted=True, sixteen_bit=False)),
    ):
        yield replace(recipes, name=f"training recipes, {kind}", where=where)
    yield replace(recipes, name="FSDP of llm-foundry", where=_of_dataset("llmfoundry"))
    for kind, dense in (("dense", True), ("experts", False)):
        yield replace(recipes, name=f"Megatron's CI, {kind}", files=(_CI,), where=_of_ci(dense=dense))
        yield replace(
            recipes,
            name=f"Megatron's CI, peak memory, {kind}",
            files=(_CI,),
            answer=peak_memory,
            where=_of_ci(dense=dense),
        )


def _primitives(name: str) -> tuple[str, ...]:
    return tuple(f"primitives/{device}_{name}" for device in ("a100", "h100", "h200"))


def _serving(what: str, answer: Callable[..., Answer], bar: Bar) -> tuple[RowSet, ...]:
    """A figure of the serving points: by the laws, and with imported operators."""
    by_law = RowSet(name=f"serving, {what}", files=("serving_points",), answer=answer, where=is_dense_hopper, bar=bar)
    imported = partial(answer, point=imported_point)
    others = replace(by_law, bar=Bar())
    return (
        by_law,
        replace(by_law, name=f"{by_law.name}, imported operators", answer=imported),
        replace(others, name=f"{by_law.name}, Blackwell", where=lambda row: is_dense_point(row) and not is_hopper(row)),
        replace(others, name=f"{by_law.name}, experts", where=lambda row: not is_dense_point(row)),
    )


def _by_experts(rows: RowSet) -> tuple[RowSet, RowSet]:
    """Those of dense models, which have a bar, and those of models with experts."""
    dense = replace(rows, where=lambda row: rows.where(row) and not has_experts(row["model_actor"]))
    mixed = replace(rows, where=lambda row: rows.where(row) and has_experts(row["model_actor"]), bar=Bar())
    return dense, replace(mixed, name=f"{rows.name}, experts")


def _routed(device: str, loads: Sequence[str]) -> Iterable[RowSet]:
    """The experts of a layer on one rank, by how evenly they are loaded and how many tokens there are."""
    for load in loads:
        for size, large in (">= 512 tokens", True), ("< 512 tokens", False):
            yield RowSet(
                name=f"experts {device.upper()}, {load}, {size}",
                files=(EXPERTS.format(device),),
                answer=routed,
                where=partial(_is_whole_with, load == _EVEN, large),
            )


def _is_whole_with(even: bool, large: bool, row: Row) -> bool:
    return is_whole(row) and is_balanced(row) == even and is_large(row) == large


def _spread(load: str) -> RowSet:
    """The experts of the busiest of several ranks, for many tokens."""
    return RowSet(
        name=f"experts, busiest of 2 to 16 ranks, {load}, >= 512 tokens",
        files=tuple(EXPERTS.format(device) for device in ("a100", "h100", "h200")),
        answer=routed,
        where=lambda row: not is_whole(row) and is_balanced(row) == (load == _EVEN) and is_large(row),
    )


_TIMES, _RATES = (
    _serving("time per token", time_per_token, Bar(mean=0.12)),
    _serving("rate per GPU", rate_per_gpu, Bar(regret=0.01)),
)


SETS = (
    RowSet(
        name="vTrain multi-node",
        files=(_TRAINING,),
        answer=iteration,
        where=_of_dataset("vtrain_multi"),
        bar=Bar(mean=0.07, spearman=0.98, regret=0.01),
    ),
    RowSet(
        name="vTrain single node",
        files=("megatron_training_vtrain_single_node",),
        answer=iteration,
        bar=Bar(mean=0.09, regret=0.04),
    ),
    RowSet(
        name="Korthikanti, Narayanan",
        files=(_TRAINING,),
        answer=iteration,
        where=_of_dataset("korthikanti", "narayanan"),
        bar=Bar(mean=0.08),
    ),
    RowSet(
        name="Megatron-core H100 weak scaling",
        files=(_TRAINING,),
        answer=iteration,
        where=_of_dataset("mcore_h100"),
        bar=Bar(mean=0.08),
    ),
    *_training_recipes(),
    RowSet(name="other training", files=(_TRAINING,), answer=iteration, where=_other_training),
    RowSet(
        name="TensorRT-LLM throughput",
        files=("inference",),
        answer=engine,
        where=is_of_described_release,
        bar=Bar(mean=0.15, spearman=0.95),
    ),
    RowSet(
        name="other inference", files=("inference",), answer=engine, where=lambda row: not is_of_described_release(row)
    ),
    *(one for pair in zip(_TIMES, _RATES, strict=True) for one in pair),
    RowSet(
        name="ReaL-Heuristic, best single layout",
        files=("rlhf_steps",),
        answer=real_heuristic,
        where=lambda row: row["system"] == "ReaL-Heuristic",
        bar=Bar(mean=0.25),
    ),
    *_by_experts(
        RowSet(
            name="NeMo-RL synchronous steps",
            files=("rlhf_steps",),
            answer=grpo_step,
            where=lambda row: row["system"].startswith("NeMo-RL"),
            bar=Bar(mean=0.20),
        )
    ),
    *_by_experts(
        RowSet(
            name="NeMo-RL stages",
            files=("rlhf_steps",),
            answer=grpo_stage,
            where=lambda row: row["system"].startswith("NeMo-RL"),
            joined=by_stage,
        )
    ),
    *_by_experts(
        RowSet(
            name="asynchronous over synchronous, speed-up",
            files=("rlhf_steps",),
            answer=speedup,
            where=is_of_pairs,
            joined=pairs,
            bar=Bar(mean=0.15),
        )
    ),
    RowSet(
        name="other RLHF steps",
        files=("rlhf_steps",),
        answer=unread_step,
        where=lambda row: not is_of_pairs(row) and row["system"] != "ReaL-Heuristic",
    ),
    RowSet(name="Megatron's engine", files=("megatron_engine_inference",), answer=megatron_engine),
    *(
        RowSet(
            name=f"GEMM {device.upper()}, {what}",
            files=(f"primitives/{device}_gemm_bf16",),
            answer=gemm,
            where=where,
            bar=bar,
        )
        for device in ("a100", "h100", "h200")
        for what, where, bar in (
            ("m >= 64", lambda row: number(row, "m") >= 64, Bar(mean=0.12)),
            ("m < 64", lambda row: number(row, "m") < 64, Bar()),
        )
    ),
    *(
        RowSet(
            name=f"attention {device.upper()}, {kind}",
            files=(f"primitives/{device}_attention_{kind}_bf16",),
            answer=attention,
            bar=Bar(mean=0.15),
        )
        for device in ("a100", "h100", "h200")
        for kind in ("context", "generation")
    ),
    *(
        RowSet(
            name=f"products of a layer {device.upper()}, {what}",
            files=(f"primitives/{device}_*_mlp",),
            answer=layer_products,
            where=where,
        )
        for device in ("a100", "h100")
        for what, where in ((">= 64 tokens", is_busy), ("< 64 tokens", lambda row: not is_busy(row)))
    ),
    RowSet(
        name="collectives, one node, >= 64 KiB",
        files=_primitives("comm"),
        answer=collective,
        where=lambda row: not is_small(row),
        bar=Bar(mean=0.10),
    ),
    RowSet(
        name="collectives, one node, < 64 KiB",
        files=_primitives("comm"),
        answer=collective,
        where=is_small,
        bar=Bar(seconds=2e-6),
    ),
    *_routed("a100", (_UNEVEN,)),
    *(one for device in ("h100", "h200") for one in _routed(device, (_EVEN, _UNEVEN))),
    _spread(_EVEN),
    _spread(_UNEVEN),
    *(
        RowSet(
            name=f"refit, {what}",
            files=("weight_sync_seconds", "verl_param_sync_seconds"),
            answer=answer,
            where=where,
        )
        for what, answer, where in (
            ("through a loader", loaded, is_loaded),
            ("in place", in_place, is_in_place),
            ("otherwise", otherwise, lambda row: not is_loaded(row) and not is_in_place(row)),
        )
    ),
    RowSet(name="refit, in steps of MLPerf", files=("rl_steps_mlperf",), answer=within_step),
    *(
        RowSet(name=f"trainer, {what}", files=("trainer_baselines_primerl",), answer=answer)
        for what, answer in (("step", trainer_step), ("memory of one GPU", trainer_memory))
    ),
    RowSet(name="collectives, vidur", files=("primitives/vidur_network",), answer=vidur_collective),
)


def set_names() -> tuple[str, ...]:
    return tuple(known.name for known in SETS)


def scores_of(folders: Sequence[Path], names: Sequence[str] | None = None, *, installed: bool = False) -> list[Score]:
    """The scores of the sets that have rows in the folders, and of those that are installed where these are asked
    for."""
    files = row_files(folders)
    there = set(files) | (installed_stems() if installed else set())
    chosen = [known for known in SETS if names is None or known.name in names]
    scores = [_score(known, stems, files) for known in chosen if (stems := matching(there, known.files))]
    return [score for score in scores if score.used or score.skipped]


def unread(folders: Sequence[Path]) -> tuple[str, ...]:
    """A sentence for each file of the folders that is not known."""
    every = {stem for known in SETS for stem in known.files}
    return tuple(unknown(row_files(folders), sorted(every)))


def _score(known: RowSet, stems: Sequence[str], files: RowFiles) -> Score:
    """A row that the cost model refuses is skipped like one that asks something else, with the reason."""
    answers: list[Answer] = []
    skipped: Counter[str] = Counter()
    stated = ((stem, row) for stem in stems for row in rows_of(stem, files))
    for stem, row in known.joined((stem, row) for stem, row in stated if _may_be(known, row)):
        try:
            answer = known.answer(stem, row)
            if answer.measured <= 0:
                raise Skip("nothing measured")
            answers.append(answer)
        except MissingColumn:
            raise
        except (Skip, BadInput) as reason:
            skipped[str(reason)] += 1
    return Score(name=known.name, bar=known.bar, answers=tuple(answers), skipped=skipped)


def _may_be(known: RowSet, row: Row) -> bool:
    """Whether a row is of a set; one that does not tell is, and is skipped there."""
    try:
        return known.where(row)
    except Skip:
        return True
