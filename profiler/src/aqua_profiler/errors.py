"""What can go wrong while profiling; each error says what was asked, what came back, what to do.

An `EndpointError` ends a profile early; what was measured before is kept and marked partial.
"""

from __future__ import annotations

from aqua_protocol import ConfigError, UnavailableError


class LengthsInvalidError(ConfigError):
    """A file of lengths or a trace has a wrong column or value."""

    code = "lengths_invalid"
    http_status = 422


class ProfileInvalidError(ConfigError):
    """A file is not a profile, or one of a version that this program does not know."""

    code = "profile_invalid"
    http_status = 422


class JournalMismatchError(ConfigError):
    """A journal to resume from belongs to another measurement, or to another version."""

    code = "journal_mismatch"
    http_status = 409
    default_remedy = "Name another --output, or delete the journal to start over."


class EndpointError(UnavailableError):
    """The endpoint failed in a way that says nothing about its capacity."""

    code = "endpoint_failed"
    http_status = 502
    default_remedy = "Look at the engine's log; the partial profile can be resumed."


class EndpointGoneError(EndpointError):
    """Nothing listens there, or connections break."""

    code = "endpoint_gone"
    default_remedy = "Check the URL and that the engine runs; the partial profile can be resumed."


class EndpointStalledError(EndpointError):
    """Requests are outstanding and no token arrives for any of them."""

    code = "endpoint_stalled"
    default_remedy = "Look at the engine's log; raise --stall-s if it is only slow."


class EndpointRefusedError(EndpointError):
    """The endpoint answers with errors."""

    code = "endpoint_refused"
    default_remedy = "Check --model and the lengths against what the engine accepts."


class EndpointGarbledError(EndpointError):
    """The endpoint answers with something that is not an OpenAI event stream."""

    code = "endpoint_garbled"
    default_remedy = "Check that the URL is an OpenAI-compatible server's, not a proxy's page."


class MeterUnavailableError(UnavailableError):
    """Device memory cannot be read here."""

    code = "meter_unavailable"
    http_status = 501
    default_remedy = "Install nvidia-ml-py or torch, or let the program tell its memory."
