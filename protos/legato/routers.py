"""The routers that a client knows: addresses, channels, and who is asked next."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field

import grpc

from .errors import LegatoError, Reason, invalid
from .v1 import inference_pb2_grpc

Metadata = tuple[tuple[str, str], ...]

_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # In step with the router's limits on pings; none while no call runs, or it hangs up.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    # A router that comes back is found within seconds (gRPC's own limit is two minutes), and one
    # that does not answer is given up after 5 s, in favour of the next.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)

_RANKS = {
    grpc.ChannelConnectivity.READY: 0,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE: 2,
    grpc.ChannelConnectivity.SHUTDOWN: 2,
}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. ``root_pem``: whom to trust; None = gRPC's default roots. ``cert_pem`` and
    ``key_pem`` together show the caller's own certificate (mutual TLS)."""

    root_pem: bytes | None = None
    cert_pem: bytes | None = None
    key_pem: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.cert_pem is None) != (self.key_pem is None):
            raise invalid("tls", "cert_pem and key_pem go together")


class Routers:
    """Channels to the routers of ``address``, opened on first use and owned until ``close``.

    ``address`` is one gRPC target or several with commas between: every target is a router of the
    same fleet. Calls go round them in turn, the first one first, and past those that do not answer.
    A ``dns:///`` target spreads calls over all its addresses by itself.
    """

    def __init__(self, address: str, *, tls: Tls | None, token: str) -> None:
        self._targets = tuple(part.strip() for part in address.split(","))
        if not all(self._targets):
            raise invalid("address", f"an empty address in {address!r}")
        if token and tls is None:
            for target in self._targets:
                if not _is_loopback(target):
                    raise invalid(
                        "token", f"would go to {target} in the clear; pass tls, or no token"
                    )
        self._tls = tls
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._last = -1
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._targets)

    def pick(self, after: int | None = None) -> tuple[int, inference_pb2_grpc.InferenceStub]:
        """The next router (its number and stub): the one in turn, or the one after ``after`` for a
        request that failed there. Connected ones come first, those that do not answer last."""
        if self._closed:
            raise closed_error()
        first = (self._last if after is None else after) + 1
        order = [(first + i) % len(self) for i in range(len(self))]
        # Asking for the state makes an idle channel connect, so that all are soon ready to take
        # over. The state of the one that just failed may be old news: it never comes first.
        ranks = {
            number: max(
                _RANKS.get(self._channel(number).get_state(try_to_connect=True), 1),
                1 if number == after else 0,
            )
            for number in order
        }
        number = min(order, key=ranks.__getitem__)
        if after is None:
            self._last = number
        return number, inference_pb2_grpc.InferenceStub(self._channel(number))

    async def close(self) -> None:
        """Closes the channels; calls still open on them are cancelled."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    def _channel(self, number: int) -> grpc.aio.Channel:
        if number not in self._channels:
            target = self._targets[number]
            options = list(CHANNEL_OPTIONS)
            if target.startswith("dns:///"):
                options.append(("grpc.service_config", _ROUND_ROBIN))
            if _is_loopback(target):
                options.append(("grpc.enable_http_proxy", 0))  # loopback stays on this machine
            if self._tls is None:
                channel = grpc.aio.insecure_channel(target, options)
            else:
                credentials = grpc.ssl_channel_credentials(
                    self._tls.root_pem, self._tls.key_pem, self._tls.cert_pem
                )
                channel = grpc.aio.secure_channel(target, credentials, options)
            self._channels[number] = channel
        return self._channels[number]


def closed_error() -> LegatoError:
    """What a call on a closed client raises."""
    return LegatoError(Reason.CANCELLED, "the client is closed")


def metadata(*, token: str, tenant: str, request_id: str = "", traceparent: str = "") -> Metadata:
    """Call metadata of the contract; empty values are left out."""
    pairs = {
        "authorization": f"Bearer {token}" if token else "",
        "x-legato-tenant": tenant,
        "x-request-id": request_id,
        "traceparent": traceparent,
    }
    for key, value in pairs.items():
        if not (value.isascii() and value.isprintable()):
            raise invalid(key, "must be printable ASCII, as it travels in call metadata")
    return tuple((key, value) for key, value in pairs.items() if value)


def _is_loopback(target: str) -> bool:
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    name = target.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").lstrip("/")
    before, _, after = name.rpartition(":")
    host = (before or after).strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
