"""The watchdog ends a run that hangs, and names the rank that the others wait for.

Every rank writes its current instruction to the store of the run, once a second and at each change. A rank whose
instruction exceeds its deadline (`planner.program.deadlines`) has all ranks dump their stacks, finds the ranks that are
silent or furthest behind, and ends the run with an error. Time for which a process was suspended does not count.
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

from meshwright.runtime.execution.waiting import main_thread_location

STACKS = "stacks"
"""Directory in that of the run for the stacks of a run that hung, a file for each rank."""

_BEAT_SECONDS, _MIN_BEAT_SECONDS = 1.0, 0.05
"""Seconds between two heartbeats, at most and at least."""
_DUMP_SECONDS, _POLL_SECONDS = 3.0, 0.1
"""Seconds that ranks have to dump their stacks once a deadline has passed, and between polls for them."""
_EXPIRED = "expired"
_AFTER_PERIOD = 10**6
"""Index, among the instructions of a period, of what is done between it and the next."""


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """The current activity of a rank. A rank is behind another if its (turn, place) is smaller.

    `turn` numbers the periods, `place` the instructions of one. `seconds` is the time since the activity began.
    """

    rank: int
    period: int = -(10**9)
    index: int = 0
    activity: str = "starting"
    seconds: float = 0.0
    location: str = ""
    """The place in the code where the rank is; empty until it has dumped its stacks."""
    waits_for_others: bool = False
    """True if the rank waits there for another rank."""
    beat: int = 0
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


class Watchdog:
    """The watchdog of one rank, a thread.

    It calls `end` from this thread with an error message and the process ids of this machine's silent ranks.
    """

    def __init__(
        self,
        store: Any,
        out: Path,
        *,
        rank: int,
        num_ranks: int,
        end: Callable[[str, Sequence[int]], object],
    ) -> None:
        """Start watching. All ranks pass the same store of torch, which holds nothing else."""
        self._store, self._out, self._num_ranks, self._end = store.clone(), out, num_ranks, end
        self._doing, self._began, self._allowed = RankActivity(rank=rank), time.monotonic(), float("inf")
        self._lock, self._closed, self._changed = threading.Lock(), threading.Event(), threading.Event()
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def doing(self, what: str, turn: int, allowed_seconds: float, place: int = _AFTER_PERIOD) -> Iterator[None]:
        """Context in which this rank does `what`, for `allowed_seconds` at most."""
        self._begin(what, turn, place, allowed_seconds)
        try:
            yield
        finally:
            self._begin(f"what follows {what}", turn, place, float("inf"))

    def _begin(self, what: str, turn: int, place: int, allowed: float) -> None:
        with self._lock:
            self._doing = replace(self._doing, activity=what, period=turn, index=place)
            self._began, self._allowed = time.monotonic(), allowed
        self._changed.set()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_MIN_BEAT_SECONDS):
            self._changed.wait(self._pause_seconds())
            self._changed.clear()
            now = time.monotonic()
            with self._lock:
                self._began += max(0.0, now - last - 5 * _BEAT_SECONDS)  # this process was suspended meanwhile
                late = now - self._began > self._allowed
            last = now
            # The process that hosts the store may have exited; then the launcher ends this rank.
            with suppress(RuntimeError):
                self._send_heartbeat()
                if late and self._is_first_to_expire():
                    self._end(*self._diagnosis(self._all_doing()))
                    return
                elif not self._doing.location and self._store.check([_EXPIRED]):
                    self._dump_stacks()

    def _pause_seconds(self) -> float:
        """Return the seconds until the next heartbeat, or until the deadline if that is sooner."""
        with self._lock:
            remaining = self._began + self._allowed - time.monotonic()
        return min(_BEAT_SECONDS, max(0.0, remaining))

    def _is_first_to_expire(self) -> bool:
        mine = str(self._doing.rank)
        return self._store.compare_set(_EXPIRED, "", mine).decode() == mine

    def _send_heartbeat(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._began
            self._doing = replace(self._doing, beat=self._doing.beat + 1, seconds=seconds)
            heartbeat = json.dumps(asdict(self._doing))
        self._store.set(str(self._doing.rank), heartbeat)

    def _dump_stacks(self) -> None:
        """Dump the stacks of all threads of this process, and send the place of the main thread."""
        wait = main_thread_location()
        with self._lock:
            self._doing = replace(self._doing, location=wait.description, waits_for_others=wait.waits_for_others)
        with suppress(OSError):
            (self._out / STACKS).mkdir(exist_ok=True)
            with (self._out / STACKS / f"rank-{self._doing.rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        self._send_heartbeat()

    def _all_doing(self) -> list[tuple[RankActivity, bool]]:
        """Return what every rank does and whether it is silent, once all have dumped their stacks or time is up."""
        self._dump_stacks()
        before, deadline = self._read(), time.monotonic() + _DUMP_SECONDS
        ranks = before
        while not all(one.location for one in ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            ranks = self._read()
        return [(one, not one.location and one.beat == before[one.rank].beat) for one in ranks]

    def _read(self) -> list[RankActivity]:
        return [RankActivity(**json.loads(self._store.get(str(rank)))) for rank in range(self._num_ranks)]

    def _diagnosis(self, ranks: Sequence[tuple[RankActivity, bool]]) -> tuple[str, list[int]]:
        """Return the error message and the process ids of this machine's silent ranks."""
        silent = [one for one, is_silent in ranks if is_silent]
        local = [one.process for one in silent if one.host == self._doing.host]
        return hang_message([one for one, _ in ranks], silent, self._doing, self._allowed, self._out / STACKS), local


