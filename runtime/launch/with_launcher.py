"""Imported first by the process that ranks are forked from (multiprocessing's forkserver), which can be told nothing
else: the kernel ends it with the launcher, and the ranks with it."""

from __future__ import annotations

import os

from meshwright.planner.search.parent_death import end_with_parent

end_with_parent(os.getppid())
