from __future__ import annotations

import torch
from legato_worker.core.batch import IN_FLIGHT, ScheduledBatch, TableUpdate
from legato_worker.runners.step_inputs import StepInputs


def test_rows_are_laid_out_one_after_the_other() -> None:
    inputs = StepInputs(max_num_seqs=5, max_model_len=18, block_size=4)
    inputs.update_tables(
        [
            TableUpdate(4, 0, (7, 2)),
            TableUpdate(1, 0, (9,)),
            TableUpdate(0, 0, (1, 1, 1, 1, 1)),
            TableUpdate(4, 2, (0, 5)),
            TableUpdate(1, 0, (3,)),  # a copy on write replaces an entry
        ]
    )
    inputs.record_sampled([1, 4], [77, 88])
    token_ids, step = inputs.build(
        ScheduledBatch(
            step=1,
            slots=[4, 1, 0],
            starts=[6, 2, 16],
            counts=[4, 1, 2],
            token_ids=[10, 11, 12, 13, IN_FLIGHT, 14, 15],
        )
    )
    assert token_ids.tolist() == [10, 11, 12, 13, 77, 14, 15]
    assert step.positions.tolist() == [6, 7, 8, 9, 2, 16, 17]
    assert step.slot_mapping.tolist() == [10, 11, 0, 1, 14, 4, 5]
    assert step.query_start.tolist() == [0, 4, 5, 7]
    assert step.context_lens.tolist() == [10, 3, 18]
    assert step.block_tables[0, :3].tolist() == [7, 2, 0]
    assert step.block_tables[1, 0] == 3
    assert step.block_tables[2].tolist() == [1, 1, 1, 1, 1]
    assert (step.max_query_len, step.max_context_len) == (4, 18)
    assert token_ids.dtype == step.positions.dtype == step.slot_mapping.dtype == torch.int64
    assert step.query_start.dtype == step.context_lens.dtype == torch.int32
    assert step.block_tables.dtype == torch.int32


def test_a_step_keeps_its_tables_when_they_change_later() -> None:
    inputs = StepInputs(max_num_seqs=2, max_model_len=8, block_size=4)
    inputs.update_tables([TableUpdate(1, 0, (3, 4))])
    row = ScheduledBatch(step=1, slots=[1], starts=[4], counts=[1], token_ids=[0])
    _, step = inputs.build(row)
    inputs.update_tables([TableUpdate(1, 0, (5, 6))])
    assert step.block_tables.tolist() == [[3, 4]]


def test_the_last_position_of_the_longest_sequence_has_a_slot() -> None:
    inputs = StepInputs(max_num_seqs=1, max_model_len=9, block_size=4)
    inputs.update_tables([TableUpdate(0, 0, (2, 1, 0))])
    row = ScheduledBatch(step=1, slots=[0], starts=[8], counts=[1], token_ids=[0])
    assert inputs.build(row)[1].slot_mapping.tolist() == [0]
