"""WorkerView: own submits and pushed snapshots, in whatever order they meet (B080)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st
from legato.v1 import worker_pb2 as pb
from legato_router.worker_view import Load, WorkerView

MODEL = pb.ModelSpec(num_blocks=1000, max_num_seqs=4, block_size=16)
EVENTS = st.lists(
    st.sampled_from(["submit", "apply", "push", "deliver", "end", "refuse"]), max_size=120
)


@dataclass
class Worker:
    """Applies submits in order and later; pushes snapshots that arrive later still, in order."""

    inbox: list[int] = field(default_factory=list)
    held: dict[int, Load] = field(default_factory=dict)
    last_applied: int = 0
    pushed: list[pb.Snapshot] = field(default_factory=list)

    def snapshot(self) -> pb.Snapshot:
        return pb.Snapshot(
            used_blocks=sum(load.blocks for load in self.held.values()),
            running=min(4, len(self.held)),
            waiting=max(0, len(self.held) - 4),
            last_applied_seq=self.last_applied,
        )


@given(EVENTS, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_nothing_is_missed_or_counted_twice(events: list[str], random: object) -> None:
    """What the view counts as on its way is exactly what was submitted, is not in its snapshot, and
    has not ended as far as the router knows."""
    from random import Random

    assert isinstance(random, Random)
    view, worker = WorkerView(MODEL, pb.Snapshot()), Worker()
    loads: dict[int, Load] = {}
    gone: set[int] = set()
    for event in events:
        match event:
            case "submit":
                seq = len(loads) + 1
                loads[seq] = Load(random.randint(1, 20), random.randint(1, 300))
                view.submitted(seq, loads[seq])
                worker.inbox.append(seq)
            case "apply" if worker.inbox:
                seq = worker.inbox.pop(0)
                worker.held[seq] = loads[seq]
                worker.last_applied = seq
            case "push":
                worker.pushed.append(worker.snapshot())
            case "deliver" if worker.pushed:
                view.update(worker.pushed.pop(0))
            case "end" if worker.held:
                seq = random.choice(list(worker.held))
                del worker.held[seq]
                gone.add(seq)
                view.settle(seq)
                view.settle(seq)  # a late second call does nothing (B073)
            case "refuse" if worker.inbox:
                seq = worker.inbox.pop(0)
                worker.last_applied = seq
                gone.add(seq)
                view.settle(seq)
        told = view.snapshot.last_applied_seq
        expected = {seq: load for seq, load in loads.items() if seq > told and seq not in gone}
        assert dict(view.unapplied) == expected
        assert view.unapplied_blocks == sum(load.blocks for load in expected.values())
        assert view.unapplied_tokens == sum(load.prompt_tokens for load in expected.values())
    for seq in list(loads):
        view.settle(seq)
    assert (view.unapplied_blocks, view.unapplied_tokens, len(view.unapplied)) == (0, 0, 0)


def test_waiting_counts_what_is_on_its_way_beyond_the_free_seats() -> None:
    view = WorkerView(MODEL, pb.Snapshot(running=3))
    assert view.num_waiting == 0
    for seq, waiting in ((1, 0), (2, 1), (3, 2)):
        view.submitted(seq, Load(1, 1))
        assert view.num_waiting == waiting
    view.update(pb.Snapshot(running=4, waiting=2, last_applied_seq=3))
    assert view.num_waiting == 2 and view.num_sequences == 6


def test_a_full_worker_is_asked_again_when_it_has_sent_numbers() -> None:
    view = WorkerView(MODEL, pb.Snapshot())
    view.full = True
    view.update(pb.Snapshot(running=1))
    assert not view.full


def test_occupancy_counts_what_is_on_its_way() -> None:
    view = WorkerView(MODEL, pb.Snapshot(used_blocks=100))
    view.submitted(1, Load(50, 10))
    assert view.occupancy(50) == 0.2
