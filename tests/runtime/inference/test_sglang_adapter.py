"""The server of SGLang calls its interface as a test double has it. THE DOUBLE IS NOT SGLANG (`sglang_double`):
meshwright has never run with SGLang itself, which does not install without CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.profiles.errors import RunFailed
from meshwright.runtime.inference.engine_process import (
    SGLANG_SERVER,
    EngineAdapter,
    EngineProcess,
    EngineSettings,
    Request,
    RequestSampling,
)
from tests.runtime.inference.sglang_double import sglang

SETTINGS = EngineSettings(
    model="none",
    config={"vocab_size": sglang.MODULUS},
    dtype="float32",
    max_tokens=64,
    num_slots=4,
    max_round_tokens=64,
    block_tokens=32,
    cache_bytes=2**20,
    cache_tokens=128,
    temperature=0.5,
)
SAMPLING = RequestSampling(is_greedy=False, top_k=0, top_p=1.0, seed=1, max_tokens=5, end_tokens=(99,))


def request_of(*tokens: int, name: str = "a") -> Request:
    return Request(id=name, tokens=tokens, sampling=SAMPLING)


def start(directory: Path, settings: EngineSettings = SETTINGS) -> EngineProcess:
    """Start the server's own program with the double on its path."""
    program = directory / "with_double.py"
    program.write_text(
        "import runpy, sys\n"
        f"sys.path[:0] = [{str(Path(sglang.__file__).parent)!r}]\n"
        f"runpy.run_path({str(SGLANG_SERVER)!r}, run_name='__main__')\n"
    )
    return EngineProcess(Path(sys.executable), settings, log=directory / "engine.log", server=program)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = start(tmp_path_factory.mktemp("engine"))
    assert "sglang 0.5.23 (its default attention); NOT RUN before" in str(process.wait_until_ready("0.5."))
    process.take_weights(0, [("weight", torch.tensor([5]))])
    yield process
    process.close()


def sampled(engine: EngineProcess, *requests: Request) -> dict[str, list[tuple[list[int], bool]]]:
    """The tokens of every round of some requests, by their names, until all have ended."""
    rows, added = {request.id: [] for request in requests}, list(requests)
    while len(ended := [one for one in rows.values() if one and one[-1][1]]) < len(requests):
        for row in engine.step(added):
            assert list(row.logprobs) == [-0.25 * SETTINGS.temperature] * len(row.tokens)
            rows[row.id].append((list(row.tokens), row.has_ended))
        added = []
    assert len(ended) == len(rows)
    return rows


def test_rounds_have_the_tokens_that_came_until_a_limit_or_an_end_token(engine: EngineProcess) -> None:
    rows = sampled(engine, request_of(1, 2), request_of(94, name="b"))
    assert rows["a"] == [([8, 16], False), ([32, 64], False), ([28], True)]
    assert rows["b"] == [([99], True)]
    assert engine.step() == []


def test_an_aborted_request_ends_and_its_name_may_be_used_again(engine: EngineProcess) -> None:
    engine.step([request_of(1), request_of(2, name="b")])
    rows = engine.step(aborted=["a"])
    assert {row.id for row in rows} <= {"b"}
    engine.step(aborted=["b"])
    assert sampled(engine, request_of(1, 2))["a"][0] == ([8, 16], False)


def test_new_weights_replace_the_old_ones_and_sleep_keeps_them(engine: EngineProcess) -> None:
    engine.take_weights(7, [("first", torch.tensor([40])), ("second", torch.tensor([3]))])
    assert engine.sleep() == SETTINGS.cache_bytes
    engine.wake()
    assert sampled(engine, request_of(10))["a"][0][0] == [53]
    assert engine.version == 7
    engine.take_weights(8, [("weight", torch.tensor([5]))])


def test_refused_weights_say_why(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.wait_until_ready()
    with pytest.raises(RunFailed, match="SGLang refused weights up to refused: no such parameter"):
        process.take_weights(0, [(sglang.REFUSED, torch.tensor([1]))])


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, replace(SETTINGS, adapter=EngineAdapter(rank=2, alpha=4.0, modules=("qkv_proj",))))
    with pytest.raises(RunFailed, match="adapters are not sent to SGLang"):
        process.wait_until_ready()
