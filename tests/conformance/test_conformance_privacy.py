"""What frameworks that are tested here cannot do: speak to their vendors."""

from __future__ import annotations

import socket

import pytest

from ..support.testing_aids import only_this_machine


def test_another_machine_is_not_found_and_fails_the_test_even_if_the_framework_hides_it() -> None:
    def quietly() -> None:
        with pytest.raises(OSError, match=r"vendor\.example"):
            socket.create_connection(("vendor.example", 443))

    with pytest.raises(AssertionError, match=r"vendor\.example"), only_this_machine():
        quietly()


def test_this_machine_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, only_this_machine():
        socket.create_connection(server.getsockname()).close()
