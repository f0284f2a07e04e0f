import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, ClassVar, Literal, get_args

import pytest
from pydantic import Field

from meshwright.profiles.documents import (
    SCHEMA_VERSION,
    Document,
    VersionedDocument,
    canonical_json,
    digest,
    parse,
    read_json,
    read_yaml,
    remove_temporary_files,
    write_atomically,
)
from meshwright.profiles.errors import BadInput, RunFailed


class Wheel(Document):
    spokes: int = Field(gt=0)
    metres: float = 0.3


class Bike(Document):
    name: str
    wheels: tuple[Wheel, ...] = ()
    spare: Wheel | None = None
    parts: dict[str, Wheel] = Field(default_factory=dict)


class TouringBike(Bike):
    racks: Mapping[Annotated[str, Field(pattern="^[a-z]+$")], Wheel] = Field(default_factory=dict)
    gears: Literal["hub", "chain"] | Literal["auto"] = "auto"
    saddle: str | Wheel = "leather"
    bells: tuple[str, ...] = Field(default=("loud",), min_length=1)


def bike(tmp_path: Path, text: str) -> Bike:
    path = tmp_path / "bike.yaml"
    path.write_text(text)
    return read_yaml(TouringBike if "tour" in text else Bike, path, "bike")


def test_reading_what_was_written_gives_an_equal_document_and_the_same_bytes(tmp_path: Path) -> None:
    document = Bike(name="a", wheels=(Wheel(spokes=3), Wheel(spokes=4, metres=0.1)))
    path = tmp_path / "deep" / "bike.json"
    write_atomically(path, canonical_json(document))
    again = read_json(Bike, path, "bike")
    assert again == document
    assert canonical_json(again).encode() == path.read_bytes()
    assert digest(again) == digest(document)
    assert [p.name for p in path.parent.iterdir()] == ["bike.json"]


def test_defaults_are_written_and_what_is_absent_is_not() -> None:
    assert canonical_json(Bike(name="a", wheels=(Wheel(spokes=3),))).split() == [
        *("{", '"name":', '"a",', '"parts":', "{},", '"wheels":', "[", "{"),
        *('"metres":', "0.3,", '"spokes":', "3", "}", "]", "}"),
    ]


