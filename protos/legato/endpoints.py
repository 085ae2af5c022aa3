"""Listening addresses and channel settings that both ends of a connection must agree on."""

from __future__ import annotations

from ipaddress import ip_address

MAX_MESSAGE_BYTES = 16 << 20
MAX_METADATA_BYTES = 16 << 10
KEEPALIVE_S = 30
KEEPALIVE_TIMEOUT_S = 10

# A server that answers pings more often than it permits sends GOAWAY too_many_pings and kills all
# streams of the connection (fault B100), so both sides' values stand here together.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 1000 // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),
)


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` is reachable from this machine only."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open(address: str, *, allow_open: bool) -> None:
    """Raises ValueError for an unencrypted listener that others could reach."""
    if not allow_open and not is_loopback(address):
        raise ValueError(
            f"listen = {address!r} would serve other machines without encryption or access "
            "control; use a loopback address, or set allow_open if the network itself is protected"
        )
