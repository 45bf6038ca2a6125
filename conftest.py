"""For all tests of the repository: a busy machine is no failure."""

import importlib.util
import os

import pytest

SLOW_TESTS_TIMEOUT = 600

if importlib.util.find_spec("hypothesis"):  # The oracles' environment has none.
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # The same examples each time, so that what fails is the change's; `make fuzz` draws others.
    settings.register_profile("repeatable", settings.get_profile("patient"), derandomize=True)
    settings.load_profile("patient" if os.environ.get("AGL_FUZZ") else "repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TESTS_TIMEOUT))
