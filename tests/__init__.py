"""A package, so that `python -m tests.gpu` finds these tests: veRL's wheel installs a package `tests` too."""
