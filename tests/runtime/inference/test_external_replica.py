"""A replica with an engine process: what the engine is given, and what a period delivers and leaves in flight.

The engine counts (`counting_server.py`): the next token is the sum of its weight and of the tokens so far, modulo 100.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from meshwright.cost_models.period_ends import AllSequences, FirstEnded, WholeStep, WholeTurns
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.environment.samples import ToolCall
from meshwright.runtime.environment.worker_pool import ToolAnswer
from meshwright.runtime.inference.chunk_streaming import SampledSequence
from meshwright.runtime.inference.engine_process import EngineProcess
from meshwright.runtime.inference.external_replica import ExternalReplica, RequestedSequence, stored_tensors
from meshwright.runtime.inference.sampling import Sampling
from meshwright.runtime.inference.slots import Finish, Prompt, Response, ResumedSample
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.inference.tool_turns import ToolTurns, TurnLimits
from meshwright.runtime.model.hf_checkpoint import SINGLE
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import Decoder, build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import FAMILIES, write_checkpoint
from tests.runtime.inference.counting_server import MODULUS
from tests.runtime.inference.test_engine_process import start
from tests.runtime.ranks import run_on_ranks

EOS = 99
NUMBERS = Tokenizer(models.WordLevel(vocab={f"{token}.": token for token in range(MODULUS)}, unk_token="0."))
NUMBERS.decoder = decoders.Fuse()
"""Decodes a token as its number and a point."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = start(tmp_path_factory.mktemp("engine"))
    process.wait_until_ready()
    process.take_weights(0, [("bias", torch.tensor([0]))])
    yield process
    process.close()


def replica_of(
    engine: EngineProcess,
    num_slots: int = 4,
    temperature: float = 1.0,
    *,
    weight: int = 0,
    stop: Sequence[str] = (),
    tool_turns: ToolTurns | None = None,
) -> ExternalReplica:
    return ExternalReplica(
        engine,
        lambda: [("bias", torch.tensor([weight]))],
        num_slots=num_slots,
        max_response=6 if tool_turns is None else 9,
        eos_tokens=frozenset({EOS}),
        sampling=Sampling(temperature=temperature, top_k=5, top_p=0.9),
        seed=3,
        stop_strings=StopStrings(NUMBERS, stop) if stop else None,
        tool_turns=tool_turns,
    )


def prompt_of(row: int, *tokens: int, step: int = 0, max_response: int | None = None) -> Prompt:
    return Prompt(row=row, sample_id=100 * step + row, step=step, tokens=tokens, max_response=max_response)


def expected(tokens: Sequence[int], count: int, weight: int = 0) -> tuple[int, ...]:
    """The tokens that follow these."""
    found = list(tokens)
    for _ in range(count):
        found.append((weight + sum(found)) % MODULUS)
    return tuple(found[len(tokens) :])


def sequence_of(prompt: Prompt, *tokens: int) -> RequestedSequence:
    return RequestedSequence(prompt=prompt, first_period=0, tokens=list(tokens))


class Rounds:
    """Counts the tokens of every round."""

    needs_each_round = True

    def __init__(self) -> None:
        self.num_tokens: list[int] = []

    def on_round(self, live: Sequence[SampledSequence], ended: Sequence[Response]) -> None:
        self.num_tokens.append(len(live) + len(ended))


def test_responses_end_at_their_limit_or_with_an_end_token(engine: EngineProcess) -> None:
    prompts = [prompt_of(0, 1, 2), prompt_of(1, 98, 1), prompt_of(2, 5, max_response=2)]
    whole, ended, short = replica_of(engine).generate(prompts, version=0)
    assert (whole.tokens, whole.finish) == (expected((1, 2), 6), Finish.LENGTH)
    assert (ended.tokens, ended.finish) == ((EOS,), Finish.EOS)
    assert (short.tokens, short.finish) == (expected((5,), 2), Finish.LENGTH)
    assert short.logprobs == (-0.5, -0.5)


def test_a_stop_string_ends_a_response_and_frees_its_slot(engine: EngineProcess) -> None:
    prompts = [prompt_of(0, 1, 2), prompt_of(1, 4), prompt_of(2, 5)]
    assert expected((1, 2), 6) == (3, 6, 12, 24, 48, 96)
    stopped, whole, late = replica_of(engine, num_slots=2, stop=(".12.2", "never")).generate(prompts, version=0)
    assert (stopped.tokens, stopped.finish) == ((3, 6, 12, 24), Finish.STOP)
    assert (whole.tokens, whole.finish) == (expected((4,), 6), Finish.LENGTH)
    assert (late.tokens, late.finish) == (expected((5,), 6), Finish.LENGTH)
    assert engine.step() == []  # nothing was left in the engine


def test_a_stop_string_comes_before_the_limit_and_after_an_end_token(engine: EngineProcess) -> None:
    prompts = [prompt_of(0, 1, 2, max_response=2), prompt_of(1, 98, 1)]
    stopped, ended = replica_of(engine, stop=("6.", "99")).generate(prompts, version=0)
    assert (stopped.tokens, stopped.finish) == ((3, 6), Finish.STOP)
    assert (ended.tokens, ended.finish) == ((EOS,), Finish.EOS)


