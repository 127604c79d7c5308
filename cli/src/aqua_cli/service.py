"""What every service's command shares: the socket to listen on, and logs.

A service listens before it starts, so that a port in use is told as what it is, and logs to
standard error: for people on a terminal, JSON lines elsewhere.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import sys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name counts only if it is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, backlog: int, prefix: str) -> socket.socket:
    """A listening socket, non-blocking; port 0 takes a free one.

    Args:
        prefix: Of the variables that set host and port, `AQUA_` for `AQUA_LISTEN_PORT`.

    Raises:
        ConfigError: It cannot listen there.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(
            address, family=family, backlog=backlog, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        from aqua_protocol.errors import ConfigError

        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            remedy=f"Correct {prefix}LISTEN_HOST, stop what listens there, or set "
            f"{prefix}LISTEN_PORT (0 takes a free port).",
        ) from error
    listener.setblocking(False)  # noqa: FBT003 - named by the method
    return listener


def address_of(listener: socket.socket) -> str:
    """Host and port as URLs have them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def configure_logs(level: str) -> None:
    """Log to standard error from this level on, libraries too; needs structlog."""
    import structlog

    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        # Without rich, whose tracebacks show local variables: tokens, secrets, URLs with passwords.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    # uvicorn tells of its starts and stops, which services do themselves.
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    # And of each request that is none, by which strangers could fill a disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
