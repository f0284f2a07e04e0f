"""The record of a run: metrics and spans line by line, evaluations, and a summary of predicted and measured times."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.planner.analysis.trace_analysis import Comparison, MeasuredSteps
from meshwright.planner.job.evaluation import HELD_OUT, TRAINING, title_of_set
from meshwright.planner.plan.plan import Plan, read_plan, write_plan
from meshwright.profiles.documents import remove_temporary_files, write_atomically
from meshwright.profiles.observations import draft_counts, observed_speculation
from meshwright.profiles.run_logs import SEGMENT_BYTES, log_files, next_former_plan, rename_log
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import GENERATE, StageGraph
from meshwright.profiles.trace import (
    MAX_SPANS,
    NUM_CHUNK_TOKENS,
    NUM_OVERCOMMIT,
    NUM_ROW_ROUNDS,
    NUM_SAMPLED_TOKENS,
    NUM_SAMPLES,
    Run,
    Span,
    chrome_trace,
    group_by_step,
    iter_spans,
    num_accepted,
    write_spans,
)
from meshwright.runtime.model.end_tokens import StopConditions
from meshwright.runtime.records.metric_writers import MetricWriter, open_metric_writers
from meshwright.runtime.records.resource_use import MemoryUse, ResourceUse
from meshwright.runtime.records.restarts import NEXT_PLAN, Restart, read_restarts
from meshwright.runtime.records.results import PeriodResult
from meshwright.runtime.records.run_directory import RunFile, write_run_file
from meshwright.runtime.records.run_lines import append_line, keep_steps_before, read_lines
from meshwright.runtime.records.version_gap import KL_ERROR, KL_TO_TEACHERS, PROB_ERROR, Gap


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation of the policy, after `step` updates, on a set of held-out prompts (`prompt_set`, its name in the
    job). The standard error is over prompts.

    With `by_teachers` a score is the mean of log p(teachers) - log p(student) per token in nats, the negated
    divergence.
    """

    step: int
    num_prompts: int
    mean_score: float
    standard_error: float
    mean_response_tokens: float
    scores: tuple[float, ...]
    prompt_set: str = HELD_OUT
    prompts: str = ""  # SHA-256 of the encoded prompts, and of limits and rewards of their own (Evaluation.digest)
    generator_gap: float | None = None  # as GeneratorGap.mean, on these responses
    max_generator_gap: float | None = None
    token_mult_prob_error: float | None = None  # mean of exp|log p - log q|, as Gap.mismatch
    gen_kl_error: float | None = None  # KL(p || q), as Gap.mismatch
    by_teachers: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        scores: Mapping[int, float],
        lengths: Mapping[int, int],
        gap: Gap,
        *,
        prompt_set: str = HELD_OUT,
        by_teachers: bool = False,
    ) -> EvaluationRecord:
        """Make the record from the scores and lengths of at least one response, by row."""
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
            prompt_set=prompt_set,
            generator_gap=gaps.get("generator_gap"),
            max_generator_gap=gaps.get("max_generator_gap"),
            token_mult_prob_error=gaps.get(PROB_ERROR),
            gen_kl_error=gaps.get(KL_ERROR),
            by_teachers=by_teachers,
        )

    @property
    def reported_score(self) -> float:
        """The mean score as reported: the divergence (positive) where teachers score."""
        return -self.mean_score if self.by_teachers else self.mean_score

    @property
    def title(self) -> str:
        """The name of the set as it is printed."""
        return title_of_set(self.prompt_set)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The summary of a complete run, written as summary.json."""

    steps: int
    comparisons: tuple[Comparison, ...]
    evaluations: tuple[EvaluationRecord, ...]
    tokens_per_second: float
    response_tokens: float  # mean per response over all steps
    expected_response_tokens: float  # mean of the plan's workload
    memory: tuple[MemoryUse, ...] = ()
    overhead: float | None = None  # fraction of a step outside stages and messages: worst rank, median over steps
    generator_gap: GeneratorGap | None = None  # None if no response was sampled and scored by the same version
    ends: StopConditions | None = None  # the tokens and strings that end a response
    restarts: tuple[Restart, ...] = ()
    kernels: str = ""
    speculation: Speculation | None = None  # acceptance of drafts; None if the plan has none

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of the held-out sets, in the order in which they were first evaluated."""
        return tuple(dict.fromkeys(one.prompt_set for one in self.evaluations))

    def improvement(self, prompt_set: str = HELD_OUT) -> tuple[float, float] | None:
        """Return the rise of the mean score on a held-out set from the first to the last evaluation, and its standard
        error.

        The error is that of the paired differences, as both evaluations use the same prompts. Earlier evaluations on
        other prompts, which a resume may have changed, are left out. None if there are fewer than two.
        """
        on_set = [one for one in self.evaluations if one.prompt_set == prompt_set]
        comparable = [one for one in on_set if one.prompts == on_set[-1].prompts]
        if len(comparable) < 2:
            return None
        first, last = comparable[0], comparable[-1]
        rises = [b - a for a, b in zip(first.scores, last.scores, strict=True)]
        error = statistics.stdev(rises) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
        return statistics.fmean(rises), error


