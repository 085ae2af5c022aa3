"""A TCP connection that a test can cut or freeze: what a network does to a stream."""

from __future__ import annotations

import asyncio
from typing import Self


class Wire:
    """Listens on ``port`` and passes bytes on to ``target`` on this machine, both ways."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._pipes: set[_Pipe] = set()
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()

    async def open(self) -> None:
        """Takes connections, on the same port as before."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Pipe(self), "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Takes no more connections, and breaks those there are."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.cut()

    def cut(self) -> None:
        """Resets every open connection; new ones are taken."""
        for pipe in list(self._pipes):
            pipe.abort()

    def freeze(self) -> None:
        """Nothing passes any more, and nobody is told: a cable pulled out."""
        for pipe in self._pipes:
            pipe.freeze()


class _Pipe(asyncio.Protocol):
    """One connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._near: asyncio.Transport | None = None
        self._far: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._near = transport
        self._wire._pipes.add(self)
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._far, _ = await loop.create_connection(
                lambda: _Far(self), "127.0.0.1", self._wire.target
            )
        except OSError:
            self.abort()
            return
        for data in self._early:
            self._far.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._far is None:
            self._early.append(data)
        else:
            self._far.write(data)

    def send_back(self, data: bytes) -> None:
        if self._near is not None:
            self._near.write(data)

    def pause_writing(self) -> None:
        """The near side reads slowly: so does this pipe, and so the far side's writes block."""
        if self._far is not None:
            self._far.pause_reading()

    def resume_writing(self) -> None:
        if self._far is not None:
            self._far.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()

    def freeze(self) -> None:
        for transport in (self._near, self._far):
            if transport is not None:
                transport.pause_reading()

    def abort(self) -> None:
        self._connecting.cancel()
        self._wire._pipes.discard(self)
        for transport in (self._near, self._far):
            if transport is not None:
                transport.abort()


class _Far(asyncio.Protocol):
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def data_received(self, data: bytes) -> None:
        self._pipe.send_back(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pipe.abort()
