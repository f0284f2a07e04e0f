"""The generation stage on one rank: a period admits prompts, samples, streams to other stages and fills the batch.

`runtime.rollout.admission` decides which prompts a period admits and when it ends.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from meshwright.cost_models.period_ends import AllSequences
from meshwright.planner.job.job import Job
from meshwright.planner.plan.evaluate import keeps_generator
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.controllers import ControllerSetting, setting_facts
from meshwright.profiles.frameworks import GRAPH
from meshwright.profiles.packing import rows_per_prompt
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE, RESPONSE_LENGTHS, SAMPLED_LENGTHS, SEQUENCE_DIGESTS
from meshwright.profiles.trace import (
    CALL_SECONDS,
    FREED_BYTES,
    NUM_CALLS,
    NUM_LIVE,
    NUM_PROMPT_TOKENS,
    NUM_SAMPLED_TOKENS,
    NUM_SAMPLES,
    NUM_TOOL_TOKENS,
    SLEEP_SECONDS,
    WAKE_SECONDS,
)
from meshwright.runtime.environment.environment import Environment
from meshwright.runtime.environment.samples import RewardSample, ToolCall
from meshwright.runtime.environment.worker_pool import ToolWorkers
from meshwright.runtime.inference.chunk_streaming import Chunk, Chunker, Listeners, SampledSequence
from meshwright.runtime.inference.drafts import AcceptanceCounts, ResponseHistory
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.engine_process import EngineProcess
from meshwright.runtime.inference.external_replica import ExternalReplica, refit_tensors
from meshwright.runtime.inference.in_flight import GenerationState
from meshwright.runtime.inference.replica_engine import ReplicaEngine
from meshwright.runtime.inference.sampling import Sampling
from meshwright.runtime.inference.slots import Finish, Prompt, Response, ResumedSample
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.inference.tool_turns import RolloutTurn, ToolTurns, TurnLimits
from meshwright.runtime.messages.experience import StepExperience, digest_of
from meshwright.runtime.messages.sampling_masks import put_sets
from meshwright.runtime.messages.streaming import ChunkSender, Streaming, TokenChunk
from meshwright.runtime.rollout.admission import Admission, replica_share
from meshwright.runtime.rollout.prompts import PromptData
from meshwright.runtime.training.weight_copies import WeightCopy


class GenerationStage:
    """One rank of the generation stage; every rank of its replica does the same.

    A generator and its KV cache live while sequences are in flight, so the memory is free between periods that leave
    nothing in flight. Where the plan leaves enough memory beside all other stages, a generator that replays CUDA graphs
    is kept instead: recording them again takes as long as hundreds of decode steps.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        data: PromptData,
        copy: WeightCopy,
        *,
        steps: range,
        streaming: Streaming,
        environment: Environment | None = None,
        evaluation_environments: Mapping[str, Environment] | None = None,
        tools: ToolWorkers | None = None,
        engine: EngineProcess | None = None,
    ) -> None:
        """`environment` scores the responses on the rank that owns its replica's responses;
        `evaluation_environments`, by the name of the set, score those to held-out sets that have rewards of their own;
        `tools` answer turns of rollouts on the rank that calls them for its replica. `streaming` lists the stages that
        read responses in chunks. `engine` generates instead of our own engine."""
        self._tools, self._engine = tools, engine
        self._scoring = Scoring(environment, data) if environment else None
        self._evaluation_scoring = {name: Scoring(one, data) for name, one in (evaluation_environments or {}).items()}
        self._plan, self._job, self._data, self._copy = plan, job, data, copy
        self._admission = Admission(plan, data, copy.mesh.dp_rank, steps)
        self._generator: ReplicaEngine | None = None
        """The generator with sequences in flight, or one that is kept without."""
        self._has_memory_for_idle = keeps_generator(plan)
        self._tool_turns: ToolTurns | None = None
        """The tool turns of the generator that ran last."""
        self._resumed: dict[int, ResumedSample] = {}
        """Samples made under another plan for prompts that are not admitted yet, by sample id."""
        self._delivered: dict[int, dict[int, int]] = {}
        """Sample ids of delivered responses, by step that is not trained yet and by row."""
        self._history = ResponseHistory()
        """The responses that drafts come from."""
        self._acceptance = AcceptanceCounts(plan.placement(GENERATE).schedule.draft_tokens)
        self._num_wave_prompts = data.num_wave_prompts
        self._wave_prompts_before: dict[int, int] = {}
        """The number of prompts that waves used before a step, for each step that is not yet trained on."""
        workload = plan.facts.workload.wave
        self._rows_per_prompt = rows_per_prompt(workload.batch_size, workload.group_size, copy.mesh.layout.dp)
        self._sending = streaming.sending
        self._setting: ControllerSetting | None = None
        self._streams = [
            Chunker(sending.chunk_tokens, functools.partial(self._send_chunks, sending.sender))
            for sending in streaming.sending
        ]

    def begin_period(self, setting: ControllerSetting | None) -> None:
        """Start a period, with the setting that the controllers decided on, if any."""
        self._setting = setting
        if setting is None:
            return
        self._admission.overcommit = setting.overcommit
        for sending, stream in zip(self._sending, self._streams, strict=True):
            stream.chunk_tokens = min(setting.chunk_tokens, sending.chunk_tokens)

    def snapshot(self) -> GenerationState:
        """Return a snapshot of this rank's generation between two periods."""
        return GenerationState(
            num_admitted=self._admission.num_admitted,
            mean_response_tokens=self._admission.mean_response_tokens,
            partial_batches=self._admission.partial_batches,
            in_flight=self._generator.snapshot() if self._generator and self._generator.in_flight else None,
            resumed=dict(self._resumed),
            delivered={step: dict(rows) for step, rows in self._delivered.items()},
            unadmitted=self._admission.unadmitted,
            end_step=self._admission.end_step,
            num_wave_prompts=self._num_wave_prompts,
            wave_prompts_before=dict(self._wave_prompts_before),
            history=tuple(self._history.entries()),
        )

    def add_resumed(self, resumed: Mapping[int, ResumedSample]) -> None:
        """Set the samples of another plan, by sample id; each is resumed when its prompt is admitted."""
        self._resumed = dict(resumed)

    def restore(self, snapshot: GenerationState) -> None:
        """Restore a snapshot. Stages that read streams start again with all tokens of every sequence in flight."""
        self._admission.restore(
            snapshot.num_admitted, snapshot.mean_response_tokens, snapshot.partial_batches, end_step=snapshot.end_step
        )
        self._delivered = {step: dict(rows) for step, rows in snapshot.delivered.items()}
        self._resumed = dict(snapshot.resumed)
        self._wave_prompts_before = dict(snapshot.wave_prompts_before)
        for prompt, step, response in snapshot.history:
            self._history.add(prompt, response, step)
        if snapshot.in_flight is None:
            return
        self._generator = self._new_generator(self._rows_per_prompt)
        self._generator.restore(snapshot.in_flight)
        for sending in self._sending:
            sending.sender.send(TokenChunk(self._number(prompt), prompt.tokens) for prompt in self._generator.in_flight)
            ended = snapshot.in_flight.ended
            sending.sender.send(TokenChunk(self._number(r.prompt), r.tokens, is_last=True) for r in ended)

    def run(self, batch: StepExperience) -> dict[str, float]:
        """Sample with the current weights until this replica's rows are complete; return statistics of the responses.

        Every rank of the replica then holds all of its rows, whose tokens are stamped with the version of the weights.
        An engine in its own process has the memory of its KV cache only during this time.
        """
        if self._engine is None:
            return self._sample(batch)
        started = time.perf_counter()
        self._engine.wake()
        woken = time.perf_counter()
        facts = self._sample(batch)
        sampled = time.perf_counter()
        freed = self._engine.sleep()
        return {
            **facts,
            WAKE_SECONDS: woken - started,
            SLEEP_SECONDS: time.perf_counter() - sampled,
            FREED_BYTES: float(freed),
        }

    def _sample(self, batch: StepExperience) -> dict[str, float]:
        """Sample as `run` does, with an engine that is awake."""
        mesh = self._copy.mesh
        version = self._copy.version.agreed_version(mesh, batch.step)
        scoring = self._scoring
        if batch.held_out:
            scoring = self._evaluation_scoring.get(batch.held_out, scoring)
            prompts = replica_share(self._data.held_out_batch(batch.held_out), mesh.dp_rank, mesh.layout.dp)
            generator = self._new_generator(drafts=False)
            responses, self._tool_turns = generator.generate(prompts, version=version), generator.tool_turns
            facts: dict[str, float] = {}
            rows = tuple(response.row for response in responses)
            delivered = {response.prompt.sample_id: row for row, response in zip(rows, responses, strict=True)}
        elif batch.is_wave:
            responses, facts = self._run_wave(batch, version)
            rows = tuple(response.row for response in responses)
            delivered = {response.prompt.sample_id: response.row for response in responses}
            _put_lengths_and_digests(batch, responses)
        else:
            responses, facts = self._run_period(batch.step, version)
            rows = self._admission.rows(responses)
            delivered = {r.prompt.sample_id: row for row, r in zip(rows, responses, strict=True)}
            self._record_delivered(batch.step, {row: sample_id for sample_id, row in delivered.items()})
            for sending in self._sending:
                sending.sender.end({self._number(r.prompt): row for row, r in zip(rows, responses, strict=True)})
        if scoring:
            scoring.on_round((), responses)
            scoring.deliver(batch, delivered)
        for row, response in zip(rows, responses, strict=True):
            _put_response(batch, row, response)
        return {
            "num_tokens": float(sum(response.num_sampled for response in responses)),
            "num_truncated": float(sum(response.finish is Finish.LENGTH for response in responses)),
            "num_longest_tokens": float(max((len(response.tokens) for response in responses), default=0)),
            **facts,
            **self._tool_facts(responses),
            **self._draft_facts(),
        }

    def _draft_facts(self) -> dict[str, float]:
        """Return the counts of drafted and accepted tokens since the last call, if the plan drafts."""
        facts = self._acceptance.facts()
        self._acceptance.clear()
        return facts

    def _tool_facts(self, responses: Sequence[Response]) -> dict[str, float]:
        """Return statistics of multi-turn rollouts: the number of tool tokens and, on the rank that calls the tool, the
        number of calls and the seconds spent waiting for them."""
        if not self._tool_turns:
            return {}
        num_tool_tokens = sum(len(response.tokens) - response.num_sampled for response in responses)
        num_calls, seconds = self._tool_turns.take_counts()
        facts = {NUM_TOOL_TOKENS: float(num_tool_tokens)}
        return facts | ({NUM_CALLS: float(num_calls), CALL_SECONDS: seconds} if self._tools else {})

    def _run_period(self, step: int, version: int) -> tuple[tuple[Response, ...], dict[str, float]]:
        """Run the period that delivers `step`; return its responses and its statistics, such as the mean number of live
        sequences."""
        generator = self._generator or self._new_generator(self._rows_per_prompt)
        admitted, rounds = self._admission.admit(step), _Rounds()
        resumed = self._take_resumed(admitted.prompts)
        ended = [
            (p, resumed[p.sample_id].tokens)
            for p in admitted.prompts
            if p.sample_id in resumed and resumed[p.sample_id].finish
        ]
        for sending in self._sending:
            sending.sender.send(TokenChunk(self._number(prompt), prompt.tokens) for prompt in admitted.prompts)
            sending.sender.send(TokenChunk(self._number(prompt), tokens, is_last=True) for prompt, tokens in ended)
        responses = generator.run_period(
            admitted.prompts,
            version=version,
            delivery=admitted.delivery,
            min_rounds=admitted.min_rounds,
            stream=Listeners((*self._streams, rounds, *((self._scoring,) if self._scoring else ()))),
            resumed=resumed,
        )
        delivered, self._tool_turns = self._admission.record_delivered(responses), generator.tool_turns
        self._generator = generator if generator.in_flight or self._keeps_idle(generator) else None
        live = {NUM_LIVE: self._mean_live(rounds)}
        return responses, live | delivered | (setting_facts(self._setting) if self._setting else {})

    def _run_wave(self, batch: StepExperience, version: int) -> tuple[tuple[Response, ...], dict[str, float]]:
        """Sample this replica's share of the next wave of prompts to completion; nothing of a wave stays in flight."""
        mesh, rounds = self._copy.mesh, _Rounds()
        trained = batch.step - self._plan.placement(GENERATE).steps_ahead
        self._wave_prompts_before.setdefault(batch.step, self._num_wave_prompts)
        self._wave_prompts_before = {s: number for s, number in self._wave_prompts_before.items() if s > trained}
        prompts = self._data.wave(batch.step, batch.rows, self._num_wave_prompts)
        self._num_wave_prompts += len(prompts) // self._data.group_size
        generator = self._generator or self._new_generator(self._rows_per_prompt)
        responses = generator.run_period(
            replica_share(prompts, mesh.dp_rank, mesh.layout.dp, self._data.group_size),
            version=version,
            delivery=AllSequences(),
            stream=Listeners((rounds, *((self._scoring,) if self._scoring else ()))),
        )
        self._generator = generator if generator.in_flight or self._keeps_idle(generator) else None
        self._tool_turns = generator.tool_turns
        return responses, {
            NUM_LIVE: self._mean_live(rounds),
            NUM_SAMPLES: float(len(responses)),
            NUM_SAMPLED_TOKENS: float(sum(response.num_sampled for response in responses)),
            NUM_PROMPT_TOKENS: float(sum(len(response.prompt.tokens) for response in responses)),
        }

    def _take_resumed(self, prompts: Iterable[Prompt]) -> dict[int, ResumedSample]:
        """Remove and return the earlier samples of these prompts, by sample id."""
        return {p.sample_id: self._resumed.pop(p.sample_id) for p in prompts if p.sample_id in self._resumed}

    def _record_delivered(self, step: int, rows: Mapping[int, int]) -> None:
        """Remember the sample ids of a delivered step, and forget those of steps that are trained when this period
        ends."""
        trained = step - self._plan.placement(GENERATE).steps_ahead
        self._delivered = {
            delivered_step: sample_ids
            for delivered_step, sample_ids in self._delivered.items()
            if delivered_step > trained
        }
        if step > trained:
            self._delivered[step] = dict(rows)

    def _mean_live(self, rounds: _Rounds) -> float:
        """Return the mean number of live sequences of this replica over the decode rounds."""
        slots = self._plan.placement(GENERATE).schedule.generation_slots
        return rounds.mean_live_per_group * min(self._copy.mesh.layout.pp, slots)

    def _keeps_idle(self, generator: ReplicaEngine) -> bool:
        """True if a generator with nothing in flight has CUDA graphs and the plan has memory for them. One whose
        rollouts are multi-turn is not kept."""
        replays = isinstance(generator, Generator) and generator.replays
        return replays and not generator.tool_turns and self._has_memory_for_idle

    def _new_generator(self, group_size: int = 1, *, drafts: bool = True) -> ReplicaEngine:
        workload, schedule = self._plan.facts.workload.wave, self._plan.placement(GENERATE).schedule
        tool_turns = self._new_tool_turns() if workload.turns else None
        if self._engine:
            settings = self._job.settings
            sampling = Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
            return ExternalReplica(
                self._engine,
                functools.partial(refit_tensors, self._copy.decoder),
                num_slots=schedule.generation_slots,
                max_response=workload.max_response,
                eos_tokens=frozenset(self._data.ends.tokens),
                sampling=sampling,
                seed=self._data.seed,
                stop_strings=self._data.stop,
                tool_turns=tool_turns,
            )
        return Generator(
            self._copy.decoder,
            self._copy.spec,
            self._copy.mesh,
            num_slots=schedule.generation_slots,
            num_blocks=workload.cache_need(schedule, self._copy.mesh.layout.dp).blocks,
            max_tokens=workload.max_tokens,
            max_response=workload.max_response,
            eos_tokens=frozenset(self._data.ends.tokens),
            temperature=self._job.settings.temperature,
            top_k=self._job.settings.top_k,
            top_p=self._job.settings.top_p,
            keeps_mask=workload.kept_tokens > 0,
            stop_strings=self._data.stop,
            seed=self._data.seed,
            recomputes_cache=self._plan.facts.cache_after_refit == "recompute",
            use_cuda_graphs=self._plan.facts.engine == GRAPH,
            group_size=group_size,
            tool_turns=tool_turns,
            draft_tokens=schedule.draft_tokens if drafts else 0,
            history=self._history,
            acceptance=self._acceptance,
        )

    def _new_tool_turns(self) -> ToolTurns:
        workload, tool = self._plan.facts.workload, self._job.tool
        assert workload.turns is not None
        assert tool is not None
        assert self._data.tokenizer is not None
        return ToolTurns(
            self._copy.mesh,
            next(self._copy.decoder.parameters()).device,
            self._tools,
            call_end=StopStrings(self._data.tokenizer, (tool.call_end,)),
            limits=TurnLimits(
                num_turns=workload.turns.number.max,
                sampled=workload.response.max,
                answer=workload.turns.result.max,
                response=workload.max_response,
            ),
            keeps_cache=self._plan.placement(GENERATE).schedule.while_waiting is WhileWaiting.KEEP,
            describe=self._tool_call,
            encode=self._data.encode,
        )

    def _tool_call(self, prompt: Prompt, tokens: Sequence[int], turn: RolloutTurn) -> ToolCall:
        """Return the input of the tool for a turn that calls it."""
        sample = reward_sample(self._data, prompt, tuple(tokens))
        return ToolCall(**vars(sample), turn=turn.number, sampled=self._data.text(tokens[turn.first :]))

    def _send_chunks(self, sender: ChunkSender, chunks: Iterable[Chunk], num_live: int) -> None:
        numbered = (TokenChunk(self._number(c.prompt), c.tokens, is_last=c.finish is not None) for c in chunks)
        sender.send(numbered, num_live)

    def _number(self, prompt: Prompt) -> int:
        """Return the index of a prompt in the concatenation of the batches of all steps."""
        return prompt.step * self._data.batch_size + prompt.row


