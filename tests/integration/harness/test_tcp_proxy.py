"""The proxy that loses the network: what each way of losing it does to a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from harness.bounds import HANG_S, until
from harness.tcp_proxy import Passage, ProxyThread, TcpProxy


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that says everything again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(ConnectionError):
                while chunk := connection.recv(4096):
                    connection.sendall(chunk)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)


@pytest.fixture
def proxy(echo_port: int) -> Iterator[TcpProxy]:
    with ProxyThread() as proxies:
        yield proxies.open(echo_port)


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=HANG_S)


def says_again(connection: socket.socket) -> bool:
    connection.sendall(b"x")
    return connection.recv(1) == b"x"


def test_it_passes_bytes_both_ways_and_ends_with_its_peers(proxy: TcpProxy) -> None:
    with connect(proxy) as connection:
        assert says_again(connection)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_a_stall_holds_bytes_back_and_loses_none(proxy: TcpProxy) -> None:
    with connect(proxy) as old:
        assert says_again(old)
        proxy.set(Passage.STALL)
        with connect(proxy) as new:
            for connection in (old, new):
                connection.sendall(b"y")
                connection.setblocking(False)
                with pytest.raises(BlockingIOError):
                    connection.recv(1)
                connection.settimeout(HANG_S)
            proxy.set(Passage.PASS)
            assert (old.recv(1), new.recv(1)) == (b"y", b"y")


def test_a_drop_swallows_bytes_and_ends_connections_with_it(proxy: TcpProxy) -> None:
    with connect(proxy) as old:
        assert says_again(old)
        proxy.set(Passage.DROP)
        with connect(proxy) as new:
            for connection in (old, new):
                connection.sendall(b"z")
            until(lambda: proxy.connection_count == 2, "the proxy has seen both")
            proxy.set(Passage.DROP)  # What it has just seen has had its turn by then.
            proxy.set(Passage.PASS)
            for connection in (old, new):
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
    with connect(proxy) as connection:
        assert says_again(connection)


def test_a_reset_ends_connections_and_refuses_more(proxy: TcpProxy) -> None:
    with connect(proxy) as old:
        assert says_again(old)
        proxy.set(Passage.RESET)
        for connection in (old, connect(proxy)):
            with connection, contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    proxy.set(Passage.PASS)
    with connect(proxy) as connection:
        assert says_again(connection)
