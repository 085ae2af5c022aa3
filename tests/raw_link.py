"""A router as a worker sees one, with every frame in the test's hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.message import Message
from legato.v1 import inference_pb2, worker_pb2 as pb, worker_pb2_grpc

WAIT_S = 10.0


def submit(rid: int = 1, ids: Iterable[int] = (1, 2, 3), **fields: Any) -> pb.Submit:
    """A good Submit; ``fields`` override."""
    prompt_ids = list(ids)
    values: dict[str, Any] = {
        "seq": rid,
        "num_prompt_tokens": len(prompt_ids),
        "max_tokens": 4,
        "n": 1,
        "sampling": inference_pb2.Sampling(seed=0),
        "initial_credit": 1000,
        "ignore_eos": True,
    }
    return pb.Submit(rid=rid, prompt_ids=prompt_ids, **(values | fields))


class RawLink:
    """One Attach stream. Frames that come are kept, apart from snapshots."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self.call = stub.Attach()
        self.snapshot = pb.Snapshot()

    async def send(self, **frame: Any) -> None:
        await self.call.write(pb.RouterFrame(**frame))

    async def hello(self, **fields: Any) -> pb.Welcome:
        values: dict[str, Any] = {"router_id": "raw", "incarnation": "1", "protocol_version": 1}
        await self.send(hello=pb.Hello(**(values | fields)))
        frame = await self.read()
        assert isinstance(frame, pb.Welcome)
        return frame

    async def read(self) -> Message:
        """The next frame that is no bare snapshot: Welcome, Accepted, Nack, Step, ..."""
        while True:
            async with asyncio.timeout(WAIT_S):
                frame = await self.call.read()
            if not isinstance(frame, pb.WorkerFrame):
                raise EOFError(await self.call.code())
            kind = frame.WhichOneof("frame")
            assert kind is not None
            if kind != "snapshot":
                message: Message = getattr(frame, kind)
                return message
            self.snapshot = frame.snapshot

    async def nack(self) -> pb.Nack:
        frame = await self.read()
        assert isinstance(frame, pb.Nack), frame
        return frame

    async def answer(self, rid: int = 1) -> tuple[dict[int, list[int]], pb.Ended]:
        """Reads until request ``rid`` has ended: its ids by choice. Indices are contiguous."""
        ids: dict[int, list[int]] = {}
        while True:
            frame = await self.read()
            if not isinstance(frame, pb.Step):
                assert isinstance(frame, pb.Accepted), frame
                continue
            offset = 0
            for row, of_rid in enumerate(frame.rids):
                count = frame.num_ids[row]
                if of_rid == rid:
                    held = ids.setdefault(frame.choices[row], [])
                    assert frame.start_indices[row] == len(held)
                    held += frame.ids[offset : offset + count]
                offset += count
            for ended in frame.ended:
                if ended.rid == rid:
                    return ids, ended


@contextlib.asynccontextmanager
async def raw_link(port: int, *, hello: bool = True) -> AsyncIterator[RawLink]:
    """A stream to the worker at ``port``, opened with a Hello or not."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        link = RawLink(worker_pb2_grpc.WorkerStub(channel))
        if hello:
            await link.hello()
        try:
            yield link
        finally:
            link.call.cancel()