def documents(kind: type[Document] = Document) -> Iterator[type[Document]]:
    """All classes of documents of the product that are imported."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("meshwright."):
            yield one
        yield from documents(one)


def test_a_field_that_may_be_absent_is_absent_by_default() -> None:
    found = [
        f"{kind.__name__}.{name}"
        for kind in documents()
        for name, field in kind.model_fields.items()
        if type(None) in get_args(field.annotation) and (field.is_required() or field.default is not None)
    ]
    assert found == []


class Ticket(VersionedDocument):
    remedy: ClassVar[str] = "buy another"

    seat: str


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"schema_version": SCHEMA_VERSION - 1, "chair": "a"}, "schema_version=2 is not the 3 this program reads"),
        ({"schema_version": "3", "seat": "a"}, "schema_version='3' is not the 3 this program reads"),
        ({"seat": "a"}, "has no schema_version, and this program reads 3"),
        ([], "has no schema_version, and this program reads 3"),
    ],
)
def test_a_document_of_another_version_is_refused_before_its_keys_are_read(
    tmp_path: Path, written: object, says: str
) -> None:
    path = tmp_path / "ticket.json"
    path.write_text(json.dumps(written))
    with pytest.raises(BadInput, match=f"^ticket {path}:? {says}; buy another\\.$"):
        read_json(Ticket, path, "ticket")
    path.write_text(canonical_json(Ticket(seat="b")))
    assert read_json(Ticket, path, "ticket") == Ticket(seat="b")


def test_equal_documents_have_equal_digests_and_others_do_not() -> None:
    assert digest(Bike(name="a")) == digest(Bike(name="a", wheels=()))
    assert digest(Bike(name="a")) != digest(Bike(name="b"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nwheel: []", "unknown key 'wheel'; did you mean 'wheels'?"),
        ("name: a\nwheels: [{spokes: 3, meters: 1.0}]", "unknown key 'wheels.0.meters'; did you mean 'metres'?"),
        ("name: a\nspare: {spokes: 3, meters: 1.0}", "unknown key 'spare.meters'; did you mean 'metres'?"),
        ("name: a\nparts: {front: {spokes: 3, spoke: 1}}", "unknown key 'parts.front.spoke'; did you mean 'spokes'?"),
        ("name: tour\nracks: {front: {spoke: 1}}", "unknown key 'racks.front.spoke'; did you mean 'spokes'?"),
        ("name: tour\nracks: {front: }", "racks.front is None and should be an object with keys (spokes, metres);"),
        ("name: tour\nracks: {F: {spokes: 3}}", "racks: the name 'F' should match pattern '^[a-z]+$'; give another"),
        ("name: tour\nracks: {'': {spokes: 3}}", "racks: the name '' should match pattern '^[a-z]+$'; give another"),
        ("name: tour\ngears: rope", "gears is 'rope': input should be 'hub', 'chain' or 'auto'."),
        ("name: tour\nGears: hub", "unknown key 'Gears'; did you mean 'gears'?"),
        ("name: tour\nspare: {spokes: 3, Metres: 1.0}", "unknown key 'spare.Metres'; did you mean 'metres'?"),
        ("name: tour\nsaddle: ", "saddle is None and should be text, or an object with keys (spokes, metres);"),
        ("name: tour\nsaddle: [gel]", "saddle is ['gel'] and should be text, or an object with keys (spokes, metres);"),
        ("name: tour\nsaddle: {spoke: 3}", "unknown key 'saddle.spoke'; did you mean 'spokes'?"),
        ("name: tour\nbells: []", "bells is []: give at least 1 item."),
        ("wheels: []", "missing key 'name'; add it."),
        ("name: a\nwheels: [{spokes: '3'}]", "wheels.0.spokes is '3': input should be a valid integer."),
        ("name: a\nwheels: [{spokes: 0}]", "wheels.0.spokes is 0: input should be greater than 0."),
        ("name: a\nspare: {spokes: 3, metres: .nan}", "spare.metres is nan, which is neither text nor a finite number"),
        ("name: [", "is not YAML at line 1"),
        ("name: a\n# \0", "has the character '\\x00', which YAML does not allow; remove it."),
        ("name: !!timestamp 2020-01-01", "name is 2020-01-01, which is neither text nor a finite number"),
        ("name: !!timestamp 2020-13-01", "month must be in 1..12"),
        ("name: a\nspare: [{1: !!set {x}}]", "spare.0.1 is {'x'}, which is neither text"),
        ("? [a, b]\n: c", "is not YAML"),
        ("!!timestamp 2020-01-01: c", "a key of the document is 2020-01-01, which is neither text"),
        ("name: &a [*a]", "name.0.0.0.0.0.0.0.0... is nested too deep"),
    ],
)
def test_a_wrong_document_is_refused_in_one_sentence_that_names_the_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput) as error:
        bike(tmp_path, text)
    assert says in str(error.value)
    assert str(error.value).startswith(f"bike {tmp_path / 'bike.yaml'}")
    assert "\n" not in str(error.value)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist; check the path"):
        read_json(Bike, tmp_path / "no.json", "bike")
    with pytest.raises(BadInput, match="cannot be read"):
        read_json(Bike, tmp_path, "bike")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        read_json(Bike, tmp_path / "bad.json", "bike")


def test_not_a_number_is_no_number() -> None:
    with pytest.raises(BadInput, match="metres"):
        parse(Wheel, '{"spokes": 3, "metres": NaN}', "wheel")


def test_a_disk_that_takes_no_more_is_no_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run that meets one is started again, where a mistake is not."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "plan.json"
    path.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"plan\.json cannot be written: No space left on device; make room there"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


class Bulb(Document):
    is_lit: bool


class Lamp(Bulb):
    colour: str = "white"
    spare: tuple[Bulb, ...] = ()


@pytest.mark.parametrize(("word", "is_lit"), [("yes", True), ("no", False), ("On", True), ("OFF", False)])
def test_a_word_for_a_boolean_is_one_only_where_a_boolean_is_asked(tmp_path: Path, word: str, is_lit: bool) -> None:
    path = tmp_path / "lamp.yaml"
    path.write_text(f"is_lit: {word}\ncolour: {word}\nspare:\n- is_lit: {word}\n")
    assert read_yaml(Lamp, path, "lamp") == Lamp(is_lit=is_lit, colour=word, spare=(Bulb(is_lit=is_lit),))
    path.write_text("is_lit: maybe\n")
    with pytest.raises(BadInput, match="is_lit is 'maybe': input should be a valid boolean"):
        read_yaml(Lamp, path, "lamp")


@pytest.mark.parametrize("text", ['{"name": "\\u001b[2J"}', '{"parts": {"a\x9b": {"spokes": 1}}, "name": "a"}'])
def test_a_text_that_would_command_a_terminal_is_refused_wherever_it_stands(tmp_path: Path, text: str) -> None:
    """So device names and the like may be printed as they are."""
    with pytest.raises(BadInput, match=r"bike: '.*' has a character that a terminal does not show; remove it") as one:
        parse(Bike, text, "bike")
    assert str(one.value).isprintable()
    assert parse(Bike, '{"name": "\\\\u001b \\t\\n"}', "bike").name == "\\u001b \t\n"


def test_what_a_killed_process_left_beside_a_file_is_removed_by_who_writes_it_next(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead, living = int(ended.stdout), os.getppid()
    names = [f".plan.json.{dead}.partial", f".plan.json.{living}.partial", f".other.json.{dead}.partial"]
    for name in (*names, "mine.partial"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / f".plan.json.{dead}.new.{dead}.partial").touch()  # perhaps of another machine that is writing it
    write_atomically(tmp_path / "plan.json", "text")
    assert {one.name for one in tmp_path.iterdir()} == {
        *("plan.json", names[1], names[2], "mine.partial", f".plan.json.{dead}.new.{dead}.partial")
    }
    remove_temporary_files(tmp_path, min_age_seconds=0.0)
    assert {one.name for one in tmp_path.iterdir()} == {"plan.json", names[1], "mine.partial"}


def test_the_work_of_refusing_a_document_grows_with_its_errors_and_not_with_their_square() -> None:
    def calls_of(num_errors: int) -> int:
        text, calls = json.dumps({"name": "x", "wheels": [{"spokes": "two"}] * num_errors}), 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            with pytest.raises(BadInput, match=r"wheels\.0\.spokes"):
                parse(Bike, text, "bike")
        finally:
            sys.setprofile(None)
        return calls

    assert calls_of(800) < 3 * calls_of(400)
