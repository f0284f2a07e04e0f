"""The program of one period: the plan lowered to instructions in one order that every rank follows.

In period n an instruction that is `a` steps ahead works on step n + a. Periods run from minus the largest `a` to the
last step, and an instruction is skipped if its step is outside the run. A stage that streams runs at the same time as
its producer, and receives the whole output after its own run; chunks are not instructions. Host workers score
responses while ranks continue; the ranks that generated send the scores when they are ready. With dynamic sampling or
best-of-n, a wave of prompts is sampled and scored, its samples are selected, and the instructions that sample and score
are repeated until the batch is full.

A rank executes the instructions that include it and skips the others. Sends never wait, and a receive comes after its
send, in the same period or a later one, so ranks that follow the order never deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.planner.plan.evaluate import items
from meshwright.planner.plan.plan import Placement, Plan, Refit
from meshwright.profiles.stages import GENERATE, RESPONSE_LENGTHS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS, Role
from meshwright.profiles.trace import instruction_name


@dataclass(frozen=True, kw_only=True)
class MoveWeights:
    """A refit: the weights of the `source` stage's copy are sent to the `target` stage's copy, in every period.

    Ranks of the target wait for the weights. Ranks of the source alone do not wait: their devices may have sent the
    weights right after training them. A simulation and a rehearsal synchronise both sides.
    """

    source: str
    target: str
    ranks: tuple[int, ...]
    steps_ahead: int = 0

    kind = "refit"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.source, self.target)


@dataclass(frozen=True, kw_only=True)
class RunStage:
    """One run of a stage on the ranks of its pool."""

    stage: str
    ranks: tuple[int, ...]
    steps_ahead: int = 0

    kind = "stage"

    @property
    def name(self) -> str:
        return self.stage


@dataclass(frozen=True, kw_only=True)
class Send:
    """The owners of the producer's rows (`ranks`) send `fields` to the ranks that do not have them yet (`targets`)."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    targets: tuple[int, ...]
    steps_ahead: int = 0  # of the producer

    kind = "send"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.producer, self.consumer)


@dataclass(frozen=True, kw_only=True)
class Receive:
    """The receive that matches the send with the same producer and consumer; `ranks` are the targets."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    owners: tuple[int, ...]
    steps_ahead: int = 0  # of the consumer

    kind = "receive"

    @property
    def name(self) -> str:
        return instruction_name(self.kind, self.producer, self.consumer)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Chunks of responses that the `owners` send to the `targets` while the producer and the consumer both run.

    An owner sends its rows' prompts, then every `chunk_tokens` tokens of a row as they are sampled, then the remainder;
    the consumer's run ends once it has received everything.
    """

    producer: str
    consumer: str
    chunk_tokens: int
    owners: tuple[int, ...]
    targets: tuple[int, ...]


Instruction: TypeAlias = MoveWeights | RunStage | Send | Receive


