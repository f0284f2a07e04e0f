"""The watchdog ends a run that hangs, and names the rank that the others wait for.

Every rank writes its current instruction to the store of the run, once a second and at each change. A rank whose
instruction exceeds its deadline (`planner.program.durations`) has all ranks dump their stacks, finds the ranks that
are silent or furthest behind, and ends the run with an error. Time for which a process was suspended does not count.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from meshwright.cost_models.sampling_waves import processes_all_samples
from meshwright.planner.plan.plan import Plan
from meshwright.planner.program.durations import Deadlines, max_waves_ratio
from meshwright.planner.program.program import Instruction
from meshwright.runtime.launch import failure_records

_COLLECTIVES = ("torch/distributed/distributed_c10d.py",)
_MESSAGES = (
    "runtime/messages/",
    "runtime/training/refit.py",
    "megatron/core/pipeline_parallel/",
    "megatron/core/distributed/",
)
"""Files and folders in which a rank waits for another one outside torch's collective calls."""
_PEERS = ("source", "src", "dst", "peer")
"""Argument names for the other rank in functions that send and receive."""


class CodeLocation(NamedTuple):
    """The place in the code where a thread is, and whether it waits there for another rank."""

    description: str
    waits_for_others: bool


def main_thread_location() -> CodeLocation:
    """Return where the main thread of this process is."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    return location_of(frame) if frame is not None else CodeLocation("nowhere", waits_for_others=False)


def location_of(frame: FrameType) -> CodeLocation:
    """Return where the thread is whose innermost frame this is."""
    place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    stack, outer = [frame], frame
    while outer.f_back is not None:
        outer = outer.f_back
        stack.append(outer)
    # Collectives of objects call other collectives, so the outermost call is the one to name.
    calls = [one for one in stack if one.f_code.co_filename.endswith(_COLLECTIVES)]
    if calls:
        return CodeLocation(f"{calls[-1].f_code.co_name} {_partners(calls[-1])}", waits_for_others=True)
    message = next((one for one in stack[:2] if any(part in one.f_code.co_filename for part in _MESSAGES)), None)
    if message:
        return CodeLocation(f"{place} {_partners(message)}".strip(), waits_for_others=True)
    return CodeLocation(place, waits_for_others=False)


def _partners(frame: FrameType) -> str:
    """Return the other ranks of a call as far as its arguments name them, else an empty string."""
    peer = next((value for name in _PEERS if isinstance(value := frame.f_locals.get(name), int)), None)
    if peer is not None:
        return f"with rank {peer}"
    group = frame.f_locals.get("group") or dist.group.WORLD
    try:
        ranks = dist.get_process_group_ranks(group)
    except (ValueError, KeyError, RuntimeError, AttributeError):
        return ""
    return f"of ranks {', '.join(map(str, ranks))}" if len(ranks) <= 16 else f"of {len(ranks)} ranks from {ranks[0]} on"


STACKS = "stacks"
"""Subdirectory of the run's directory for the stacks of a run that hung, one file for each rank."""

