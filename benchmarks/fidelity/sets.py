"""The sets of rows, what turns each row into an answer, and the bar of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.fidelity.experts import is_balanced, is_large, is_whole, routed
from benchmarks.fidelity.grpo import grpo_step
from benchmarks.fidelity.imported import imported_point
from benchmarks.fidelity.inference import engine, is_dense_hopper, rate_per_gpu, time_per_token
from benchmarks.fidelity.installed import EXPERTS, installed_stems, rows_of
from benchmarks.fidelity.layers import is_busy, layer_products
from benchmarks.fidelity.pairs import is_of_pairs, pairs, speedup
from benchmarks.fidelity.primitives import attention, collective, gemm, is_small, vidur_collective
from benchmarks.fidelity.realhf import real_heuristic
from benchmarks.fidelity.refits import in_place, loaded, within_step
from benchmarks.fidelity.rows import MissingColumn, Row, Skip, matching, number, row_files, unknown
from benchmarks.fidelity.score import Answer, Bar, Score
from benchmarks.fidelity.shapes import has_experts
from benchmarks.fidelity.trainers import trainer_memory, trainer_step
from benchmarks.fidelity.training import iteration
from meshwright.profiles.errors import BadInput

_TRAINING = "megatron_training"
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


def _other_training(row: Row) -> bool:
    return not row["dataset"].startswith(("vtrain", "korthikanti", "narayanan", "mcore"))


def _is_table(row: Row) -> bool:
    return row["engine"].startswith(("TensorRT-LLM 0.17", "TensorRT-LLM 1.0"))


def _primitives(name: str) -> tuple[str, ...]:
    return tuple(f"primitives/{device}_{name}" for device in ("a100", "h100", "h200"))


def _serving(what: str, answer: Callable[..., Answer], bar: Bar) -> tuple[RowSet, RowSet]:
    """A figure of the serving points: by the laws, and with imported operators."""
    by_law = RowSet(name=f"serving, {what}", files=("serving_points",), answer=answer, where=is_dense_hopper, bar=bar)
    imported = partial(answer, point=imported_point)
    return by_law, replace(by_law, name=f"{by_law.name}, imported operators", answer=imported)


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
        where=_of_dataset("mcore"),
        bar=Bar(mean=0.08),
    ),
    RowSet(name="other training", files=(_TRAINING,), answer=iteration, where=_other_training),
    RowSet(
        name="TensorRT-LLM throughput",
        files=("inference",),
        answer=engine,
        where=_is_table,
        bar=Bar(mean=0.15, spearman=0.95),
    ),
    RowSet(name="other inference", files=("inference",), answer=engine, where=lambda row: not _is_table(row)),
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
            name="asynchronous over synchronous, speed-up",
            files=("rlhf_steps",),
            answer=speedup,
            where=is_of_pairs,
            joined=pairs,
            bar=Bar(mean=0.15),
        )
    ),
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
        RowSet(name=f"refit, {what}", files=("weight_sync_seconds", "verl_param_sync_seconds"), answer=answer)
        for what, answer in (("through a loader", loaded), ("in place", in_place))
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


def scores_of(directory: Path, names: Sequence[str] | None = None, *, installed: bool = False) -> list[Score]:
    """The scores of the sets whose files are in the folder, and of those that are installed where these are asked
    for."""
    files = row_files(directory)
    there = set(files) | (installed_stems() if installed else set())
    chosen = [known for known in SETS if names is None or known.name in names]
    return [_score(known, stems, files) for known in chosen if (stems := matching(there, known.files))]


def unread(directory: Path) -> tuple[str, ...]:
    """A sentence for each file of the folder that is not known."""
    every = {stem for known in SETS for stem in known.files}
    return tuple(unknown(row_files(directory), sorted(every)))


def _score(known: RowSet, stems: Sequence[str], files: dict[str, Path]) -> Score:
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
