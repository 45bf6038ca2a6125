"""What several tests here need."""

from agl_core.testing.fixtures import working_folder  # noqa: F401
