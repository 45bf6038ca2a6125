"""What several tests here need."""

from agl_command import working_folder  # noqa: F401