@dataclass(frozen=True)
class Waves:
    """The instructions of a program that sample and score a wave of prompts, repeated until a batch has its groups.

    The first wave runs in the order of the program. After the program's first `num_before_selection` instructions, all
    ranks that sample or score execute `exchange`, the sends and receives of the fields that the rewards need, and
    select samples. Further waves run at this point, one after another.
    """

    instructions: tuple[Instruction, ...]
    exchange: tuple[Send | Receive, ...]
    num_before_selection: int
    steps_ahead: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that process the samples; all of them select the same groups."""
        return tuple(sorted({rank for instruction in self.instructions for rank in instruction.ranks}))


@dataclass(frozen=True)
class Program:
    """Instructions of one period in the order that every rank follows, with the streams and waves among them."""

    instructions: tuple[Instruction, ...]
    streams: tuple[Stream, ...] = ()
    waves: Waves | None = None

    def of_rank(self, rank: int) -> tuple[Instruction, ...]:
        return tuple(i for i in self.instructions if rank in i.ranks)

    @cached_property
    def max_steps_ahead(self) -> int:
        return max((i.steps_ahead for i in self.instructions), default=0)

    def periods(self, steps: range) -> range:
        """Return the periods that a run of these steps takes."""
        return range(steps.start - self.max_steps_ahead, steps.stop)

    def in_step_order(self) -> tuple[Instruction, ...]:
        """Return the refits, then the other instructions in the order in which they process one step."""
        moves = [i for i in self.instructions if isinstance(i, MoveWeights)]
        others = [i for i in self.instructions if not isinstance(i, MoveWeights)]
        return (*moves, *sorted(others, key=lambda i: -i.steps_ahead))

    def synchronous(self) -> Program:
        """Return the program that does all of a step in one period, with the weights at the start of the period.

        Nothing streams: streamed output is received as a whole before the stage that reads it.
        """
        streamed = {(stream.producer, stream.consumer) for stream in self.streams}
        instructions: list[Instruction] = []
        for instruction in self.in_step_order():
            unshifted = replace(instruction, steps_ahead=0)
            if isinstance(unshifted, Receive) and (unshifted.producer, unshifted.consumer) in streamed:
                reader = next(
                    i
                    for i, one in enumerate(instructions)
                    if isinstance(one, RunStage) and one.stage == unshifted.consumer
                )
                instructions.insert(reader, unshifted)
            else:
                instructions.append(unshifted)
        return Program(tuple(instructions))

    @cached_property
    def channels(self) -> Mapping[tuple[str, str], int]:
        """A number for each pair of producer and consumer, which a send and its receive share."""
        exchange = self.waves.exchange if self.waves else ()
        pairs = [(i.producer, i.consumer) for i in (*self.instructions, *exchange) if isinstance(i, Send)]
        return {pair: index for index, pair in enumerate(pairs)}

    def stream_to(self, consumer: str) -> Stream | None:
        """Return the stream to a stage, or None."""
        return next((stream for stream in self.streams if stream.consumer == consumer), None)


def generation_version(plan: Plan, period: int, first_step: int) -> int:
    """Return the version (number of updates) of the weights that period `period` generates with.

    A refit comes before the training of its period. Without a refit, generation shares the copy that is trained.
    """
    if period < first_step:
        return first_step
    generation, training = plan.placement(GENERATE), plan.placement(plan.graph.trainer_of(GENERATE))
    is_trained = plan.copy_of(generation.stage) == training.stage
    return period + (is_trained and generation.start_seconds >= training.end_seconds)


def is_active(instruction: Instruction, period: int, steps: range) -> bool:
    """Return True if the instruction is executed in this period of a run of these steps."""
    return isinstance(instruction, MoveWeights) or period + instruction.steps_ahead in steps


def lower(plan: Plan, stages: Collection[str] | None = None) -> Program:
    """Return the program of a verified plan, or of some of its stages: stages and their refits in order of start.

    A stage's output is sent to a rank once, before the first stage there that reads it.
    """
    position = plan.graph.position
    tasks = [item for item in items(plan) if stages is None or _stage(item) in stages]
    tasks.sort(key=lambda t: (t.start_seconds, isinstance(t, Placement), position[_stage(t)]))
    deliveries = _deliveries(plan, [task for task in tasks if isinstance(task, Placement)])
    instructions: list[Instruction] = []
    for task in tasks:
        if isinstance(task, Refit):
            ranks = {*plan.pool_of(task.source).ranks, *plan.pool_of(task.target).ranks}
            instructions.append(MoveWeights(source=task.source, target=task.target, ranks=tuple(sorted(ranks))))
            continue
        received = [d for d in deliveries if d.consumer == task.stage]
        streamed = [d for d in received if task.schedule.chunk_tokens and plan.stage(d.producer).generates]
        instructions += [d.receive for d in received if d not in streamed]
        instructions.append(
            RunStage(stage=task.stage, ranks=tuple(plan.pool_of(task.stage).ranks), steps_ahead=task.steps_ahead)
        )
        instructions += [d.receive for d in streamed]
        hosted = [host.name for host in plan.graph.host_stages] if task.stage == GENERATE else []
        instructions += [d.send for d in deliveries if d.producer in (task.stage, *hosted)]
    return Program(tuple(instructions), tuple(_streams(plan, [t for t in tasks if isinstance(t, Placement)])))


def _streams(plan: Plan, tasks: Sequence[Placement]) -> Iterator[Stream]:
    for consumer in tasks:
        if consumer.schedule.chunk_tokens:
            yield Stream(
                producer=GENERATE,
                consumer=consumer.stage,
                chunk_tokens=consumer.schedule.chunk_tokens,
                owners=output_owners(plan, GENERATE),
                targets=tuple(plan.pool(consumer.pool).ranks),
            )


def _stage(task: Refit | Placement) -> str:
    return task.target if isinstance(task, Refit) else task.stage


def output_owners(plan: Plan, stage: str) -> tuple[int, ...]:
    """Return the rank that holds each replica's output: its first tensor-parallel rank on the last pipeline stage.

    The output of host workers is held by the ranks that generated.
    """
    stage = stage if stage in plan.graph.by_name else GENERATE
    layout, pool = plan.placement(stage).layout, plan.pool_of(stage)
    return tuple(pool.first_rank + layout.index(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp))


@dataclass(frozen=True, kw_only=True)
class _Delivery:
    """One producer's output for one consumer, to the ranks that have not received it for an earlier consumer."""

    producer: str
    consumer: str
    fields: tuple[str, ...]
    owners: tuple[int, ...]
    targets: tuple[int, ...]
    ahead: tuple[int, int]
    """Steps ahead of the producer and of the consumer."""

    @property
    def send(self) -> Send:
        return Send(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.owners,
            targets=self.targets,
            steps_ahead=self.ahead[0],
        )

    @property
    def receive(self) -> Receive:
        return Receive(
            producer=self.producer,
            consumer=self.consumer,
            fields=self.fields,
            ranks=self.targets,
            owners=self.owners,
            steps_ahead=self.ahead[1],
        )


