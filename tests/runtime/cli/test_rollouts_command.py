"""The rollouts command: a workload of what agents have done."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.profiles.documents import parse
from meshwright.profiles.workload import Workload
from tests.runtime.command import Call


def test_a_file_of_chat_messages_becomes_a_workload(call: Call, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "a"}]
    trace, tokenizer = tmp_path / "trace.jsonl", Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trace.write_text(json.dumps({"messages": messages}) + "\n")
    outcome = call("rollouts", str(trace), "--tokenizer", str(tmp_path))
    found = parse(Workload, json.dumps({"batch_size": 1, **yaml.safe_load(outcome.out)["workload"]}), "workload")
    assert found.prompt_lengths.tokens == (2,)
    assert found.max_response == 1


def test_a_file_of_anything_else_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("[]\n")
    outcome = call("rollouts", str(tmp_path / "trace.jsonl"), "--tokenizer", str(tmp_path))
    assert outcome.code == 2
    assert "tokenizer" in outcome.err