@dataclass(frozen=True, kw_only=True)
class GeneratorGap:
    """The absolute difference between log-probabilities of the generator and of the trainer with the same weights.

    Training responses are compared if the trained policy itself sampled all their tokens, which never happens where
    generation runs ahead. Held-out responses always are, since the generator has the newest weights in an
    evaluation.
    """

    mean: float  # over steps and evaluations
    largest: float
    measured_on: str

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> GeneratorGap | None:
        """Summarise the lines of steps and of evaluations; None if none of them compared anything."""
        compared = {
            name: [line for line in part if line.get("generator_gap") is not None]
            for name, part in (("training", lines), ("held-out", evaluations))
        }
        with_gap = [line for part in compared.values() for line in part]
        if not with_gap:
            return None
        return cls(
            mean=statistics.fmean(line["generator_gap"] for line in with_gap),
            largest=max(line["max_generator_gap"] for line in with_gap),
            measured_on=f"{' and '.join(name for name, part in compared.items() if part)} responses",
        )


class Recorder:
    """Writes the record of a run on the one rank with `is_writer`; does nothing on the others."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        steps: int,
        *,
        is_writer: bool,
        run_file: RunFile | None = None,
        ends: StopConditions | None = None,
        kernels: str = "",
        notes: Sequence[str] = (),
        max_spans: int = MAX_SPANS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`kernels` and `notes` are printed when the run begins.

        The timeline has the last steps with at most `max_spans` spans; the trace is split into segments of
        `segment_bytes`.
        """
        self._max_spans, self._segment_bytes = max_spans, segment_bytes
        self._plan, self._out, self._steps, self._is_writer = plan, out, steps, is_writer
        self._run_file, self._ends, self._kernels, self._notes = run_file, ends, kernels, notes
        self._progress: Progress | None = None
        self._metric_writers: tuple[MetricWriter, ...] = ()
        self._last_end = 0.0

    def open(self, first_step: int) -> None:
        """Begin at `first_step`; lines from that step on, left by a run that was interrupted, are dropped."""
        if not self._is_writer:
            return
        remove_temporary_files(self._out, min_age_seconds=0.0)  # no other process writes here
        self._archive_old_plan(first_step)
        write_plan(self._out / "plan.json", self._plan)
        (self._out / NEXT_PLAN).unlink(missing_ok=True)
        if self._run_file:
            write_run_file(self._out, self._run_file)
        keep_steps_before(self._out / "metrics.jsonl", first_step)
        # An evaluation of step n comes before step n is trained, so that of `first_step` itself is kept.
        keep_steps_before(self._out / "evaluations.jsonl", first_step + 1)
        keep_steps_before(self._out / "trace.jsonl", first_step, with_evaluation=True)
        self._metric_writers = open_metric_writers(self._out, first_step)
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
        for note in (*kernels, *self._notes, *(writer.note for writer in self._metric_writers)):
            self._progress.console.print(note, markup=False, soft_wrap=True, highlight=False)
        self._task = self._progress.add_task("steps", total=self._steps, completed=first_step, learned="")

    def _archive_old_plan(self, first_step: int) -> None:
        """Rename the files of a replaced plan and its trace: later measurements are compared with the new plan."""
        path, trace = self._out / "plan.json", self._out / "trace.jsonl"
        archive = next_former_plan(self._out, first_step)
        has_trace = log_files(trace) or log_files(archive.trace)
        if path.exists() and has_trace and (old := read_plan(path)) != self._plan:
            rename_log(trace, archive.trace)
            write_plan(archive.plan, old)  # last: if this is interrupted, the next start continues under the same name

    def record_period(self, outcomes: Sequence[PeriodResult]) -> Mapping[str, Any] | None:
        """Write the spans of one period of all ranks, and write and return the metrics of the step trained in it.

        Returns None for a period in which stages only run ahead. The seconds of a period start at the end of the one
        before it, or at its own first span if that is later.
        """
        spans = [span for outcome in outcomes for span in outcome.spans]
        write_spans(self._out / "trace.jsonl", spans, segment_bytes=self._segment_bytes)
        begin = max(self._last_end, min(span.start_seconds for span in spans))
        self._last_end = max(span.end_seconds for span in spans)
        metrics = _training_metrics(self._plan.graph, outcomes)
        if not metrics:
            return None
        generated, seconds = metrics["response_tokens"] * self._plan.facts.workload.batch_size, self._last_end - begin
        line = {
            "step": outcomes[0].period,  # a period has the number of the step that is trained in it
            "seconds": seconds,
            "tokens_per_second": generated / seconds,
            "overhead": max(outcome.overhead for outcome in outcomes if outcome.spans),
            **_controller_settings(spans),
            **_sampled_tokens(spans),
            **_draft_metrics(spans),
            **metrics,
        }
        append_line(self._out / "metrics.jsonl", line)
        for writer in self._metric_writers:
            writer.add(TRAINING, line, outcomes[0].period)
        if self._progress:
            self._progress.update(self._task, advance=1, learned=_progress_text(metrics))
        return line

    def record_evaluation(self, evaluation: EvaluationRecord, span: Span) -> None:
        """Write an evaluation and its span."""
        append_line(self._out / "evaluations.jsonl", asdict(evaluation))
        for writer in self._metric_writers:
            writer.add(evaluation.prompt_set, asdict(evaluation), evaluation.step)
        write_spans(self._out / "trace.jsonl", [span], segment_bytes=self._segment_bytes)

    def stop(self) -> None:
        """Stop the progress bar and close the metric writers, without writing a summary."""
        if self._progress:
            self._progress.stop()
        for writer in self._metric_writers:
            writer.close()

    def close(self) -> RunSummary | None:
        """Write the timeline and the summary, which is returned; None on a rank that does not write."""
        if not self._is_writer:
            return None
        self.stop()
        times, use, last_steps = MeasuredSteps(self._plan), ResourceUse(self._plan), deque[list[Span]]()
        first, num_spans, drafts = sys.maxsize, 0, Counter[str]()
        for step, spans in group_by_step(iter_spans(self._out / "trace.jsonl")):
            times.add(step, spans)
            use.add(spans)
            drafts.update(draft_counts(spans))
            last_steps.append(spans)
            first, num_spans = min(first, step), num_spans + len(spans)
            while num_spans > self._max_spans and len(last_steps) > 1:
                num_spans -= len(last_steps.popleft())
        run = Run(spans=tuple(chain(*last_steps)), pools={pool.name: pool.ranks for pool in self._plan.pools})
        write_atomically(self._out / "trace.chrome.json", chrome_trace([run]))
        lines, evaluated = read_lines(self._out / "metrics.jsonl", _summarised), evaluations(self._out)
        first = min(first, lines[-1]["step"])  # first step under this plan; the last one if the trace has no step
        summary = RunSummary(
            steps=self._steps,
            comparisons=(
                *use.offloads(),
                *times.comparisons({line["step"]: line["seconds"] for line in lines if line["step"] >= first}),
            ),
            evaluations=evaluated,
            tokens_per_second=statistics.median(line["tokens_per_second"] for line in lines),
            response_tokens=statistics.fmean(line["response_tokens"] for line in lines),
            expected_response_tokens=self._plan.facts.workload.sampled_lengths.mean,
            memory=use.memory(),
            overhead=statistics.median(line["overhead"] for line in lines),
            generator_gap=GeneratorGap.of(lines, [asdict(one) for one in evaluated]),
            ends=self._ends,
            restarts=read_restarts(self._out),
            kernels=self._kernels,
            speculation=observed_speculation(drafts),
        )
        write_atomically(self._out / "summary.json", _summary_text(summary))
        return summary


