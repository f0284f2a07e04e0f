"""What every engine behind a replica does, for both implementations: our generator, and vLLM in its own process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from meshwright.cost_models.period_ends import WholeStep
from meshwright.planner.job.engine_limits import VLLM_EXPERT_FAMILIES, VLLM_FAMILIES
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, MLP_LINEARS, Adapter
from meshwright.profiles.model_shape import read_model
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.profiles.stages import TOOL_TOKEN_VERSION
from meshwright.runtime.environment.samples import ToolCall
from meshwright.runtime.environment.worker_pool import ToolAnswer
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.engine_process import EngineProcess, EngineSettings, EngineShard
from meshwright.runtime.inference.external_replica import ExternalReplica, refit_tensors, stored_tensors
from meshwright.runtime.inference.replica_engine import ReplicaEngine
from meshwright.runtime.inference.sampling import Sampling
from meshwright.runtime.inference.slots import Finish, Prompt, Response
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.inference.tool_turns import ToolTurns, TurnLimits
from meshwright.runtime.model.adapters import UP, init_adapter
from meshwright.runtime.model.mesh import Mesh, build_mesh
from meshwright.runtime.model.model_shard import build_model, named_global_parameters
from meshwright.runtime.model.weights import load_weights, save_weights
from meshwright.runtime.rollout.external_engine import engine_adapter, shard_of_rank
from meshwright.runtime.training.weight_copies import sampling_spec
from tests.runtime.checkpoints import FAMILIES, tokens, write_checkpoint
from tests.runtime.inference.vllm_environment import VLLM_PYTHON, needs_vllm
from tests.runtime.laws.test_experts import FAMILIES as MIXTURES
from tests.runtime.ranks import run_on_ranks

ENGINES = (
    pytest.param("ours", marks=pytest.mark.slow),
    pytest.param("vllm", marks=(pytest.mark.check_all, needs_vllm)),
    pytest.param("vllm, tp2", marks=(pytest.mark.check_all, needs_vllm)),
)
FAMILY_CASES = tuple(
    pytest.param(
        family, *engine.values, marks=(*engine.marks, *((pytest.mark.check_all,) if family != "Llama" else ()))
    )
    for engine in ENGINES
    for family in (FAMILIES if engine.values == ("ours",) else (*VLLM_FAMILIES, *VLLM_EXPERT_FAMILIES))
)
VOCAB_SIZE = 24
"""Tokens that may be sampled, of the 260 of the model: so few that the end token is sampled now and then."""
EOS, MAX_TOKENS, MAX_RESPONSE = 7, 96, 24
ANSWER = (1, 2, 3)
HEAD_DIM = 32
"""The smallest that vLLM's attention has on a CPU."""
PROMPTS = tuple(
    Prompt(row=row, sample_id=100 + row, tokens=tuple((tokens(1, 3 + row % 5, seed=row)[0] % VOCAB_SIZE).tolist()))
    for row in range(64)
)


class Settings(NamedTuple):
    """How a replica samples, and what ends its responses. Only a greedy one has another temperature than 0.8."""

    sampling: Sampling = Sampling(temperature=0.8)
    num_slots: int = 64
    end_tokens: frozenset[int] = frozenset({EOS})
    stop: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    """Strings that call a tool, which answers with the tokens `ANSWER`."""

    @property
    def stop_strings(self) -> StopStrings | None:
        """Its stop strings."""
        return found_in_text(self.stop) if self.stop else None

    def tool_turns(self, mesh: Mesh) -> ToolTurns | None:
        """The turns of its rollouts."""
        if not self.calls:
            return None
        return ToolTurns(
            mesh,
            torch.device("cpu"),
            Tools(),  # type: ignore[arg-type]
            call_end=found_in_text(self.calls),
            limits=TurnLimits(num_turns=3, sampled=MAX_RESPONSE, answer=len(ANSWER), response=MAX_RESPONSE),
            keeps_cache=False,
            describe=lambda prompt, _tokens, turn: ToolCall(
                id=str(prompt.row), prompt="", response="", turn=turn.number, sampled=""
            ),
            encode=lambda _text: ANSWER,
        )