class _Producer(NamedTuple):
    """A stage, the steps that it works ahead, and the fields that it writes."""

    stage: str
    steps_ahead: int
    writes: tuple[str, ...]


def _deliveries(plan: Plan, tasks: Sequence[Placement]) -> list[_Delivery]:
    """Return the deliveries: every producer's whole output goes to each consuming rank once, for its first consumer."""
    edges = {(edge.producer, edge.consumer) for edge in (*plan.graph.edges, *plan.graph.host_edges)}
    in_order_of_a_step = sorted(tasks, key=lambda placement: -placement.steps_ahead)
    producers = [_Producer(task.stage, task.steps_ahead, plan.stage(task.stage).writes) for task in in_order_of_a_step]
    if any(task.stage == GENERATE for task in tasks):
        ahead = plan.placement(GENERATE).steps_ahead
        producers += [_Producer(host.name, ahead, host.writes) for host in plan.graph.host_stages]
    deliveries = []
    for producer in producers:
        has_received: set[int] = set()
        for consumer in in_order_of_a_step:
            if (producer.stage, consumer.stage) not in edges:
                continue
            targets = tuple(rank for rank in plan.pool(consumer.pool).ranks if rank not in has_received)
            has_received.update(targets)
            if targets:
                deliveries.append(
                    _Delivery(
                        producer=producer.stage,
                        consumer=consumer.stage,
                        fields=producer.writes,
                        owners=output_owners(plan, producer.stage),
                        targets=targets,
                        ahead=(producer.steps_ahead, consumer.steps_ahead),
                    )
                )
    return deliveries


_RESPONSE_FIELDS = ("truncated", RESPONSE_LENGTHS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS)
"""Fields of a response that are exchanged besides its score: those that its reward depends on, and the number of its
sampled tokens."""


def split_waves(program: Program, plan: Plan) -> Program:
    """Return the program with its `waves`; unchanged if a step trains on all samples.

    All other instructions of the step that is sampled come after the selection.
    """
    if not plan.facts.workload.selects_samples:
        return program
    ahead = plan.placement(GENERATE).steps_ahead
    repeated = [instruction for instruction in program.instructions if _is_repeated(instruction, plan)]
    ranks = tuple(sorted({rank for one in repeated if isinstance(one, RunStage) for rank in one.ranks}))
    first, end = (program.instructions.index(one) for one in (repeated[0], repeated[-1]))
    postponed = [
        one
        for one in program.instructions[first : end + 1]
        if one not in repeated and not isinstance(one, MoveWeights) and one.steps_ahead == ahead
    ]
    before = [one for one in program.instructions[: end + 1] if one not in postponed]
    return replace(
        program,
        instructions=(*before, *postponed, *program.instructions[end + 1 :]),
        waves=Waves(tuple(repeated), tuple(_score_exchange(plan, ranks)), len(before), ahead),
    )


def _is_repeated(instruction: Instruction, plan: Plan) -> bool:
    """Return True if the instruction samples, scores, or transfers samples to be scored."""
    match instruction:
        case RunStage(stage=stage):
            return processes_all_samples(plan.stage(stage))
        case Send(producer=producer, consumer=consumer) | Receive(producer=producer, consumer=consumer):
            return producer == GENERATE and processes_all_samples(plan.stage(consumer))
        case _:
            return False


def _score_exchange(plan: Plan, ranks: tuple[int, ...]) -> Iterator[Send | Receive]:
    """Yield the sends and receives by which all ranks of the waves get every field that the samples' rewards need."""
    ahead = plan.placement(GENERATE).steps_ahead
    responses = (GENERATE, _RESPONSE_FIELDS)
    scored = [(stage.name, stage.writes) for stage in plan.graph.stages if stage.role is Role.REWARD]
    for name, fields in (responses, *scored, *((host.name, host.writes) for host in plan.graph.host_stages)):
        owner_ranks = output_owners(plan, name)
        yield Send(producer=name, consumer=GENERATE, fields=fields, ranks=owner_ranks, targets=ranks, steps_ahead=ahead)
        yield Receive(
            producer=name, consumer=GENERATE, fields=fields, ranks=ranks, owners=owner_ranks, steps_ahead=ahead
        )
