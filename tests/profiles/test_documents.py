from pathlib import Path

import pytest
from pydantic import Field

from meshwright.profiles.documents import (
    Document,
    canonical_json,
    digest,
    parse,
    read_json,
    read_yaml,
    write_atomically,
)
from meshwright.profiles.errors import BadInput


class Wheel(Document):
    spokes: int = Field(gt=0)
    metres: float = 0.3


class Bike(Document):
    name: str
    wheels: tuple[Wheel, ...] = ()
    spare: Wheel | None = None
    parts: dict[str, Wheel] = Field(default_factory=dict)


def bike(tmp_path: Path, text: str) -> Bike:
    path = tmp_path / "bike.yaml"
    path.write_text(text)
    return read_yaml(Bike, path, "bike")


def test_reading_what_was_written_gives_an_equal_document_and_the_same_bytes(tmp_path: Path) -> None:
    document = Bike(name="a", wheels=(Wheel(spokes=3), Wheel(spokes=4, metres=0.1)))
    path = tmp_path / "deep" / "bike.json"
    write_atomically(path, canonical_json(document))
    again = read_json(Bike, path, "bike")
    assert again == document
    assert canonical_json(again).encode() == path.read_bytes()
    assert digest(again) == digest(document)
    assert [p.name for p in path.parent.iterdir()] == ["bike.json"]


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
        ("wheels: []", "missing key 'name'; add it."),
        ("name: a\nwheels: [{spokes: '3'}]", "wheels.0.spokes is '3': input should be a valid integer."),
        ("name: a\nwheels: [{spokes: 0}]", "wheels.0.spokes is 0: input should be greater than 0."),
        ("name: a\nspare: {spokes: 3, metres: .nan}", "spare.metres is nan, which is no text and no finite number"),
        ("name: [", "is not YAML at line 1"),
        ("name: 2020-01-01", "name is 2020-01-01, which is no text and no finite number"),
        ("name: 2020-13-01", "month must be in 1..12"),
        ("name: a\nspare: [{1: !!set {x}}]", "spare.0.1 is {'x'}, which is no text"),
        ("? [a, b]\n: c", "is not YAML"),
        ("2020-01-01: c", "a key of the document is 2020-01-01, which is no text"),
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
