"""The `agl` command; as a module too, `python -m agl_core`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends it as Ctrl-C later does."""
    try:
        from agl_core.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
