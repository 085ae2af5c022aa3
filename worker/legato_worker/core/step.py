"""A step while it is packed and until its result comes."""

from __future__ import annotations

from .batch import IN_FLIGHT, AttachedRow, Sample, ScheduledBatch, TableUpdate
from .sequence import Sequence


class Step:
    """A batch with the sequence of each packed row and of each sample. Filled by the scheduler."""

    __slots__ = ("batch", "rows", "samplers")

    def __init__(self, number: int) -> None:
        self.batch = ScheduledBatch(number)
        self.rows: list[Sequence] = []
        self.samplers: list[Sequence] = []

    def attach(self, sequence: Sequence) -> None:
        """Tells the runner all about a sequence that has just taken a slot."""
        request, batch = sequence.owner.request, self.batch
        batch.attached.append(
            AttachedRow(
                sequence.slot,
                sequence.choice,
                tuple(sequence.token_ids),
                sequence.num_prompt,
                request.sampling,
                request.stop_token_ids,
                request.min_tokens,
            )
        )
        batch.table_updates.append(TableUpdate(sequence.slot, 0, tuple(sequence.block_ids)))

    def add_chunk(self, sequence: Sequence, count: int) -> bool:
        """Adds a row of ``count`` known tokens; whether it reached the last one, so that an id is
        sampled."""
        batch, start = self.batch, sequence.num_computed
        end = start + count
        row = len(self.rows)
        self.rows.append(sequence)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.counts.append(count)
        batch.token_ids += sequence.token_ids[start:end]
        sequence.num_computed = end
        sequence.last_step = batch.step
        wants_prompt = sequence.owner.request.sampling.prompt_logprobs is not None
        if wants_prompt and start + 1 < sequence.num_prompt:
            batch.prompt_logprob_rows.append(row)
        if end < len(sequence.token_ids):
            return False
        self.add_sample(sequence, row)
        return True

    def add_decode(self, sequence: Sequence) -> None:
        """Adds a row of the last token, which may still be in flight, and samples the next."""
        batch, start = self.batch, sequence.num_computed
        known = sequence.token_ids
        row = len(self.rows)
        self.rows.append(sequence)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.counts.append(1)
        batch.token_ids.append(known[start] if start < len(known) else IN_FLIGHT)
        sequence.num_computed = start + 1
        sequence.last_step = batch.step
        self.add_sample(sequence, row)

    def add_sample(self, sequence: Sequence, row: int) -> None:
        """Samples the sequence's next id at the end of ``row``; takes the credit for it."""
        self.batch.samples.append(Sample(row, sequence.slot, sequence.num_computed))
        self.samplers.append(sequence)
        sequence.num_in_flight += 1
        sequence.owner.credit -= 1