def test_a_stop_string_may_begin_before_a_period_and_end_in_it(engine: EngineProcess) -> None:
    replica = replica_of(engine, stop=("12.24",))
    short, long = prompt_of(0, 7, max_response=3), prompt_of(0, 1, 2, step=1)
    replica.run_period([short, long], version=0, delivery=WholeStep(0))
    assert [partial.tokens for partial in replica.snapshot().paused] == [(3, 6, 12)]
    [stopped] = replica.run_period([], version=0, delivery=WholeStep(1))
    assert (stopped.tokens, stopped.finish) == ((3, 6, 12, 24), Finish.STOP)


class Tools:
    """Answers a call with the number of its turn and a one, at once or some time later."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self.calls: list[ToolCall] = []

    def call(self, call: ToolCall) -> Future[ToolAnswer]:
        self.calls.append(call)
        answered: Future[ToolAnswer] = Future()
        answer = ToolAnswer(f"{call.turn} 1", 0.5)
        if self._late:
            threading.Timer(0.02, answered.set_result, (answer,)).start()
        else:
            answered.set_result(answer)
        return answered


def turns_with(tools: Tools, num_turns: int = 2) -> ToolTurns:
    """Turns that call the tool when a text has 6.12 or 18 in it; an answer is read as numbers."""
    return ToolTurns(
        SimpleNamespace(layout=Layout()),  # type: ignore[arg-type]
        torch.device("cpu"),
        tools,  # type: ignore[arg-type]
        call_end=StopStrings(NUMBERS, ("6.12", "18")),
        limits=TurnLimits(num_turns=num_turns, sampled=6, answer=2, response=9),
        keeps_cache=False,
        describe=lambda prompt, tokens, turn: ToolCall(
            id=str(prompt.row), prompt="", response=str(list(tokens)), turn=turn.number, sampled=""
        ),
        encode=lambda text: tuple(map(int, text.split())),
    )


@pytest.mark.parametrize("late", [False, True])
def test_a_rollout_goes_on_after_the_answer_of_its_tool(late: bool, engine: EngineProcess) -> None:
    tools = Tools(late=late)
    turns = turns_with(tools)
    prompts = [prompt_of(0, 1, 2), prompt_of(1, 2, 1), prompt_of(2, 9, 9)]
    called, other, last = replica_of(engine, num_slots=2, tool_turns=turns).generate(prompts, version=0)
    told = (TOOL_TOKEN_VERSION,) * 2
    for response, prompt in ((called, prompts[0]), (other, prompts[1])):
        assert response.tokens == (3, 6, 12, 1, 1, *expected((*prompt.tokens, 3, 6, 12, 1, 1), 4))
        assert response.versions == (0,) * 3 + told + (0,) * 4
        assert response.logprobs == (-0.5,) * 3 + (0.0,) * 2 + (-0.5,) * 4
        assert response.finish is Finish.LENGTH
    assert (last.tokens, last.finish) == ((18, 1, 1, *expected((9, 9, 18, 1, 1), 6)), Finish.LENGTH)
    assert sorted(call.id for call in tools.calls) == ["0", "1", "2"]
    assert turns.num_calls == 3
    assert engine.step() == []


@pytest.mark.parametrize("late", [False, True])
def test_a_rollout_of_a_later_batch_goes_on_in_the_next_period_under_the_new_weights(
    late: bool, engine: EngineProcess
) -> None:
    replica = replica_of(engine, num_slots=1, tool_turns=turns_with(Tools(late=late)))
    prompts = [prompt_of(0, 1, 2), prompt_of(0, 2, 1, step=1)]
    [first] = replica.run_period(prompts, version=0, delivery=WholeTurns(0, 2, 2))
    assert [version for version in first.versions if version >= 0] == [0] * 7
    assert replica.in_flight == (prompts[1],)
    restored = replica_of(engine, num_slots=1, weight=4, tool_turns=turns_with(Tools(late=late)))
    restored.restore(replica.snapshot())
    [second] = restored.run_period([], version=1, delivery=WholeTurns(1, 2, 2))
    assert second.tokens == (3, 6, 12, 1, 1, *expected((2, 1, 3, 6, 12, 1, 1), 4, weight=4))
    assert second.versions == (0,) * 3 + (TOOL_TOKEN_VERSION,) * 2 + (1,) * 4
    assert engine.step() == []


def test_a_call_without_a_turn_left_truncates_the_rollout(engine: EngineProcess) -> None:
    tools = Tools(late=False)
    [response] = replica_of(engine, tool_turns=turns_with(tools, num_turns=1)).generate([prompt_of(0, 9, 9)], version=0)
    assert (response.tokens, response.finish, tools.calls) == ((18,), Finish.LENGTH, [])
    assert engine.step() == []


def test_a_request_has_the_filters_of_the_job(engine: EngineProcess) -> None:
    sampling = replica_of(engine)._request(sequence_of(prompt_of(0, 1))).sampling
    assert (sampling.top_k, sampling.top_p, sampling.is_greedy) == (5, 0.9, False)


def test_greedy_tokens_have_log_probability_zero(engine: EngineProcess) -> None:
    [response] = replica_of(engine, temperature=0.0).generate([prompt_of(0, 1)], version=0)
    assert response.logprobs == (0.0,) * 6


def test_no_more_sequences_than_slots_are_decoded_together(engine: EngineProcess) -> None:
    rounds, prompts = Rounds(), [prompt_of(row, row + 1) for row in range(5)]
    responses = replica_of(engine, num_slots=2).run_period(prompts, version=0, delivery=AllSequences(), stream=rounds)
    assert [response.row for response in responses] == [0, 1, 2, 3, 4]
    assert max(rounds.num_tokens) == 2
    assert sum(rounds.num_tokens) == sum(len(response.tokens) for response in responses)


def test_new_weights_are_taken_before_the_next_token_and_stamped(engine: EngineProcess) -> None:
    [response] = replica_of(engine, weight=7).generate([prompt_of(0, 1)], version=engine.version + 1)
    assert response.tokens == expected((1,), 6, weight=7)
    assert set(response.versions) == {engine.version}


def test_what_a_period_does_not_deliver_continues_in_the_next_with_new_weights(engine: EngineProcess) -> None:
    replica, first = replica_of(engine), engine.version + 1
    early = [prompt_of(row, row + 1, max_response=2) for row in range(2)]
    late = [prompt_of(row, row + 11, step=1) for row in range(2)]
    delivered = replica.run_period([*early, *late], version=first, delivery=WholeStep(0))
    assert [response.prompt for response in delivered] == early
    assert replica.in_flight == tuple(late)
    rest = replica.run_period([], version=first + 1, delivery=WholeStep(1))
    assert [response.tokens for response in rest] == [expected(prompt.tokens, 6) for prompt in late]
    assert [response.versions for response in rest] == [(first,) * 2 + (first + 1,) * 4] * 2
    assert replica.in_flight == ()


def test_the_first_that_end_are_delivered(engine: EngineProcess) -> None:
    prompts = [prompt_of(row, row + 1, max_response=6 - row) for row in range(4)]
    replica = replica_of(engine)
    delivered = replica.run_period(prompts, version=0, delivery=FirstEnded(count=2, max_deferral=3))
    assert [response.row for response in delivered] == [2, 3]
    assert {prompt.row for prompt in replica.in_flight} == {0, 1}


def test_a_restored_replica_continues_as_the_first_would_have(engine: EngineProcess) -> None:
    prompts = [prompt_of(row, row + 1, step=row % 2, max_response=2 + 4 * (row % 2)) for row in range(6)]
    first = replica_of(engine, num_slots=3)
    first.run_period(prompts, version=0, delivery=WholeStep(0))
    second = replica_of(engine, num_slots=3)
    second.restore(first.snapshot())
    assert second.in_flight == first.in_flight
    one, other = (each.run_period([], version=0, delivery=WholeStep(1)) for each in (first, second))
    assert one == other
    assert [response.tokens for response in one] == [expected(prompt.tokens, 6) for prompt in prompts if prompt.step]


def test_samples_of_an_earlier_run_are_continued_or_delivered(engine: EngineProcess) -> None:
    prompts = [prompt_of(0, 1), prompt_of(1, 2)]
    resumed = {
        0: ResumedSample(tokens=(1, 2), logprobs=(-1.0, -2.0), versions=(0, 0), finish=None),
        1: ResumedSample(tokens=(EOS,), logprobs=(-3.0,), versions=(0,), finish=Finish.EOS),
    }
    one, other = replica_of(engine).run_period(prompts, version=0, delivery=AllSequences(), resumed=resumed)
    assert one.tokens == (1, 2, *expected((1, 1, 2), 4))
    assert one.logprobs[:3] == (-1.0, -2.0, -0.5)
    assert (other.tokens, other.finish) == ((EOS,), Finish.EOS)


def test_the_seed_of_a_request_depends_on_the_sequence_and_its_position(engine: EngineProcess) -> None:
    replica = replica_of(engine)
    seeds = [
        replica._request(sequence).sampling.seed
        for sequence in (
            sequence_of(prompt_of(0, 1)),
            sequence_of(prompt_of(0, 1)),
            sequence_of(prompt_of(1, 1)),
            sequence_of(prompt_of(0, 1), 5),
        )
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


def gathered(directory: Path) -> dict[str, Tensor]:
    """The stored tensors of a model that this rank shares."""
    spec, mesh = read_model(directory), build_mesh(Layout(tp=2), 0)
    model = build_model(spec, mesh)
    assert isinstance(model, Decoder)
    load_weights(model, spec, mesh, directory)
    return dict(stored_tensors(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen2", marks=pytest.mark.check_all)])
def test_ranks_that_share_a_model_gather_what_is_stored(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", family, **FAMILIES[family])
    stored = load_file(directory / SINGLE)
    for tensors in run_on_ranks(2, gathered, directory):
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in stored.items())
