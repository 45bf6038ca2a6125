"""What the key of a worker or operator may be: it has to fit into a header."""

from __future__ import annotations


def problem_of_key(name: str, key: str) -> str | None:
    """What is wrong with a key, which is not shown; None if nothing is. `name` is where it comes from.

    >>> problem_of_key("AGL_WORKER_KEY", "s3cret"), problem_of_key("AGL_WORKER_KEY", "a\\nb")
    (None, 'AGL_WORKER_KEY has a line break or another control character in it, which no HTTP header can carry.')
    """
    if not key.isascii():
        return f"{name} has characters that no HTTP header can carry: use ASCII only."
    if not key.isprintable():
        return f"{name} has a line break or another control character in it, which no HTTP header can carry."
    return None
