"""What both ends of a connection must agree on (B100, B101), and who may listen where."""

from __future__ import annotations

import pytest
from legato.endpoints import CHANNEL_OPTIONS, SERVER_OPTIONS, is_loopback, refuse_open
from legato.routers import CHANNEL_OPTIONS as CLIENT_OPTIONS

SERVER = dict(SERVER_OPTIONS)


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, CLIENT_OPTIONS])
def test_no_channel_pings_more_often_than_servers_permit(
    options: tuple[tuple[str, int | str], ...],
) -> None:
    channel = dict(options)
    every_ms = channel["grpc.keepalive_time_ms"]
    permitted_ms = SERVER["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert isinstance(every_ms, int) and isinstance(permitted_ms, int)
    assert every_ms >= 2 * permitted_ms
    assert SERVER["grpc.http2.max_ping_strikes"] == 0  # and if one does, its streams live on
    assert channel["grpc.keepalive_permit_without_calls"] == 0


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, CLIENT_OPTIONS])
def test_what_one_side_sends_the_other_takes(options: tuple[tuple[str, int | str], ...]) -> None:
    channel = dict(options)
    assert channel["grpc.max_receive_message_length"] == SERVER["grpc.max_send_message_length"]
    sends = channel.get("grpc.max_send_message_length")
    assert sends in (None, SERVER["grpc.max_receive_message_length"])


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1:7070", True),
        ("127.8.9.1:1", True),
        ("localhost:0", True),
        ("[::1]:7070", True),
        ("unix:/run/legato.sock", True),
        ("0.0.0.0:7070", False),
        ("[::]:7070", False),
        ("10.0.0.1:7070", False),
        ("localhost.example.com:7070", False),
        (":7070", False),
    ],
)
def test_who_is_reached_from_this_machine_only(address: str, inside: bool) -> None:
    assert is_loopback(address) is inside
    refuse_open(address, allow_open=True)
    if inside:
        refuse_open(address, allow_open=False)
    else:
        with pytest.raises(ValueError, match="allow_open"):
            refuse_open(address, allow_open=False)