class Scoring:
    """Passes responses to the environment as they end."""

    needs_each_round = False

    def __init__(self, environment: Environment, data: PromptData) -> None:
        self._environment, self._data = environment, data

    def on_round(self, _live: Sequence[SampledSequence], ended: Sequence[Response]) -> None:
        """Start scoring the responses that ended, if it has not started."""
        for response in ended:
            self._environment.start_scoring(response.prompt.sample_id, functools.partial(self._sample, response))

    def on_rounds(self, _num_live: int, _num_rounds: int) -> None:
        """Do nothing: no response ends in these rounds."""

    def deliver(self, batch: StepExperience, rows: Mapping[int, int]) -> None:
        """Assign scores to rows of the batch; `rows` maps the sample id of a prompt to its row."""
        self._environment.assign_rows(batch.key, rows)

    def _sample(self, response: Response) -> RewardSample:
        return reward_sample(self._data, response.prompt, response.tokens)


def reward_sample(data: PromptData, prompt: Prompt, tokens: tuple[int, ...]) -> RewardSample:
    """Return the input of a reward function: a prompt and the tokens of its response, as ids and as text."""
    return RewardSample(
        id=f"{_source(data, prompt)}/{prompt.row}",
        prompt=data.text(prompt.tokens),
        response=data.text(tokens),
        prompt_ids=prompt.tokens,
        response_ids=tokens,
        answer=data.answer(prompt),
        messages=data.messages(prompt),
    )


