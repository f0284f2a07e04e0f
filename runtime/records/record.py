"""What a run leaves behind: metrics and spans line by line, evaluations, and predicted beside measured times."""

from __future__ import annotations

import json
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.planner.analysis.compare import Comparison, MeasuredSteps
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.profiles.chrome_trace import chrome_trace
from meshwright.profiles.documents import remove_partials, write_atomically
from meshwright.profiles.left_plans import next_left_plan
from meshwright.profiles.segments import SEGMENT_BYTES, files_of, move_log
from meshwright.profiles.stages import GENERATE, StageGraph
from meshwright.profiles.trace import (
    MOST_SPANS,
    NUM_CHUNK_TOKENS,
    NUM_DRAWN,
    NUM_DRAWN_TOKENS,
    NUM_OVERCOMMIT,
    Run,
    Span,
    by_step,
    iter_spans,
    write_spans,
)
from meshwright.runtime.model.end_tokens import ResponseEnds
from meshwright.runtime.records.boards import Board, open_boards
from meshwright.runtime.records.outcome import Outcome
from meshwright.runtime.records.resource_use import MemoryUse, ResourceUse
from meshwright.runtime.records.restarts import Restart, read_restarts
from meshwright.runtime.records.run_file import RunFile, write_run_file
from meshwright.runtime.records.run_lines import append_line, keep_steps_before, read_lines
from meshwright.runtime.records.stopped import NEXT_PLAN
from meshwright.runtime.records.version_gap import KL_ERROR, KL_TO_TEACHERS, PROB_ERROR, Gap


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """Held-out prompts under the policy after `step` updates. The standard error is over prompts.

    `by_teachers` says that a score is how much likelier a token is to the teachers than to the student, in nats: minus
    the divergence.
    """

    step: int
    num_prompts: int
    mean_score: float
    standard_error: float
    mean_response_tokens: float
    scores: tuple[float, ...]
    prompts: str = ""  # SHA-256 of the encoded prompts
    generator_gap: float | None = None  # as GeneratorGap.mean, on these responses
    max_generator_gap: float | None = None
    token_mult_prob_error: float | None = None  # as Gap.mismatch
    gen_kl_error: float | None = None
    by_teachers: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        scores: Mapping[int, float],
        lengths: Mapping[int, int],
        gap: Gap,
        *,
        by_teachers: bool = False,
    ) -> EvaluationRecord:
        """Of scores and lengths of responses by row, of which there is at least one."""
        values = [scores[row] for row in sorted(scores)]
        gaps = gap.metrics("generator_gap") | gap.mismatch()
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        return cls(
            step=step,
            num_prompts=len(values),
            mean_score=statistics.fmean(values),
            standard_error=error,
            mean_response_tokens=statistics.fmean(lengths.values()),
            scores=tuple(values),
            generator_gap=gaps.get("generator_gap"),
            max_generator_gap=gaps.get("max_generator_gap"),
            token_mult_prob_error=gaps.get(PROB_ERROR),
            gen_kl_error=gaps.get(KL_ERROR),
            by_teachers=by_teachers,
        )

    @property
    def told_score(self) -> float:
        """The mean score as it is told: the divergence where teachers score."""
        return -self.mean_score if self.by_teachers else self.mean_score


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What there is to say of a run that came to its end; it is written as summary.json."""

    steps: int
    comparisons: tuple[Comparison, ...]
    evaluations: tuple[EvaluationRecord, ...]
    tokens_per_second: float
    response_tokens: float  # mean per response over all steps
    expected_response_tokens: float  # mean of the plan's workload
    memory: tuple[MemoryUse, ...] = ()
    overhead: float | None = None  # part of a step outside stages and messages: its worst rank, median over steps
    generator_gap: GeneratorGap | None = None  # None where no response was drawn by one version, which then scored it
    ends: ResponseEnds | None = None
    restarts: tuple[Restart, ...] = ()
    kernels: str = ""  # that it computed with

    def improvement(self) -> tuple[float, float] | None:
        """(rise of the mean held-out score from the first to the last evaluation, standard error of the rise).

        Both evaluations answer the same prompts, so the error is that of the paired differences; earlier ones of other
        prompts, which a resume may have changed, are left out.
        """
        same = [one for one in self.evaluations if one.prompts == self.evaluations[-1].prompts]
        if len(same) < 2:
            return None
        first, last = same[0], same[-1]
        rises = [b - a for a, b in zip(first.scores, last.scores, strict=True)]
        error = statistics.stdev(rises) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
        return statistics.fmean(rises), error


@dataclass(frozen=True, kw_only=True)
class GeneratorGap:
    """How far log-probabilities of the generator lie from the trainer's of the same weights.

    Responses of training are compared where the policy that is trained drew all of their tokens, which in a plan whose
    generation works ahead it never did; held-out responses always are, for weights are refit before an evaluation.
    """

    mean: float  # of the steps and evaluations
    largest: float
    measured_on: str

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> GeneratorGap | None:
        """Of the lines of steps and of evaluations; None where none of them compared anything."""
        compared = {
            name: [line for line in part if line.get("generator_gap") is not None]
            for name, part in (("training", lines), ("held-out", evaluations))
        }
        found = [line for part in compared.values() for line in part]
        if not found:
            return None
        return cls(
            mean=statistics.fmean(line["generator_gap"] for line in found),
            largest=max(line["max_generator_gap"] for line in found),
            measured_on=f"{' and '.join(name for name, part in compared.items() if part)} responses",
        )


class Recorder:
    """Writes the record of a run on one rank; silent on the others."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        steps: int,
        *,
        is_writer: bool,
        asked: RunFile | None = None,
        ends: ResponseEnds | None = None,
        kernels: str = "",
        notes: Sequence[str] = (),
        most_spans: int = MOST_SPANS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`kernels`, those that the run computes with, and `notes` are said when it begins. The timeline has the last
        steps with at most `most_spans`, and the trace is cut into segments of `segment_bytes`."""
        self._most_spans, self._segment_bytes = most_spans, segment_bytes
        self._plan, self._out, self._steps, self._is_writer = plan, out, steps, is_writer
        self._asked, self._ends, self._kernels, self._notes = asked, ends, kernels, notes
        self._progress: Progress | None = None
        self._boards: tuple[Board, ...] = ()
        self._last_end = 0.0

    def open(self, first_step: int) -> None:
        """Begins at a step; lines of later steps, left by a run that was cut off, are dropped."""
        if not self._is_writer:
            return
        remove_partials(self._out, least_seconds=0.0)  # nobody else writes here
        self._put_aside_another_plan(first_step)
        write_plan(self._out / "plan.json", self._plan)
        (self._out / NEXT_PLAN).unlink(missing_ok=True)
        if self._asked:
            write_run_file(self._out, self._asked)
        keep_steps_before(self._out / "metrics.jsonl", first_step)
        keep_steps_before(self._out / "evaluations.jsonl", first_step + 1)
        keep_steps_before(self._out / "trace.jsonl", first_step, with_evaluation=True)
        self._boards = open_boards(self._out, first_step)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[learned]}"),
        )
        if self._ends:
            self._progress.console.print(self._ends.sentence, markup=False, highlight=False, soft_wrap=True)
        self._progress.start()
        kernels = (f"kernels: {self._kernels}",) if self._kernels else ()
        for note in (*kernels, *self._notes, *(board.note for board in self._boards)):
            self._progress.console.print(note, markup=False, soft_wrap=True, highlight=False)
        self._task = self._progress.add_task("steps", total=self._steps, completed=first_step, learned="")

    def _put_aside_another_plan(self, first_step: int) -> None:
        """With its trace: what is measured from here on is compared with this plan, and corrects what it was made
        from."""
        path, trace = self._out / "plan.json", self._out / "trace.jsonl"
        left = next_left_plan(self._out, first_step)
        has_trace = files_of(trace) or files_of(left.trace)
        if path.exists() and has_trace and (before := read_plan(path)) != self._plan:
            move_log(trace, left.trace)
            write_plan(left.plan, before)  # last: where this is cut off, the next start goes on under the same name

    def turn(self, outcomes: Sequence[Outcome]) -> Mapping[str, Any] | None:
        """Writes the spans of one turn of all ranks, and the metrics of the step that was trained in it, which it
        returns; None of a turn that only works ahead.

        Its seconds go from the end of the turn before it, or from its own beginning where that is later.
        """
        spans = [span for outcome in outcomes for span in outcome.spans]
        write_spans(self._out / "trace.jsonl", spans, segment_bytes=self._segment_bytes)
        begin = max(self._last_end, min(span.start_seconds for span in spans))
        self._last_end = max(span.end_seconds for span in spans)
        metrics = _trained(self._plan.graph, outcomes)
        if not metrics:
            return None
        generated, seconds = metrics["response_tokens"] * self._plan.facts.workload.batch_size, self._last_end - begin
        line = {
            "step": outcomes[0].turn,
            "seconds": seconds,
            "tokens_per_second": generated / seconds,
            "overhead": max(outcome.overhead for outcome in outcomes if outcome.spans),
            **_decided(spans),
            **_drawn(spans),
            **metrics,
        }
        append_line(self._out / "metrics.jsonl", line)
        for board in self._boards:
            board.add("train", line, outcomes[0].turn)
        if self._progress:
            self._progress.update(self._task, advance=1, learned=_learned(metrics))
        return line

    def evaluation(self, evaluation: EvaluationRecord, span: Span) -> None:
        """Writes an evaluation, and when it was made."""
        append_line(self._out / "evaluations.jsonl", asdict(evaluation))
        for board in self._boards:
            board.add("held_out", asdict(evaluation), evaluation.step)
        write_spans(self._out / "trace.jsonl", [span], segment_bytes=self._segment_bytes)

    def stop(self) -> None:
        """The run ends before its last step: what was written stays, without a summary."""
        if self._progress:
            self._progress.stop()
        for board in self._boards:
            board.close()

    def close(self) -> RunSummary | None:
        """Writes the timeline and the summary; None on a rank that does not write."""
        if not self._is_writer:
            return None
        self.stop()
        times, use, last = MeasuredSteps(self._plan), ResourceUse(self._plan), deque[list[Span]]()
        first, num_last = sys.maxsize, 0
        for step, spans in by_step(iter_spans(self._out / "trace.jsonl")):
            times.add(step, spans)
            use.add(spans)
            last.append(spans)
            first, num_last = min(first, step), num_last + len(spans)
            while num_last > self._most_spans and len(last) > 1:
                num_last -= len(last.popleft())
        run = Run(spans=tuple(chain(*last)), pools={pool.name: pool.ranks for pool in self._plan.pools})
        write_atomically(self._out / "trace.chrome.json", chrome_trace([run]))
        lines, known = read_lines(self._out / "metrics.jsonl", _summed), evaluations(self._out)
        first = min(first, lines[-1]["step"])  # under this plan
        summary = RunSummary(
            steps=self._steps,
            comparisons=(
                *use.offloads(),
                *times.beside({line["step"]: line["seconds"] for line in lines if line["step"] >= first}),
            ),
            evaluations=known,
            tokens_per_second=statistics.median(line["tokens_per_second"] for line in lines),
            response_tokens=statistics.fmean(line["response_tokens"] for line in lines),
            expected_response_tokens=self._plan.facts.workload.drawn_lengths.mean,
            memory=use.memory(),
            overhead=statistics.median(line["overhead"] for line in lines),
            generator_gap=GeneratorGap.of(lines, [asdict(one) for one in known]),
            ends=self._ends,
            restarts=read_restarts(self._out),
            kernels=self._kernels,
        )
        write_atomically(self._out / "summary.json", json.dumps(asdict(summary), indent=2, sort_keys=True) + "\n")
        return summary


def _learned(metrics: Mapping[str, float]) -> str:
    """What a step is told by beside the progress of the run."""
    if KL_TO_TEACHERS in metrics:
        return f"KL to the teachers {metrics[KL_TO_TEACHERS]:.3f} nats a token"
    return f"reward {metrics.get('score', 0.0):.3f}"


def evaluations(out: Path) -> tuple[EvaluationRecord, ...]:
    """Those that a run has written."""
    return tuple(read_lines(out / "evaluations.jsonl", _evaluation))


def _evaluation(line: Mapping[str, Any]) -> EvaluationRecord:
    return EvaluationRecord(
        **{**line, "mean_score": float(line["mean_score"]), "scores": tuple(map(float, line["scores"]))}
    )


_SUMMED = (
    *("step", "seconds", "tokens_per_second", "response_tokens", "overhead"),
    *("generator_gap", "max_generator_gap"),
)
"""What a summary reads of the line of a step."""


def _summed(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in _SUMMED if name in line}


def _decided(spans: Sequence[Span]) -> dict[str, float]:
    """What controllers decided about the generation of a turn, if any did."""
    names = {NUM_CHUNK_TOKENS: "chunk_tokens", NUM_OVERCOMMIT: "overcommit"}
    return {name: span.facts[fact] for span in spans for fact, name in names.items() if fact in span.facts}


def _drawn(spans: Sequence[Span]) -> dict[str, float]:
    """Mean tokens of all responses to the prompt batches that the turn's delivery has made whole, if it did any.

    Beside `response_tokens`, which are those delivered: what is held back is missing there, and in neither over a run.
    """
    number, tokens = (sum(span.facts.get(fact, 0.0) for span in spans) for fact in (NUM_DRAWN, NUM_DRAWN_TOKENS))
    return {"drawn_tokens": tokens / number} if number else {}


def _trained(graph: StageGraph, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The metrics of the training stages, and of a generation in waves; every rank of a stage reports the same, so the
    first one's are taken.

    A turn that only works ahead has none.
    """
    metrics: dict[str, float] = {}
    for stage in (GENERATE, *graph.train_stage.values()):
        metrics |= next((outcome.metrics[stage] for outcome in outcomes if stage in outcome.metrics), {})
    return metrics
