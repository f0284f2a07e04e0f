"""Constants that made the rows are found again from them."""

import pytest

from benchmarks.fidelity.fit import error, fit, is_kept
from benchmarks.fidelity.installed import rows_of
from benchmarks.fidelity.laws import LAWS, Predict
from benchmarks.fidelity.primitives import gemm_seconds, kernels_of
from benchmarks.fidelity.rows import Row
from benchmarks.fidelity.simplex import minimise
from meshwright.profiles.aiconfigurator import PACKAGE, package_version
from meshwright.profiles.efficiency import Efficiency, efficiency_of


def test_the_simplex_finds_the_bottom_of_a_bowl() -> None:
    best, loss = minimise(lambda x: float((x[0] - 3) ** 2 + 10 * (x[1] - 0.5) ** 2), [1.0, 1.0], rounds=120)
    assert best == pytest.approx([3, 0.5], abs=1e-3)
    assert loss < 1e-6


def test_constants_that_made_the_rows_are_found_again() -> None:
    start = efficiency_of("cuda", "h200")
    truth = start.model_copy(update={"gemm": start.gemm.model_copy(update={"flops": 0.7, "bytes": 0.6})})
    rows: list[Row] = [{"m": str(m), "n": "8192", "k": str(k)} for m in (1, 64, 4096) for k in (1024, 8192)]

    def asked(row: Row) -> tuple[Predict, float]:
        measured = gemm_seconds(kernels_of("H200", truth), row)
        return lambda efficiency: gemm_seconds(kernels_of("H200", efficiency), row), measured

    found = fit(("gemm.flops", "gemm.bytes"), [asked(row) for row in rows], start, rounds=80)
    assert (found.gemm.flops, found.gemm.bytes) == pytest.approx((0.7, 0.6), rel=0.01)
    others = {"flops": start.gemm.flops, "bytes": start.gemm.bytes}
    assert found.model_copy(update={"gemm": found.gemm.model_copy(update=others)}) == start


def test_a_nested_constant_is_fitted_in_its_place() -> None:
    start = efficiency_of("cuda", "h200")

    def predict(efficiency: Efficiency) -> float:
        return efficiency.protocols[1].link_bytes

    found = fit(("protocols.1.link_bytes",), [(predict, 0.25)], start, rounds=40)
    assert found.protocols[1].link_bytes == pytest.approx(0.25, rel=0.01)
    assert found.protocols[0] == start.protocols[0]
    assert error([(predict, 0.25)], found) < error([(predict, 0.25)], start)


@pytest.mark.skipif(package_version() is None, reason=f"{PACKAGE} is not installed")
def test_constants_of_experts_are_fitted_to_what_the_package_carries() -> None:
    law, start = LAWS["grouped"], efficiency_of("cuda", "a100-80gb")
    rows = [
        law.ask(stem, row) for stem in law.stems("ampere") for row in rows_of(stem, {}) if row["ep"] == row["tp"] == "1"
    ]
    slow = start.model_copy(update={"grouped": start.grouped.model_copy(update={"flops": 0.3})})
    found = fit(("grouped.flops",), rows, slow, rounds=20)
    assert found.grouped.flops == pytest.approx(start.grouped.flops, rel=0.1)
    assert error(rows, found) < error(rows, slow)


def test_half_of_the_rows_are_kept_aside_by_what_they_say() -> None:
    rows: list[Row] = [{"m": str(m), "n": "8192"} for m in range(400)]
    kept = [is_kept(row) for row in rows]
    assert 150 < sum(kept) < 250
    assert [is_kept(dict(reversed(row.items()))) for row in rows] == kept