def found_in_text(strings: tuple[str, ...]) -> StopStrings:
    """The strings in a text that spells a token as its number and a point."""
    spelled = Tokenizer(models.WordLevel(vocab={f"{token}.": token for token in range(VOCAB_SIZE)}, unk_token="0."))
    spelled.decoder = decoders.Fuse()
    return StopStrings(spelled, strings)


class Tools:
    """Answers at once."""

    def call(self, _call: ToolCall) -> Future[ToolAnswer]:
        answered: Future[ToolAnswer] = Future()
        answered.set_result(ToolAnswer("", 0.0))
        return answered


SAMPLED = Settings()
GREEDY = Settings(Sampling(temperature=0.0))
SIXTEEN = GREEDY._replace(num_slots=16)


class Opened(NamedTuple):
    """A function that makes an engine, and those that change the model behind it."""

    replica: Callable[[Settings], ReplicaEngine]
    load: Callable[[Path], None]
    change_adapter: Callable[[int, Path], None]
    """Give the adapter numbers that depend on a seed, and write the model with it merged."""
    process: EngineProcess | None = None


def layout_of(engine: str) -> Layout:
    """One replica of an engine, on a rank or on two."""
    return Layout.parse("tp2" if "tp2" in engine else "tp1")


@functools.cache
def opened(engine: str, directory: Path, adapter: Adapter | None = None) -> Opened:
    """An engine on this rank; a process of vLLM is started once, and ends with the rank."""
    layout = layout_of(engine)
    mesh, stored = build_mesh(layout, 0), replace(read_model(directory), adapter=adapter)
    spec = sampling_spec(stored, VOCAB_SIZE)
    model = build_model(spec, mesh)

    def ours(asked: Settings) -> ReplicaEngine:
        return Generator(
            model,
            spec,
            mesh,
            num_slots=asked.num_slots,
            max_tokens=MAX_TOKENS,
            max_response=MAX_RESPONSE,
            eos_tokens=asked.end_tokens,
            stop_strings=asked.stop_strings,
            tool_turns=asked.tool_turns(mesh),
            **vars(asked.sampling),
            seed=5,
            recomputes_cache=True,
        )

    def theirs(asked: Settings) -> ReplicaEngine:
        return ExternalReplica(
            process,
            functools.partial(refit_tensors, model),
            num_slots=asked.num_slots,
            max_response=MAX_RESPONSE,
            eos_tokens=asked.end_tokens,
            stop_strings=asked.stop_strings,
            tool_turns=asked.tool_turns(mesh),
            sampling=asked.sampling,
            seed=5,
        )

    def load(source: Path) -> None:
        load_weights(model, stored, mesh, source)

    def change_adapter(seed: int, merged: Path) -> None:
        init_adapter(dict(named_global_parameters(model)), seed, tp=layout.tp, tp_rank=mesh.tp_rank)
        for number, (name, parameter) in enumerate(named_global_parameters(model)):
            if name.endswith(UP):
                part = mesh.tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
                numbers = torch.Generator().manual_seed(1000 * (2 * seed + part) + number)
                torch.nn.init.normal_(parameter, std=0.2, generator=numbers)
        save_weights(model, replace(stored, adapter=adapter), mesh, merged, config_from=directory)

    if engine == "ours":
        return Opened(ours, load, change_adapter)
    settings = EngineSettings(
        model=str(directory),
        config={"vocab_size": VOCAB_SIZE},
        dtype="float32",
        max_tokens=MAX_TOKENS,
        num_slots=64,
        max_round_tokens=MAX_TOKENS,  # the prompts are prefilled in several rounds
        block_tokens=BLOCK_TOKENS,
        cache_bytes=2**24,
        temperature=0.8,
        shard=shard_of_rank(layout, 0) or EngineShard(),
        adapter=engine_adapter(spec),
    )
    log = directory.with_name(f"{directory.name}-{mesh.tp_rank}.log")
    process = EngineProcess(VLLM_PYTHON, settings, log=log)
    process.wait_until_ready("0.32.")
    if adapter:
        load(directory)
        process.take_base_weights(stored_tensors(model))
    return Opened(theirs, load, change_adapter, process)


_VERSION = iter(range(1, 10**6))
"""No version of weights is used twice on a rank."""