def hang_message(
    ranks: Sequence[RankActivity], silent: Sequence[RankActivity], mine: RankActivity, allowed: float, stacks: Path
) -> str:
    """Return the message that names the ranks that hang, where, and one that waits for them.

    `mine` is the activity of the rank that writes the message.
    """
    alive = [one for one in ranks if one.rank not in {other.rank for other in silent}]
    hanging = tuple(silent) or _furthest_behind(alive)
    hanging_ranks = {one.rank for one in hanging}
    waiting = [one for one in alive if one.rank not in hanging_ranks and one.waits_for_others]
    victim = next((one for one in waiting if one.rank == mine.rank), next(iter(waiting), None))
    hangs = "; ".join(_hanging(one, is_silent=one in silent) for one in hanging[:4])
    more = f", and {len(hanging) - 4} more ranks" if len(hanging) > 4 else ""
    waits = f"; rank {victim.rank} waits in {victim.activity}, in {victim.location}" if victim else ""
    return (
        f"{hangs}{more}{waits}; an instruction may take {allowed:.0f} s; the stacks of the ranks that answer are in "
        f"{stacks}: look there, then run again with --resume"
    )


def _furthest_behind(ranks: Sequence[RankActivity]) -> tuple[RankActivity, ...]:
    """Return the ranks furthest behind; if some of them wait for no other rank, only these."""
    lowest = min((one.period, one.index) for one in ranks)
    last = [one for one in ranks if (one.period, one.index) == lowest]
    return tuple(one for one in last if not one.waits_for_others) or tuple(last)


def _hanging(one: RankActivity, *, is_silent: bool) -> str:
    if not is_silent:
        return (
            f"rank {one.rank} hangs in {one.activity} for {one.seconds:.0f} s, in {one.location or 'an unknown place'}"
        )
    state = _state(one)
    return (
        f"rank {one.rank} gives no sign of life since {one.activity} (process {one.process} of {one.host}"
        f"{f', which is {state}' if state else ''})"
    )


def _state(one: RankActivity) -> str:
    """Return the state of a process of this machine as in /proc; empty for one of another machine."""
    if one.host != socket.gethostname():
        return ""
    try:
        status = Path(f"/proc/{one.process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "gone"
    state = next((line for line in status if line.startswith("State:")), "")
    return state.partition("(")[2].rstrip(")") if "(" in state else ""
