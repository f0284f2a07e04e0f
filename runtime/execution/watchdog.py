"""A rank that hangs is named by the ranks that wait for it, and the run ends.

Every rank tells once a second what it does, or when that changes, in the store of the run. One whose instruction takes
longer than it may has all of them write down where they are, looks who is furthest behind, or silent, and ends the run
with a sentence. What an instruction may take is said in `planner.program.deadlines`. A process that was stopped and
goes on does not count the time for which it stood still.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.runtime.execution.waiting import main_wait

STACKS = "stacks"
"""In the directory of a run: where the stacks of a run that hung go, a file for each rank."""

_BEAT_SECONDS, _LEAST_BEAT_SECONDS = 1.0, 0.05
"""Between two signs of life, and at least where there is more to tell."""
_ANSWER_SECONDS, _LOOK_SECONDS = 3.0, 0.1
"""In which every rank that is alive has written its stacks and told where it is, and between two looks for it."""
_EXPIRED = "expired"
_BEHIND_A_TURN = 10**6
"""Where what is done between turns stands among the instructions of the turn before."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What a rank does. Of two ranks the one is behind that has the smaller turn, or in the same the smaller place."""

    rank: int
    turn: int = -(10**9)
    place: int = 0
    what: str = "starting"
    seconds: float = 0.0
    """For how long."""
    waits: str = ""
    """Where it is, once that was asked, and whether it is there for the sake of another rank."""
    is_for_others: bool = False
    beat: int = 0
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


class Watchdog:
    """One rank's. `end` is called with a sentence and the silent processes of this machine, in a thread of its own."""

    def __init__(
        self,
        store: Any,
        out: Path,
        *,
        rank: int,
        num_ranks: int,
        end: Callable[[str, Sequence[int]], object],
    ) -> None:
        """Collective: the ranks share the store of torch, and nothing else is kept in it."""
        self._store, self._out, self._num_ranks, self._end = store.clone(), out, num_ranks, end
        self._doing, self._began, self._allowed = Doing(rank=rank), time.monotonic(), float("inf")
        self._lock, self._over, self._changed = threading.Lock(), threading.Event(), threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def doing(self, what: str, turn: int, allowed_seconds: float, place: int = _BEHIND_A_TURN) -> Iterator[None]:
        """Within it this rank does that, and may take so long."""
        self._begin(what, turn, place, allowed_seconds)
        try:
            yield
        finally:
            self._begin(f"what follows {what}", turn, place, float("inf"))

    def _begin(self, what: str, turn: int, place: int, allowed: float) -> None:
        with self._lock:
            self._doing = replace(self._doing, what=what, turn=turn, place=place)
            self._began, self._allowed = time.monotonic(), allowed
        self._changed.set()

    def close(self) -> None:
        """Nothing is watched any more."""
        self._over.set()
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_LEAST_BEAT_SECONDS):
            self._changed.wait(self._pause_seconds())
            self._changed.clear()
            now = time.monotonic()
            with self._lock:
                self._began += max(0.0, now - last - 5 * _BEAT_SECONDS)  # this process was stopped meanwhile
                late = now - self._began > self._allowed
            last = now
            # Whoever keeps the store may be gone already; then the launcher ends this rank.
            with suppress(RuntimeError):
                self._tell()
                if late and self._is_first_to_tell():
                    self._end(*self._found(self._all_doing()))
                    return
                elif not self._doing.waits and self._store.check([_EXPIRED]):
                    self._write_stacks()

    def _pause_seconds(self) -> float:
        """Until the next sign of life, or until the deadline if that is sooner."""
        with self._lock:
            left = self._began + self._allowed - time.monotonic()
        return min(_BEAT_SECONDS, max(0.0, left))

    def _is_first_to_tell(self) -> bool:
        mine = str(self._doing.rank)
        return self._store.compare_set(_EXPIRED, "", mine).decode() == mine

    def _tell(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._began
            self._doing = replace(self._doing, beat=self._doing.beat + 1, seconds=seconds)
            told = json.dumps(asdict(self._doing))
        self._store.set(str(self._doing.rank), told)

    def _write_stacks(self) -> None:
        """Of all threads of this process; and tells where the main one is."""
        wait = main_wait()
        with self._lock:
            self._doing = replace(self._doing, waits=wait.told, is_for_others=wait.is_for_others)
        with suppress(OSError):
            (self._out / STACKS).mkdir(exist_ok=True)
            with (self._out / STACKS / f"rank-{self._doing.rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        self._tell()

    def _all_doing(self) -> list[tuple[Doing, bool]]:
        """What every rank does, and whether it is silent; those that have answered are not waited for."""
        self._write_stacks()
        before, until = self._read(), time.monotonic() + _ANSWER_SECONDS
        ranks = before
        while not all(one.waits for one in ranks) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            ranks = self._read()
        return [(one, not one.waits and one.beat == before[one.rank].beat) for one in ranks]

    def _read(self) -> list[Doing]:
        return [Doing(**json.loads(self._store.get(str(rank)))) for rank in range(self._num_ranks)]

    def _found(self, ranks: Sequence[tuple[Doing, bool]]) -> tuple[str, list[int]]:
        """The sentence, and the silent processes of this machine."""
        silent = [one for one, is_silent in ranks if is_silent]
        here = [one.process for one in silent if one.host == self._doing.host]
        return told([one for one, _ in ranks], silent, self._doing, self._allowed, self._out / STACKS), here


def told(ranks: Sequence[Doing], silent: Sequence[Doing], mine: Doing, allowed: float, stacks: Path) -> str:
    """Who hangs, where, and who waits for it; `mine` is what the rank does that has looked."""
    alive = [one for one in ranks if one.rank not in {other.rank for other in silent}]
    guilty = tuple(silent) or _furthest_behind(alive)
    names = {one.rank for one in guilty}
    waiting = [one for one in alive if one.rank not in names and one.is_for_others]
    of_waiting = next((one for one in waiting if one.rank == mine.rank), next(iter(waiting), None))
    hangs = "; ".join(_hanging(one, is_silent=one in silent) for one in guilty[:4])
    more = f", and {len(guilty) - 4} more ranks" if len(guilty) > 4 else ""
    waits = f"; rank {of_waiting.rank} waits in {of_waiting.what}, in {of_waiting.waits}" if of_waiting else ""
    return (
        f"{hangs}{more}{waits}; an instruction may take {allowed:.0f} s; the stacks of the ranks that answer are in "
        f"{stacks}: look there, then run again with --resume"
    )


def _furthest_behind(ranks: Sequence[Doing]) -> tuple[Doing, ...]:
    """The ranks that others wait for: of those furthest behind, the ones that wait for nobody, if any do not."""
    least = min((one.turn, one.place) for one in ranks)
    last = [one for one in ranks if (one.turn, one.place) == least]
    return tuple(one for one in last if not one.is_for_others) or tuple(last)


def _hanging(one: Doing, *, is_silent: bool) -> str:
    if not is_silent:
        return f"rank {one.rank} hangs in {one.what} for {one.seconds:.0f} s, in {one.waits or 'what it did not tell'}"
    state = _state(one)
    return (
        f"rank {one.rank} gives no sign of life since {one.what} (process {one.process} of {one.host}"
        f"{f', which is {state}' if state else ''})"
    )


def _state(one: Doing) -> str:
    """Of a process of this machine, in the system's words."""
    if one.host != socket.gethostname():
        return ""
    try:
        status = Path(f"/proc/{one.process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "gone"
    state = next((line for line in status if line.startswith("State:")), "")
    return state.partition("(")[2].rstrip(")") if "(" in state else ""
