"""Curves and surfaces go through what was measured, straight between, and on beyond."""

from meshwright.cost_models.cost import Source
from meshwright.cost_models.measured import Curve, Surface


def test_a_curve_meets_its_points_and_says_when_it_leaves_them() -> None:
    curve = Curve({10: 1.0, 20: 3.0, 40: 4.0})
    assert curve.at(20) == (3.0, Source.MEASURED)
    assert curve.at(15) == (2.0, Source.INTERPOLATED)
    assert curve.at(60) == (5.0, Source.EXTRAPOLATED)
    assert curve.at(5) == (0.0, Source.EXTRAPOLATED)
    assert curve.at(1) == (0.0, Source.EXTRAPOLATED)
    assert Curve({10: 1.0}).at(30) == (3.0, Source.EXTRAPOLATED)


def test_a_surface_meets_its_points_and_says_when_it_leaves_them() -> None:
    surface = Surface({(1, 10): 1.0, (4, 10): 4.0, (1, 20): 2.0, (4, 20): 8.0})
    assert surface.at(4, 20) == (8.0, Source.MEASURED)
    assert surface.at(2, 10) == (2.0, Source.INTERPOLATED)
    assert surface.at(4, 15) == (6.0, Source.INTERPOLATED)
    assert surface.at(8, 15) == (12.0, Source.EXTRAPOLATED)
    assert surface.at(4, 30) == (12.0, Source.EXTRAPOLATED)
