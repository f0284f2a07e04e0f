"""Where two documents differ is named key by key."""

from __future__ import annotations

from meshwright.profiles.documents import Difference, Document, differences
from meshwright.profiles.hardware import Link


class _Pair(Document):
    link: Link | None
    names: tuple[str, ...] = ()


FAST = Link(seconds=1e-6, bytes_per_second=1e10)
ONE = _Pair(link=FAST)


def test_equal_documents_do_not_differ() -> None:
    assert differences(ONE, _Pair(link=FAST)) == ()


def test_a_difference_has_its_key_and_both_values() -> None:
    other = _Pair(link=Link(seconds=2e-6, bytes_per_second=1e10), names=("a",))
    found = differences(ONE, other)
    assert found == (Difference("link.seconds", 1e-6, 2e-6), Difference("names", [], ["a"]))
    assert found[0].describe("one", "the other") == "link.seconds is 1e-06 in one and 2e-06 in the other"


def test_what_one_side_alone_has_differs() -> None:
    [found] = differences(ONE, _Pair(link=None))
    assert found == Difference("link", {"seconds": 1e-6, "bytes_per_second": 1e10}, None)
