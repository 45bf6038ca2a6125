"""The step size that a configuration leaves to the model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_core.config.sections import LARGEST, SMALLEST, usual_learning_rate

sizes = st.integers(1, 10**12)


@given(sizes, sizes, st.booleans())
def test_larger_models_take_no_larger_steps(one: int, other: int, adapter: bool) -> None:
    small, large = sorted((one, other))
    assert usual_learning_rate(small, adapter=adapter) >= usual_learning_rate(large, adapter=adapter)


@given(sizes | st.none())
def test_an_adapter_takes_ten_times_the_step(weights: int | None) -> None:
    rate = usual_learning_rate(weights, adapter=False)
    assert SMALLEST <= rate <= LARGEST
    assert 8 * rate < usual_learning_rate(weights, adapter=True) < 12 * rate


def test_of_an_unknown_model_it_is_that_of_billions() -> None:
    assert usual_learning_rate(None, adapter=False) == 1e-6
