import math
from statistics import NormalDist

import numpy as np
import pytest

from meshwright.profiles.documents import parse
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import Histogram, LengthSpec

SKEWED = Histogram((1, 2, 10), (0.5, 0.3, 0.2))


def test_a_fixed_length_is_one_bin() -> None:
    lengths = LengthSpec(max=9, fixed=7).resolve()
    assert (lengths.tokens, lengths.probabilities, lengths.mean, lengths.maximum) == ((7,), (1.0,), 7.0, 7)


def test_a_log_normal_keeps_its_median_and_is_cut_at_max() -> None:
    lengths = LengthSpec(max=300, median=100, p99=400).resolve()
    assert lengths.stratified_sample(101)[50] == pytest.approx(100, rel=0.03)
    assert lengths.maximum == 300
    assert sum(lengths.probabilities) == pytest.approx(1)
    assert 100 < lengths.mean < 300


@pytest.mark.parametrize("count", [64, 1024, 16384])
def test_the_longest_of_many_log_normal_lengths_is_what_it_is_on_average(count: int) -> None:
    lengths = LengthSpec(max=10**6, median=300, p99=1800).resolve()
    sigma = math.log(6) / NormalDist().inv_cdf(0.99)
    drawn = np.random.default_rng(0).lognormal(math.log(300), sigma, (400, count)).max(axis=1).mean()
    assert lengths.expected_maximum(count) == pytest.approx(drawn, rel=0.05)


def test_a_histogram_is_normalised_and_sorted_and_drops_empty_bins() -> None:
    lengths = LengthSpec(max=5, histogram=((4, 1.0), (2, 3.0), (9, 4.0), (3, 0.0))).resolve()
    assert lengths == Histogram((2, 4, 5), (0.375, 0.125, 0.5))


def test_strata_are_as_many_of_each_length_as_it_is_likely() -> None:
    assert SKEWED.stratified_sample(10).tolist() == [1] * 5 + [2] * 3 + [10] * 2
    assert SKEWED.stratified_sample(1).tolist() == [1]


def test_the_expected_maximum_of_one_draw_is_the_mean_and_grows_towards_the_longest() -> None:
    assert SKEWED.expected_maximum(1) == pytest.approx(SKEWED.mean)
    values = [SKEWED.expected_maximum(n) for n in (1, 2, 8, 1000)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(10)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 1000])
def test_strata_are_a_sorted_sample_with_the_distributions_mean(count: int) -> None:
    strata = SKEWED.stratified_sample(count)
    assert len(strata) == count
    assert list(strata) == sorted(strata)
    assert sum(strata) / count == pytest.approx(SKEWED.mean, abs=10 / count)


def test_half_is_there_of_a_response_met_under_way_and_long_ones_are_met_more_often() -> None:
    """Of responses of 1 and 3 tokens, equally many, three of four tokens are in one of 3: their mean is 2.5."""
    assert Histogram((8,), (1.0,)).mean_tokens_in_flight == 4.0
    assert Histogram((1, 3), (0.5, 0.5)).mean_tokens_in_flight == pytest.approx(2.5 / 2)


def test_a_sum_of_lengths_adds_their_means() -> None:
    both = SKEWED.plus(Histogram((5, 6), (0.25, 0.75)))
    assert both.mean == pytest.approx(SKEWED.mean + 5.75)
    assert both.maximum == 16
    assert sum(both.probabilities) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"max": 5}', "give one of: fixed, median with p99, or histogram."),
        ('{"max": 5, "fixed": 3, "median": 2.0, "p99": 4.0}', "give one of"),
        ('{"max": 5, "median": 2.0}', "needs median and p99 with p99 >= median"),
        ('{"max": 5, "median": 4.0, "p99": 2.0}', "p99 >= median"),
        ('{"max": 5, "fixed": 6}', "fixed=6 is longer than max=5"),
        ('{"max": 5, "histogram": [[0, 1.0]]}', "lengths of 1 or more"),
        ('{"max": 5, "histogram": [[1, 0.0]]}', "a weight that is not 0"),
    ],
)
def test_a_wrong_distribution_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(LengthSpec, text, "lengths")
    assert says in str(error.value)


@pytest.mark.parametrize("mean", [1.0, 7.25, 20.0, 60.0, 96.0])
@pytest.mark.parametrize(
    "lengths",
    [
        LengthSpec(max=96, fixed=30),
        LengthSpec(max=96, median=20, p99=90),
        LengthSpec(max=96, histogram=((3, 1.0), (40, 2.0))),
    ],
    ids=["fixed", "log-normal", "histogram"],
)
def test_lengths_that_are_given_a_mean_have_it_and_keep_their_longest(lengths: LengthSpec, mean: float) -> None:
    scaled = lengths.with_mean(mean)
    assert scaled.resolve().mean == pytest.approx(mean)
    assert scaled.max == lengths.max
    assert scaled.resolve().maximum <= lengths.max


@pytest.mark.parametrize(("mean", "longest"), [(20.0, 60.0), (20.0, 90.0), (40.0, 80.0), (8.0, 40.0)])
def test_stretched_lengths_have_the_mean_and_the_longest_that_were_asked(mean: float, longest: float) -> None:
    found = LengthSpec(max=200, median=20, p99=90).stretched(mean, longest, 32)
    assert found.resolve().mean == pytest.approx(mean)
    assert found.resolve().expected_maximum(32) == pytest.approx(longest, rel=0.02)
    assert found.max == 200


def test_stretched_lengths_are_as_near_as_they_can_be() -> None:
    fixed = LengthSpec(max=200, fixed=20).stretched(25.0, 100.0, 32)
    assert fixed.resolve().mean == pytest.approx(25.0)
    assert fixed.resolve().maximum == 25
    flat = LengthSpec(max=200, median=20, p99=90).stretched(20.0, 1.0, 32).resolve()
    assert flat.mean == pytest.approx(20.0)
    assert flat.expected_maximum(32) < 45


def test_lengths_that_are_given_their_own_mean_are_the_same() -> None:
    lengths = LengthSpec(max=96, median=20, p99=90)
    assert lengths.with_mean(lengths.resolve().mean) is lengths