def _summary_text(summary: RunSummary) -> str:
    content = asdict(summary) | {"speculation": summary.speculation and summary.speculation.model_dump(mode="json")}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _progress_text(metrics: Mapping[str, float]) -> str:
    """Return the text beside the progress bar."""
    if KL_TO_TEACHERS in metrics and "score" not in metrics:
        return f"KL to the teachers {metrics[KL_TO_TEACHERS]:.3f} nats per token"
    return f"reward {metrics.get('score', 0.0):.3f}"


def evaluations(out: Path) -> tuple[EvaluationRecord, ...]:
    """Return the evaluations that a run has written."""
    return tuple(read_lines(out / "evaluations.jsonl", _evaluation))


def _evaluation(line: Mapping[str, Any]) -> EvaluationRecord:
    return EvaluationRecord(
        **{**line, "mean_score": float(line["mean_score"]), "scores": tuple(map(float, line["scores"]))}
    )


_SUMMARISED = (
    *("step", "seconds", "tokens_per_second", "response_tokens", "overhead"),
    *("generator_gap", "max_generator_gap"),
)
"""Metrics of a step that the summary uses."""


def _summarised(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in _SUMMARISED if name in line}


def _controller_settings(spans: Sequence[Span]) -> dict[str, float]:
    """Return the settings that controllers chose for the generation of a period, if any did."""
    names = {NUM_CHUNK_TOKENS: "chunk_tokens", NUM_OVERCOMMIT: "overcommit"}
    return {name: span.facts[fact] for span in spans for fact, name in names.items() if fact in span.facts}