def sample(
    engine: str, directory: Path, source: Path, prompts: tuple[Prompt, ...], settings: Settings
) -> tuple[tuple[Response, ...], int]:
    """The responses under the weights of `source`, and their version."""
    found, version = opened(engine, directory), next(_VERSION)
    found.load(source)
    return found.replica(settings).generate(prompts, version=version), version


def sample_on_ranks(
    engine: str,
    directory: Path,
    source: Path | None = None,
    *,
    prompts: tuple[Prompt, ...] = PROMPTS,
    settings: Settings = SAMPLED,
) -> tuple[tuple[Response, ...], int]:
    """As `sample`, on all ranks of a replica, which return the same."""
    num_ranks = layout_of(engine).num_ranks
    found, *same = run_on_ranks(
        num_ranks, sample, engine, directory, source or directory, prompts, settings, timeout=300.0
    )
    assert all(other == found for other in same)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "first")


def checkpoint(directory: Path, family: str = "Llama", seed: int = 0) -> Path:
    has_heads = not family.startswith("Qwen2")  # their configurations have no size of a head
    heads = {"head_dim": HEAD_DIM} if has_heads else {"num_attention_heads": 2, "num_key_value_heads": 2}
    return write_checkpoint(directory, family, seed=seed, **{**(FAMILIES | MIXTURES)[family], **heads})


