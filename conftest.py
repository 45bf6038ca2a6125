"""For all tests of the repository."""

import importlib.util

if importlib.util.find_spec("hypothesis"):  # The oracles' environment has none.
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)  # A busy machine is no failure.
    settings.load_profile("patient")