def _sampled_tokens(spans: Sequence[Span]) -> dict[str, float]:
    """Return the mean tokens over all responses of the prompt batches that the period completed, if any.

    `response_tokens` is the mean over delivered responses, which lacks those deferred to later steps; over a whole run
    the two agree.
    """
    number, tokens = (sum(span.facts.get(fact, 0.0) for span in spans) for fact in (NUM_SAMPLES, NUM_SAMPLED_TOKENS))
    return {"sampled_tokens": tokens / number} if number else {}


def _draft_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return the mean tokens that a sequence samples in a decode round, the share of rounds with a draft, and the
    acceptance of each drafted token given those before it, if the plan drafts."""
    counts = draft_counts(spans)
    observed = observed_speculation(counts)
    if observed is None:
        return {}
    accepted = sum(counts[num_accepted(position)] for position in range(observed.max_draft))
    known = observed.acceptance if observed.drafted else ()
    acceptance = {f"acceptance_{number}": value for number, value in enumerate(known, start=1)}
    return {"tokens_per_round": 1 + accepted / counts[NUM_ROW_ROUNDS], "drafted_share": observed.drafted, **acceptance}


def _training_metrics(graph: StageGraph, outcomes: Sequence[PeriodResult]) -> dict[str, float]:
    """Return the metrics of training stages and of generation with dynamic sampling; empty if stages only run ahead.

    Every rank of a stage reports the same metrics, so those of the first are taken.
    """
    metrics: dict[str, float] = {}
    for stage in (GENERATE, *graph.train_stage.values()):
        metrics |= next((outcome.metrics[stage] for outcome in outcomes if stage in outcome.metrics), {})
    return metrics
