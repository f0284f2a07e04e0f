"""Plain values are read from any text without harm, and what is refused gets a sentence with its place."""

import os
from pathlib import Path

import pytest

from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import json_value, read_text, require_file, yaml_value


@pytest.mark.parametrize("number", ["25e-2", "0.25", "2.5E-1", "+25e-2"])
def test_a_number_in_yaml_may_have_an_exponent(number: str) -> None:
    assert yaml_value(f"metres: {number}", "bike") == {"metres": 0.25}


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        *(
            (text, text)
            for text in ("1:20", "no", "Yes", "on", "OFF", "1_000", "2020-01-01", "0b11", "1:2:3.5", "=", "y")
        ),
        *(("010", 10), ("0o10", 8), ("0x1F", 31), ("-7", -7), ("+7", 7), ("1.", 1.0), (".5", 0.5), ("1e3", 1000.0)),
        *(("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None)),
    ],
)
def test_scalars_are_those_of_yaml_1_2(scalar: str, value: object) -> None:
    found = yaml_value(f"it: {scalar}\n", "bike")["it"]
    assert (found, type(found)) == (value, type(value))


def test_a_key_that_is_given_twice_is_told_with_its_line() -> None:
    with pytest.raises(BadInput, match="bike is not YAML at line 3: the key 'name' is given twice; keep one"):
        yaml_value("name: a\nwheels: []\nname: b\n", "bike")
    with pytest.raises(BadInput, match="bike: the key 'spokes' is given twice, again at line 3; keep one"):
        json_value('{"spare": {"spokes": 3, "metres": 1.0},\n"parts": {"a\\"}": {"spokes": 1,\n"spokes": 2}}}', "bike")


def test_a_key_that_overrides_a_merged_one_is_given_once() -> None:
    found = yaml_value("one: &one {spokes: 3, metres: 0.1}\ntwo: &two {<<: *one, spokes: 4}\nthree: {<<: *two}", "bike")
    assert found["two"] == found["three"] == {"spokes": 4, "metres": 0.1}


_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
_MERGES = "m0: &m0 {k: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_BOMB, "more than 100000 values when its aliases are written out"),
        (_MERGES, "more than 100 keys are merged into one mapping"),
        ("name: " + "[" * 5000, "nested too deep"),
        ("name: " + "[" * 100 + "]" * 100, "nested too deep"),
        ("name: &a [*a]", "name.0.0.0.0.0.0.0.0... is nested too deep"),
        ('name: "\\ud800"', "bike has a lone surrogate"),
        ("name: .inf", "name is inf, which is neither text nor a finite number"),
        ("!!timestamp 2020-01-01: c", "a key of the document is 2020-01-01, which is neither text"),
    ],
)
def test_no_yaml_takes_the_machine_and_only_plain_values_are_read(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        yaml_value(text, "bike")
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "bike is nested too deep"),
        ('{"a": 1,\n"metres": 1e999}', "bike: 1e999 at line 2 is not a finite number; write one"),
        ('{"a": "-Infinity",\n"metres": -Infinity}', "-Infinity at line 2 is not a finite number"),
        ("{", "bike is not JSON"),
        ('{"a": ["\\ud800"]}', "bike has a lone surrogate"),
    ],
)
def test_json_beyond_reason_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        json_value(text, "bike")
    assert says in str(refusal.value)


def test_plain_values_are_read_as_they_are() -> None:
    text = '{"a": [1, 2.5, null, true, "b"], "c": {"d": {}}}'
    assert json_value(text, "bike") == yaml_value(text, "bike") == {"a": [1, 2.5, None, True, "b"], "c": {"d": {}}}


def test_a_character_that_json_escapes_in_two_halves_is_one() -> None:
    assert json_value('{"a": "\\ud83d\\ude00"}', "bike") == {"a": "\N{GRINNING FACE}"}


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(BadInput, match="cannot be read: it is a d"):
            read_text(path, "bike")


def test_a_file_that_is_missing_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bike"
    with pytest.raises(BadInput, match=r"bike .* does not exist; check the path"):
        require_file(path, "bike", 10)
    path.write_bytes(b"\xff" * 8)
    with pytest.raises(
        BadInput, match=r"bike .* is not UTF-8 text \(byte 1\); save it as UTF-8, or name another file\."
    ):
        read_text(path, "bike")
    path.write_text("a bike", encoding="utf-8-sig")
    assert read_text(path, "bike") == "a bike"
    path.write_text("x" * 2**20)
    assert read_text(path, "bike", 2**20) == "x" * 2**20
    with pytest.raises(BadInput, match=r"bike .* has 1 MiB, and 0\.5 MiB is the most that is read; name another file"):
        read_text(path, "bike", 2**19)
