"""Mutations tried one by one: is each noticed by the test that the list names, or by any?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.copied_tree import CopiedTree, Outcome
from tests.mutations.listed import Mutation

OPTIONS: dict[str, tuple[str, ...]] = {"check": (), "all": ("--all",)}
"""What a tier is called on the command line of pytest."""

IMPORTED = "tests/mutations/test_imported.py"
"""Fails where tests of a copy import what lies elsewhere."""

_KILLER_SECONDS, _TIER_SECONDS = 300, 3 * 3600

_NOT_THE_LIST = ("--ignore", "tests/mutations")
"""Its tests notice every mutation, in the text."""


class Verdict(StrEnum):
    """What became of a mutation."""

    KILLED = "killed"
    BY_ANOTHER = "killed by another"
    SURVIVED = "survived"
    DOES_NOT_APPLY = "does not apply"
    KILLER_FAILS = "the killer fails even without it"
    TIER_FAILS = "the tier fails even without it"

    @property
    def is_well(self) -> bool:
        """Whether a test noticed the mutation."""
        return self in (Verdict.KILLED, Verdict.BY_ANOTHER)


@dataclass(frozen=True)
class Tried:
    """A mutation, what became of it, by which test, and seconds of the run of its killer and the tier."""

    mutation: Mutation
    verdict: Verdict
    test: str
    seconds: float


def try_all(
    mutations: Sequence[Mutation], tree: Path, scratch: Path, *, tier: str, jobs: int, tell: Callable[[Tried], None]
) -> list[Tried]:
    """Each of the mutations in a copy of `tree`, of which `jobs` lie in `scratch`, side by side. Raises RuntimeError
    where a copy does not run its own modules."""
    copies = [CopiedTree.of(tree, scratch / str(number)) for number in range(jobs)]
    killers = sorted({mutation.killed_by for mutation in mutations})
    without = copies[0].run([IMPORTED, *killers, *OPTIONS[tier]], _TIER_SECONDS)
    if not without.passes(IMPORTED):
        raise RuntimeError(f"the copy does not run its own modules, or not all killers are there:\n{without.output}")
    free = SimpleQueue[CopiedTree]()
    for copy in copies:
        free.put(copy)

    def tried(mutation: Mutation) -> Tried:
        copy, begin = free.get(), time.monotonic()
        try:
            verdict, test = _verdict(mutation, copy, without, tier)
        finally:
            free.put(copy)
        one = Tried(mutation, verdict, test, time.monotonic() - begin)
        tell(one)
        return one

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(tried, mutations))


def _verdict(mutation: Mutation, copy: CopiedTree, without: Outcome, tier: str) -> tuple[Verdict, str]:
    """What becomes of a mutation, and the test that says so."""
    killer, options = mutation.killed_by, OPTIONS[tier]
    with copy.mutated(mutation) as applies:
        if not applies:
            return Verdict.DOES_NOT_APPLY, ""
        if not without.passes(killer):
            return Verdict.KILLER_FAILS, killer
        if not copy.run([killer, *options], _KILLER_SECONDS).passes(killer):
            return Verdict.KILLED, killer
        whole = copy.run(["-x", *_NOT_THE_LIST, *options], _TIER_SECONDS)
    if whole.is_green:
        return Verdict.SURVIVED, ""
    test = next(iter(whole.failed), "")
    is_innocent = bool(test) and copy.run([test, *options], _KILLER_SECONDS).passes(test)
    return Verdict.BY_ANOTHER if is_innocent else Verdict.TIER_FAILS, test


def table(tried: Sequence[Tried]) -> Iterator[str]:
    """A line for each mutation, then how many of each tier were noticed."""
    width = max((len(one.mutation.name) for one in tried), default=0)
    for one in tried:
        yield line(one, width)
    for tier in OPTIONS:
        verdicts = [one.verdict for one in tried if one.mutation.tier == tier]
        counts = (f"{verdicts.count(verdict)} {verdict}" for verdict in Verdict if verdict in verdicts)
        if verdicts:
            yield f"{tier}: {len(verdicts)} mutations: {', '.join(counts)}"


def line(one: Tried, width: int = 0) -> str:
    """One mutation, for people."""
    mutation = one.mutation
    return (
        f"{mutation.name:{width}}  {mutation.folder}  {mutation.kind}  {one.verdict}  {one.seconds:.1f} s  {one.test}"
    )