def _source(data: PromptData, prompt: Prompt) -> str:
    """Return the step of a training prompt, or the name of a held-out prompt's set, with spaces for underscores."""
    return str(prompt.step) if prompt.sample_id >= 0 else data.held_out_name(prompt.sample_id).replace("_", " ")


class _Rounds:
    """Counts the decode rounds of groups of slots, and the live sequences in them."""

    needs_each_round = False

    def __init__(self) -> None:
        self._num_rounds = self._num_tokens = 0

    def on_round(self, live: Sequence[SampledSequence], ended: Sequence[Response]) -> None:
        self.on_rounds(len(live) + len(ended), 1)

    def on_rounds(self, num_live: int, num_rounds: int) -> None:
        self._num_rounds += num_rounds
        self._num_tokens += num_rounds * num_live

    @property
    def mean_live_per_group(self) -> float:
        """The mean number of sequences of a group that got a token in a round; 0 without any round."""
        return self._num_tokens / max(self._num_rounds, 1)


def _put_lengths_and_digests(wave: StepExperience, responses: Sequence[Response]) -> None:
    """Write the response lengths and sequence digests, for ranks that do not have the tokens of the wave."""
    for response in responses:
        tokens = torch.tensor(response.prompt.tokens + response.tokens)
        wave.experience.put(RESPONSE_LENGTHS, response.row, torch.tensor([len(response.tokens)]))
        wave.experience.put(SAMPLED_LENGTHS, response.row, torch.tensor([response.num_sampled]))
        wave.experience.put(SEQUENCE_DIGESTS, response.row, torch.tensor([digest_of(tokens)]))


def _put_response(batch: StepExperience, row: int, response: Response) -> None:
    """Write the fields of a response. A value per token is stored at the position that predicts the token, one before
    its own."""
    prompt = response.prompt.tokens
    before, after = len(prompt) - 1, 1
    logprobs = [0.0] * before + list(response.logprobs) + [0.0] * after
    versions = [0] * before + list(response.versions) + [0] * after
    batch.experience.put("tokens", row, torch.tensor(prompt + response.tokens))
    batch.experience.put("prompt_lengths", row, torch.tensor([len(prompt)]))
    batch.experience.put("truncated", row, torch.tensor([response.finish is Finish.LENGTH], dtype=torch.uint8))
    batch.experience.put("behaviour_logprobs", row, torch.tensor(logprobs))
    batch.experience.put("versions", row, torch.tensor(versions, dtype=torch.int32))
    if response.kept:
        put_sets(batch.experience, row, [b""] * before + list(response.kept) + [b""] * after)