_BEAT_SECONDS, _MIN_BEAT_SECONDS = 1.0, 0.05
"""Seconds between two heartbeats, at most and at least."""
_DUMP_SECONDS, _POLL_SECONDS = 3.0, 0.1
"""Seconds that ranks have to dump their stacks once a deadline has passed, and between polls for them."""
_EXPIRED = "expired"
"""Key in the store under which the first rank whose deadline passed writes its number."""
_AFTER_PERIOD = 10**6
"""Index, among the instructions of a period, of what is done between it and the next."""


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """The current activity of a rank. A rank is behind another if its (period, index) is smaller.

    `index` numbers the instructions of a period. `seconds` is the time since the activity began.
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

    The thread calls `end` with an error message and the process ids of this machine's silent ranks.
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
        self._activity, self._began, self._allowed = RankActivity(rank=rank), time.monotonic(), float("inf")
        self._lock, self._closed, self._changed = threading.Lock(), threading.Event(), threading.Event()
        self._send_heartbeat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def doing(self, what: str, period: int, allowed_seconds: float, index: int = _AFTER_PERIOD) -> Iterator[None]:
        """Context in which this rank does `what`, for `allowed_seconds` at most.

        `period` and `index` are those of `RankActivity`.
        """
        self._begin(what, period, index, allowed_seconds)
        try:
            yield
        finally:
            self._begin(f"what follows {what}", period, index, float("inf"))

    def _begin(self, what: str, period: int, index: int, allowed: float) -> None:
        with self._lock:
            self._activity = replace(self._activity, activity=what, period=period, index=index)
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
                    self._end(*self._diagnosis(self._activities()))
                    return
                elif not self._activity.location and self._store.check([_EXPIRED]):
                    self._dump_stacks()

    def _pause_seconds(self) -> float:
        """Return the seconds until the next heartbeat, or until the deadline if that is sooner."""
        with self._lock:
            remaining = self._began + self._allowed - time.monotonic()
        return min(_BEAT_SECONDS, max(0.0, remaining))

    def _is_first_to_expire(self) -> bool:
        mine = str(self._activity.rank)
        return self._store.compare_set(_EXPIRED, "", mine).decode() == mine

    def _send_heartbeat(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._began
            self._activity = replace(self._activity, beat=self._activity.beat + 1, seconds=seconds)
            heartbeat = json.dumps(asdict(self._activity))
        self._store.set(str(self._activity.rank), heartbeat)

    def _dump_stacks(self) -> None:
        """Dump the stacks of all threads of this process, and send the location of the main thread."""
        location = main_thread_location()
        with self._lock:
            self._activity = replace(
                self._activity, location=location.description, waits_for_others=location.waits_for_others
            )
        with suppress(OSError):
            (self._out / STACKS).mkdir(exist_ok=True)
            with (self._out / STACKS / f"rank-{self._activity.rank:05d}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        self._send_heartbeat()

    def _activities(self) -> list[tuple[RankActivity, bool]]:
        """Return the activity of every rank and whether the rank is silent, once all have dumped their stacks or time
        is up."""
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
        local = [one.process for one in silent if one.host == self._activity.host]
        return hang_message([one for one, _ in ranks], silent, self._activity, self._allowed, self._out / STACKS), local


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
            f"rank {one.rank} has been in {one.activity} for {one.seconds:.0f} s, at "
            f"{one.location or 'an unknown place'}"
        )
    state = _state(one)
    return (
        f"rank {one.rank} has given no sign of life since {one.activity} (process {one.process} of {one.host}"
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


_COLLECTIVE_SECONDS = 1800.0
"""Deadline of work that no plan predicts: a checkpoint takes this long only if something hangs."""


class RunWatch:
    """Starts the watchdog of this rank and gives it deadlines.

    Collective over the world. All ranks pass the same `start_seconds`, which no other run of these processes has.
    """

    def __init__(self, plan: Plan, out: Path, start_seconds: float, *, timeout_seconds: float = 0.0) -> None:
        """`timeout_seconds` are added to the deadlines that follow from the plan and from measured periods."""
        self._deadlines = Deadlines(plan, timeout_seconds)
        self._batch_size = plan.facts.workload.batch_size
        # Ranks that generate or score waves (of dynamic sampling) run separate instructions for each wave; the others
        # wait in one instruction until all waves are sampled.
        self._default_factor = 1.0 if dist.get_rank() in _wave_ranks(plan) else max_waves_ratio(plan)
        self._deadline_factor = self._default_factor
        store = PrefixStore(f"watch/{start_seconds}", _get_default_store())
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._watchdog = Watchdog(store, out, rank=rank, num_ranks=num_ranks, end=failure_records.end_process)

    def instruction(self, instruction: Instruction, index: int, period: int, step: int) -> AbstractContextManager[None]:
        """Context in which an instruction runs; `index` is its index in the program."""
        allowed = self._deadline_factor * self._deadlines.allowed_seconds()
        return self._watchdog.doing(f"{instruction.name} of step {step}", period, allowed, index)

    def waiting(self, what: str, period: int) -> AbstractContextManager[None]:
        """Context in which this rank waits until others have ended the same period."""
        return self._watchdog.doing(what, period, self._deadlines.allowed_seconds())

    def collective(self, what: str, period: int) -> AbstractContextManager[None]:
        """Context of a collective action after a period, whose duration no plan predicts."""
        return self._watchdog.doing(what, period, max(_COLLECTIVE_SECONDS, self._deadlines.allowed_seconds()))

    @contextmanager
    def evaluation(self, num_prompts: int) -> Iterator[None]:
        """Context in which deadlines are longer by the ratio of `num_prompts` to the batch size."""
        self._deadline_factor = max(1.0, num_prompts / self._batch_size)
        yield
        self._deadline_factor = self._default_factor

    def record_period(self, seconds: float) -> None:
        """Record how long a period took."""
        self._deadlines.record_period(seconds)

    def close(self) -> None:
        """Stop watching."""
        self._watchdog.close()


def _wave_ranks(plan: Plan) -> set[int]:
    """Return the ranks that generate or score waves."""
    return {
        rank for stage in plan.graph.stages if processes_all_samples(stage) for rank in plan.pool_of(stage.name).ranks
    }
