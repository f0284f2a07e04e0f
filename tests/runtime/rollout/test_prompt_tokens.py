"""Prompts become the tokens that transformers would make of them, and ids stay what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from meshwright.profiles.errors import BadInput
from meshwright.runtime.rollout import prompt_encoding
from meshwright.runtime.rollout.prompt_encoding import PromptEncoder

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'tool' %}{{ raise_exception('tools are unknown') }}{% endif -%}
<|{{ message.role }}|> {{ message.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

SPECIAL = ["<s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    words = {word: number for number, word in enumerate(["<unk>", *SPECIAL, *(f"w{n}" for n in range(9))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def encoder(directory: Path, *, chat: bool = False) -> PromptEncoder:
    return PromptEncoder(tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")), directory, chat=chat)


def test_a_text_has_the_special_tokens_of_its_tokenizer(directory: Path) -> None:
    assert encoder(directory).encode("w0 w1", "here") == (1, 6, 7)


def test_messages_have_those_of_the_template_once_and_ask_for_an_answer(directory: Path) -> None:
    messages = [{"role": "system", "content": "w0", "name": None}, {"role": "user", "content": "w1 w2"}]
    found = encoder(directory).encode(messages, "here")
    assert found == (1, 3, 6, 5, 2, 7, 8, 5, 4)
    known = AutoTokenizer.from_pretrained(directory)
    told = known.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    assert found == tuple(told["input_ids"] if isinstance(told, dict) or hasattr(told, "input_ids") else told)


def test_a_text_of_a_chat_is_a_users_message(directory: Path) -> None:
    said = encoder(directory).encode([{"role": "user", "content": "w3"}], "here")
    assert encoder(directory, chat=True).encode("w3", "here") == said


def test_ids_are_not_encoded_again(directory: Path) -> None:
    assert encoder(directory, chat=True).encode([6, 6, 1, 14], "here") == (6, 6, 1, 14)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([15], "here has the token id 15, and the tokenizer has ids from 0 to 14"),
        ([True], "here has a prompt that is neither a text nor messages"),
        ([], "neither a text nor messages"),
        (7, "neither a text nor messages"),
        ([{"role": "user"}], "neither a text nor messages"),
        ([{"role": "assistant", "content": "w1"}], "here ends with a message of the assistant"),
        ([{"role": "tool", "content": "w1"}], "here: the chat template refuses the messages: tools are unknown"),
    ],
)
def test_what_is_no_prompt_is_told_in_a_sentence(directory: Path, prompt: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        encoder(directory).encode(prompt, "here")


def test_a_text_that_the_tokenizer_has_no_words_for_is_told(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0}, unk_token="<unk>"))
    said = "here cannot be encoded: the tokenizer says .*UNK.*; change the text, or use another tokenizer"
    with pytest.raises(BadInput, match=said):
        PromptEncoder(words, tmp_path, chat=False).encode("w1", "here")


def test_messages_need_a_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match=r"has no chat template and the prompts are messages; give it a chat_template"):
        encoder(directory).encode([{"role": "user", "content": "w1"}], "here")


def test_a_tokenizer_that_is_one_file_has_no_template(directory: Path) -> None:
    path = directory / "tokenizer.json"
    with pytest.raises(BadInput, match=r"cannot be loaded for its chat template|has no chat template"):
        PromptEncoder(tokenizers.Tokenizer.from_file(str(path)), path, chat=True).encode("w1", "here")


@pytest.mark.parametrize(("text", "found"), [("<s> w0", (1, 6)), ("w0 <s>", (1, 6, 1)), ("<s> <s> w0", (1, 1, 6))])
def test_a_text_that_begins_with_the_special_token_has_it_once(
    directory: Path, text: str, found: tuple[int, ...]
) -> None:
    assert encoder(directory).encode(text, "here") == found


def test_special_tokens_at_the_end_are_not_put_there_again(directory: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 1), ("<|end|>", 5)]
    )
    found = PromptEncoder(tokenizer, directory, chat=False)
    assert found.encode("w0", "here") == found.encode("<s> w0 <|end|>", "here") == (1, 6, 5)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("text", ["", "  "])
def test_a_text_without_tokens_of_its_own_is_no_prompt(directory: Path, text: str, chat: bool) -> None:
    if chat and text:
        return  # a user may send blanks
    with pytest.raises(BadInput, match=r"here has no tokens; give it a text, or take the row out"):
        encoder(directory, chat=chat).encode(text, "here")


def test_a_reward_gets_the_messages_of_a_chat_and_none_of_other_prompts(directory: Path) -> None:
    chat = [{"role": "system", "content": "w0", "name": None}, {"role": "user", "content": "w1"}]
    assert encoder(directory).messages(chat, "here") == ({"role": "system", "content": "w0"}, chat[1])
    assert encoder(directory, chat=True).messages("w1", "here") == ({"role": "user", "content": "w1"},)
    assert encoder(directory).messages("w1", "here") == encoder(directory).messages([7, 8], "here") == ()
    with pytest.raises(BadInput, match="here has a message that rewards cannot get as JSON: Object of type bytes"):
        encoder(directory).messages([{"role": "user", "content": b"w1"}], "here")


def test_a_message_that_calls_tools_needs_no_content(directory: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content or 'w3' }} {% endfor %}w4")
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "w2"})
    assert encoder(directory).encode(messages, "here") == (7, 9, 8, 10)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% include 'other' %}", "here: the chat template refuses the messages: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recursion"),
        ("{{ 1 + 'a' }}", "refuses the messages: unsupported operand"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "has not ended in 0.5 seconds",
        ),
    ],
)
def test_a_template_that_fails_or_does_not_end_gets_a_sentence(
    directory: Path, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(prompt_encoding, "_TEMPLATE_SECONDS", 0.5 if "0.5" in said else 60.0)
    found = encoder(directory)
    assert found._chat_tokenizer is not None  # loaded before the clock starts
    with pytest.raises(BadInput, match=said):
        found.encode([{"role": "user", "content": "w1"}], "here")


def test_a_tokenizer_whose_regular_expression_gives_up_gets_a_sentence(directory: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    with pytest.raises(BadInput, match=r"here cannot be encoded: the tokenizer says .*retry-limit"):
        PromptEncoder(tokenizer, directory, chat=False).encode("a" * 3000 + "b", "here")


def test_a_prompt_of_more_characters_than_are_encoded_is_refused(directory: Path) -> None:
    with pytest.raises(BadInput, match=r"here has 4194305 characters, and 4194304 are the most"):
        encoder(directory).encode("w" * (prompt_encoding.MAX_CHARACTERS + 1), "here")
