"""Real links of a router whose worker is the test: frames are handed in and read off by hand, with
no socket between, so that every order of events can be played."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from legato.v1 import inference_pb2, worker_pb2 as pb
from legato_router.config import RouterConfig
from legato_router.dispatcher import Dispatcher
from legato_router.relay import Relay
from legato_router.served_model import ServedModel, limits_of
from legato_router.submit_message import Ticket
from legato_router.timeline import Timeline
from legato_router.tokenizer import ModelTokenizer, TokenizerPool
from legato_router.validate import check_prompt, validate
from legato_router.validated import PreparedRequest
from legato_router.waiting_room import WaitingRoom
from legato_router.worker_link import RouterIdentity, WorkerLink

from tests.small_tokenizers import byte_level

NAME, FINGERPRINT = "tiny", "f"


def spec(**fields: Any) -> pb.ModelSpec:
    values: dict[str, Any] = {
        "name": NAME,
        "fingerprint": FINGERPRINT,
        "vocab_size": byte_level().get_vocab_size(),
        "max_model_len": 4096,
        "block_size": 16,
        "num_blocks": 512,
        "max_num_seqs": 8,
        "eos_token_ids": [0],
    }
    return pb.ModelSpec(**(values | fields))


class ScriptedLink(WorkerLink):
    """``run`` is never called: the test says what is heard, and reads what was sent."""

    def __init__(self, name: str, changed: Callable[[], None]) -> None:
        super().__init__(
            f"{name}:0",
            RouterIdentity("r", "1"),
            changed=changed,
            clock=lambda: 0.0,
            random=Random(0),
        )
        self.name = name

    def attach(self, **fields: Any) -> None:
        self.hear(welcome=pb.Welcome(worker_id=self.name, model=spec(**fields)))

    def hear(self, **frame: Any) -> None:
        self._handle(pb.WorkerFrame(**frame))

    def lose(self, cause: str = "cut") -> None:
        self._lose(cause)

    def sent(self) -> list[Any]:
        """Messages sent since the last look: Submit, SubmitPart, CancelRequest, GrantCredit."""
        frames = []
        while self._outgoing:
            frame = self._outgoing.popleft()
            kind = frame.WhichOneof("frame")
            assert kind is not None
            frames.append(getattr(frame, kind))
        return frames

    def accept(self, rid: int) -> None:
        self.hear(accepted=pb.Accepted(rid=rid))

    def nack(self, rid: int, reason: str, **fields: Any) -> None:
        self.hear(nack=pb.Nack(rid=rid, reason=reason, message="no", **fields))

    def tokens(self, rid: int, start: int, *ids: int, choice: int = 0) -> None:
        step = pb.Step(
            rids=[rid], choices=[choice], start_indices=[start], num_ids=[len(ids)], ids=ids
        )
        self.hear(step=step)

    def end(self, rid: int, *choices: int, reason: Any = 3, **fields: Any) -> None:
        """Ends these choices, and the request."""
        step = pb.Step()
        for choice in choices:
            step.ended_choices.add(rid=rid, choice=choice, reason=reason)
        step.ended.add(rid=rid, reason=reason, **fields)
        self.hear(step=step)


class Router:
    """The parts of a router behind its door, on scripted links that are attached."""

    def __init__(self, *names: str, max_queue_s: float = 5.0, **limits: Any) -> None:
        config = RouterConfig()
        self.room = WaitingRoom(max_requests=config.max_queued, max_tokens=config.max_queued_tokens)
        self.links = [ScriptedLink(name, self.room.changed) for name in names]
        self.dispatcher = Dispatcher(list(self.links), self.room, max_queue_s)
        tokenizer = ModelTokenizer(byte_level())
        pool = TokenizerPool(tokenizer, None, max_model_len=4096)
        self.model = ServedModel(NAME, FINGERPRINT, tokenizer, pool, False)
        for link in self.links:
            link.attach(**limits)
            link.sent()

    def prepare(self, **fields: Any) -> PreparedRequest:
        """A checked request of three prompt ids."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=fields.pop("ids", [5, 6, 7])), **fields
        )
        limits = limits_of([spec()])
        checked = validate(request, limits)
        return check_prompt(checked, checked.prompt.ids, limits)  # type: ignore[union-attr]

    def relay(
        self, *, window: int = 8, deadline_s: float | None = None, clock: Any = None, **fields: Any
    ) -> Relay:
        ticket = Ticket("key", "", "", 1, b"", b"a", deadline_s)
        timeline = Timeline(clock or asyncio.get_running_loop().time)
        return Relay(
            self.dispatcher,
            self.model,
            self.prepare(**fields),
            ticket,
            timeline,
            eos_token_ids=(0,),
            window=window,
        )

    def close(self) -> None:
        self.model.pool.close()


@contextlib.contextmanager
def scripted(*names: str, **options: Any) -> Iterator[Router]:
    router = Router(*names, **options)
    try:
        yield router
    finally:
        router.close()
        for link in router.links:
            assert not link.num_attempts, "an attempt was left behind"
            assert link.view is None or not link.view.unapplied
        assert not len(router.room) and not router.room.num_tokens


class Reader:
    """Collects a relay's frames in a task."""

    def __init__(self, relay: Relay) -> None:
        self.frames: list[inference_pb2.ServerFrame] = []
        self.task = asyncio.create_task(self._read(relay))

    async def _read(self, relay: Relay) -> None:
        async with contextlib.aclosing(relay.frames()) as frames:
            async for frame in frames:
                self.frames.append(frame)

    @property
    def kinds(self) -> list[str | None]:
        return [frame.WhichOneof("frame") for frame in self.frames]

    def ids(self, choice: int = 0) -> list[int]:
        deltas = [f.delta for f in self.frames if f.HasField("delta")]
        return [i for delta in deltas if delta.choice == choice for i in delta.ids]

    def text(self, choice: int = 0) -> str:
        return "".join(
            f.delta.text for f in self.frames if f.HasField("delta") and f.delta.choice == choice
        )

    @property
    def finished(self) -> inference_pb2.Finished:
        assert self.kinds.count("finished") == 1 and self.kinds[-1] == "finished"
        return self.frames[-1].finished


async def settle() -> None:
    """Lets every task run that can."""
    for _ in range(12):
        await asyncio.sleep(0)
