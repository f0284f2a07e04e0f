"""What the tables of these tests say of themselves, and a measurement that was as quick every time."""

from meshwright.profiles.harness import TimingResult
from meshwright.profiles.table import Provenance

PROVENANCE = Provenance(
    device="a100-80gb",
    kind="cuda",
    precision="bf16",
    driver="550",
    libraries={"torch": "2.13.0"},
    commit="0123abc",
    date="2026-11-21",
    threads_per_rank=1,
    num_ranks=1,
    repeats=3,
)


def sample(seconds: float) -> TimingResult:
    return TimingResult(median_seconds=seconds, spread_seconds=0.0, repeats=3)