@functools.cache
def reference(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.no_grad()
def policy_logprobs(directory: Path, response: Response, temperature: float) -> torch.Tensor:
    """[response, VOCAB_SIZE]: what the policy gives to each token that may be sampled, by transformers."""
    ids = torch.tensor([response.prompt.tokens + response.tokens])
    logits = reference(directory)(ids).logits[0, len(response.prompt.tokens) - 1 : -1, :VOCAB_SIZE]
    return (logits / (temperature or 1.0)).log_softmax(-1)


@pytest.mark.parametrize(("family", "engine"), FAMILY_CASES)
def test_greedy_responses_are_those_of_transformers_before_and_after_new_weights(
    family: str, engine: str, tmp_path: Path
) -> None:
    first, second = (checkpoint(tmp_path / f"{family}{seed}", family, seed) for seed in range(2))
    for source in (first, second):
        responses, version = sample_on_ranks(engine, first, source, settings=GREEDY)
        for response in responses[:: 1 if family == "Llama" else 8]:
            assert response.tokens == tuple(policy_logprobs(source, response, 0.0).argmax(-1).tolist())
            assert set(response.versions) == {version}
            assert set(response.logprobs) == {0.0}


def sample_adapted(
    engine: str, directory: Path, merged: tuple[Path, ...], adapter: Adapter
) -> tuple[tuple[Response, ...], ...]:
    """The greedy responses under one adapter after another, whose models are written to `merged`."""
    found, responses = opened(engine, directory, adapter), []
    found.load(directory)
    for seed, path in enumerate(merged):
        found.change_adapter(seed, path)
        responses.append(found.replica(GREEDY).generate(PROMPTS, version=next(_VERSION)))
    return tuple(responses)


@pytest.mark.parametrize(("family", "engine"), [case for case in FAMILY_CASES if case.values[0] in FAMILIES])
def test_greedy_responses_are_those_of_transformers_with_the_adapter_of_every_update_merged(
    family: str, engine: str, tmp_path: Path
) -> None:
    directory, merged = checkpoint(tmp_path / family, family), tuple(tmp_path / f"merged{seed}" for seed in range(3))
    linears = (*ATTENTION_LINEARS, *(MLP_LINEARS if family != "Glm4" else ("linear_fc2",)))  # vLLM refuses its gates
    adapter = Adapter(rank=4, alpha=6.0, targets=linears)
    found, *same = run_on_ranks(
        layout_of(engine).num_ranks, sample_adapted, engine, directory, merged, adapter, timeout=300.0
    )
    assert all(other == found for other in same)
    assert len({tuple(response.tokens for response in responses) for responses in found}) == len(merged)
    for path, responses in zip(merged, found, strict=True):
        for response in responses[:: 1 if family == "Llama" else 8]:
            assert response.tokens == tuple(policy_logprobs(path, response, 0.0).argmax(-1).tolist())


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probabilities_are_those_of_the_policy(engine: str, directory: Path) -> None:
    for response in sample_on_ranks(engine, directory)[0][:9]:
        policy = policy_logprobs(directory, response, 0.8)
        expected = policy.gather(1, torch.tensor(response.tokens)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(response.logprobs), expected.double().float(), atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_end_with_an_end_token_or_at_their_limit(engine: str, directory: Path) -> None:
    prompts = tuple(replace(prompt, max_response=5 if prompt.row % 2 else None) for prompt in PROMPTS)
    responses = sample_on_ranks(engine, directory, prompts=prompts)[0]
    assert {response.finish for response in responses} == {Finish.EOS, Finish.LENGTH}
    for response in responses:
        limit = response.prompt.max_response or MAX_RESPONSE
        assert (response.tokens[-1] == EOS) == (response.finish is Finish.EOS)
        assert EOS not in response.tokens[:-1]
        assert len(response.tokens) == limit if response.finish is Finish.LENGTH else len(response.tokens) <= limit


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_sampled_does_not_depend_on_the_slots(engine: str, directory: Path) -> None:
    one, other = (sample_on_ranks(engine, directory, settings=Settings(num_slots=slots))[0] for slots in (64, 3))
    assert [response.tokens for response in one] == [response.tokens for response in other]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("filters", "num_samples"), [({}, 10_000), ({"top_k": 9, "top_p": 0.7}, 2_000), ({"top_k": 4}, 2_000)]
)
def test_first_tokens_have_the_distribution_of_the_policy_under_filters(
    filters: Mapping[str, Any], num_samples: int, engine: str, directory: Path
) -> None:
    prompts = tuple(replace(PROMPTS[0], row=row, sample_id=row, max_response=1) for row in range(num_samples))
    settings = Settings(Sampling(temperature=0.8, **filters))
    responses = sample_on_ranks(engine, directory, prompts=prompts, settings=settings)[0]
    counts = np.bincount([response.tokens[0] for response in responses], minlength=VOCAB_SIZE)
    scores = policy_logprobs(directory, responses[0], 0.8)[:1]
    if "top_k" in filters:
        scores = transformers.TopKLogitsWarper(filters["top_k"])(None, scores)
    if "top_p" in filters:
        scores = transformers.TopPLogitsWarper(filters["top_p"])(None, scores)
    expected = scores[0].softmax(-1).double().numpy() * num_samples
    assert not counts[expected == 0].any()
    kept = expected >= 5
    chi_squared = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert chi_squared < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations above the mean


@pytest.mark.parametrize("engine", ENGINES)
def test_filters_leave_the_log_probabilities_of_the_policy(engine: str, directory: Path) -> None:
    settings = Settings(Sampling(temperature=0.8, top_k=9, top_p=0.7))
    for response in sample_on_ranks(engine, directory, settings=settings)[0][:9]:
        policy = policy_logprobs(directory, response, 0.8)
        expected = policy.gather(1, torch.tensor(response.tokens)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(response.logprobs), expected.double().float(), atol=1e-4)
        assert (policy > expected[:, None]).sum(1).max() < 9  # none of a rank beyond top_k


@pytest.mark.parametrize("engine", ENGINES)
def test_any_of_several_end_tokens_and_stop_strings_ends_a_response(engine: str, directory: Path) -> None:
    """Without them the same tokens are sampled, up to the limit."""
    ends, stop = frozenset({EOS, 11}), ("18.1", "19.2")
    endless = sample_on_ranks(engine, directory, settings=Settings(end_tokens=frozenset()))[0]
    ended = sample_on_ranks(engine, directory, settings=Settings(end_tokens=ends, stop=stop))[0]
    assert {response.finish for response in ended} >= {Finish.EOS, Finish.STOP}
    assert {response.tokens[-1] for response in ended if response.finish is Finish.EOS} == ends
    for whole, response in zip(endless, ended, strict=True):
        assert response.tokens == whole.tokens[: len(response.tokens)]
        *before, text = accumulate(f"{token}." for token in response.tokens)
        assert not any(string in one for one in before for string in stop)
        assert not ends & {*response.tokens[:-1]}
        is_stopped = any(string in text for string in stop) and response.tokens[-1] not in ends
        assert is_stopped == (response.finish is Finish.STOP)


@pytest.mark.parametrize("engine", ENGINES)
def test_rollouts_of_several_turns_go_on_as_transformers_would(engine: str, directory: Path) -> None:
    endless = sample_on_ranks(engine, directory, settings=GREEDY._replace(end_tokens=frozenset()))[0]
    called = Counter(token for response in endless for token in response.tokens[1:-4]).most_common(1)[0][0]
    settings = GREEDY._replace(calls=(f"{called}.",), num_slots=16)
    responses = sample_on_ranks(engine, directory, settings=settings)[0]
    assert sum(TOOL_TOKEN_VERSION in response.versions for response in responses) > 5
    for response in responses:
        is_told = torch.tensor(response.versions) == TOOL_TOKEN_VERSION
        tokens_after = torch.tensor(response.tokens)
        likeliest = policy_logprobs(directory, response, 0.0).argmax(-1)
        assert torch.equal(tokens_after[~is_told], likeliest[~is_told])
        assert tokens_after[is_told].tolist() == ([*ANSWER] * 3)[: int(is_told.sum())]  # the last may be cut


def continue_with_new_weights(
    engine: str, directory: Path, second: Path, through_a_snapshot: bool
) -> tuple[tuple[Response, ...], tuple[Response, ...], int]:
    found, version = opened(engine, directory), next(_VERSION)
    prompts = [
        replace(prompt, step=prompt.row % 2, max_response=24 if prompt.row % 2 else 4) for prompt in PROMPTS[:16]
    ]
    replica = found.replica(SIXTEEN)
    found.load(directory)
    delivered = replica.run_period(prompts, version=version, delivery=WholeStep(0))
    if through_a_snapshot:
        snapshot, replica = replica.snapshot(), found.replica(SIXTEEN)
        replica.restore(snapshot)
    found.load(second)
    assert {prompt.step for prompt in replica.in_flight} == {1}
    return delivered, replica.run_period([], version=next(_VERSION), delivery=WholeStep(1)), version


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("through_a_snapshot", [False, True])
def test_sequences_in_flight_continue_with_new_weights(
    through_a_snapshot: bool, engine: str, directory: Path, tmp_path: Path
) -> None:
    second = checkpoint(tmp_path / "second", seed=1)
    (delivered, rest, version), *_ = run_on_ranks(
        layout_of(engine).num_ranks,
        continue_with_new_weights,
        engine,
        directory,
        second,
        through_a_snapshot,
        timeout=300.0,
    )
    assert {response.step for response in delivered} == {0}
    assert len(rest) == 8
    for response in rest:
        num_old = response.versions.count(version)
        old, new = (policy_logprobs(source, response, 0.0).argmax(-1) for source in (directory, second))
        assert response.versions == (version,) * num_old + (version + 1,) * (len(response.tokens) - num_old)
        assert response.tokens == (*old[:num_old].tolist(), *new[num_old:].tolist())
    assert any(0 < response.versions.count(version) < len(response.tokens) for response in rest)


def _sleep(engine: str, directory: Path) -> tuple[list[tuple[Response, ...]], int, list[int]]:
    """Greedy responses before and after a sleep, the bytes that it freed, and those of the process before, in and after
    it."""
    found = opened(engine, directory)
    found.load(directory)
    process, version = found.process, next(_VERSION)
    assert process is not None
    responses = [found.replica(GREEDY).generate(PROMPTS[:8], version=version)]
    resident = [process.resident_bytes]
    freed = process.sleep()
    resident.append(process.resident_bytes)
    process.wake()
    resident.append(process.resident_bytes)
    responses.append(found.replica(GREEDY).generate(PROMPTS[:8], version=version))
    return responses, freed, resident


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_an_engine_that_sleeps_frees_its_cache_and_samples_as_before_when_it_wakes(
    engine: str, directory: Path
) -> None:
    for (before, after), freed, (awake, asleep, woken) in run_on_ranks(
        layout_of(engine).num_ranks, _sleep, engine, directory, timeout=300.0
    ):
        assert after == before
        assert freed == pytest.approx(2**24, rel=0.01)
        assert awake - asleep == pytest.approx(freed, rel=0.1)
        assert woken - asleep == pytest.approx(freed, rel=0.1)
