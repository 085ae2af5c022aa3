"""Answers that are continued: what was delivered is recomputed, never sampled again."""

from __future__ import annotations

import pytest
from legato_worker.core.batch import StepResult
from legato_worker.core.request import FinishReason, Request, ResumedChoice, SamplingParams

from tests.unit.core.driver import SAMPLING, Driver, answer_alone, prompt_of

EOS = frozenset({0})


def resumed(prompt: list[int], max_tokens: int, *lengths: int | None) -> tuple[ResumedChoice, ...]:
    """Resume points in the true answer of each choice; None: that choice had ended."""
    request = Request(0, tuple(prompt), max_tokens, n=len(lengths), sampling=SAMPLING)
    answers, _ = answer_alone(request)
    return tuple(
        ResumedChoice(answer, True) if length is None else ResumedChoice(answer[:length])
        for answer, length in zip(answers, lengths, strict=True)
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 7, 12, 13, 29])
def test_the_continuation_is_the_rest_of_the_answer(length: int, depth: int) -> None:
    """B047: cut anywhere, on block boundaries and off them; the first new id's index is right."""
    prompt = prompt_of(20)
    driver = Driver(depth=depth, chunk=8)
    key = driver.add(prompt, 30, resume=resumed(prompt, 30, length))
    driver.run()
    driver.assert_idle()
    assert len(driver.answers[key, 0]) == 30 - length
    driver.assert_solo(key)
    assert driver.ended[key].reason is FinishReason.LENGTH


def test_a_resumed_row_tells_which_ids_are_output() -> None:
    """Penalties and min_tokens count them."""
    prompt = prompt_of(20)
    driver = Driver()
    driver.add(prompt, 30, resume=resumed(prompt, 30, 5), min_tokens=3)
    batch = driver.scheduler.schedule(0.0)
    assert batch is not None
    (row,) = batch.attached
    assert (row.num_prompt, len(row.token_ids), row.min_tokens) == (20, 25, 3)
    assert batch.samples[0].position == 25


def test_choices_resume_at_their_own_places() -> None:
    prompt = prompt_of(20)
    driver = Driver(num_blocks=16)
    key = driver.add(prompt, 20, n=3, resume=resumed(prompt, 20, 9, 0, 4))
    driver.run()
    driver.assert_idle()
    assert [len(driver.answers[key, choice]) for choice in range(3)] == [11, 20, 16]
    driver.assert_solo(key)


def test_ended_choices_are_not_continued() -> None:
    prompt = prompt_of(20)
    driver = Driver()
    key = driver.add(prompt, 20, n=3, resume=resumed(prompt, 20, None, 5, None))
    driver.run()
    driver.assert_idle()
    assert set(driver.ended_choices) == {(key, 1)}
    answers, _ = answer_alone(driver.requests[key])
    assert tuple(driver.answers[key, 1]) == answers[1][5:]
    assert not driver.answers[key, 0] and not driver.answers[key, 2]
    assert driver.ended[key].cause is None


def test_a_request_whose_choices_had_all_ended_ends_at_once() -> None:
    prompt = prompt_of(20)
    driver = Driver()
    key = driver.add(prompt, 20, n=2, resume=resumed(prompt, 20, None, None))
    assert not driver.scheduler.has_work
    driver.run()
    driver.assert_idle()
    assert driver.ended[key].cause is None and not driver.steps


def test_an_untouched_resume_point_forks_as_a_new_request_does() -> None:
    prompt = prompt_of(20)
    driver = Driver()
    driver.add(prompt, 20, n=2, resume=(ResumedChoice(), ResumedChoice()))
    driver.step()
    assert [row.samples for row in driver.steps[0]] == [2]


def test_the_prompt_of_resumed_choices_is_computed_once() -> None:
    """Through the prefix cache: the second choice waits for the first's blocks and hits them."""
    prompt = prompt_of(64)
    driver = Driver(budget=256, chunk=256)
    key = driver.add(prompt, 20, n=2, resume=resumed(prompt, 20, 3, 4))
    driver.run()
    first_rows = {row.choice: row for _, row in reversed(driver.rows_of(key))}
    assert (first_rows[0].start, first_rows[1].start) == (0, 64)
    driver.assert_solo(key)


def test_min_tokens_and_stop_ids_count_from_the_beginning() -> None:
    """B046: a stop id that came before the cut does not end the continuation too early, and one
    after it does, as in the solo run."""
    prompt = prompt_of(20, 2)
    options = {"stop_token_ids": EOS, "min_tokens": 10, "sampling": SamplingParams()}
    request = Request(0, tuple(prompt), 60, **options)
    (answer,), end = answer_alone(request, 16, 0.1)
    assert end.reason is FinishReason.STOP and len(answer) > 10
    for length in (3, 9, len(answer) - 1):
        driver = Driver(runner={"eos_probability": 0.1})
        key = driver.add(prompt, 60, resume=(ResumedChoice(answer[:length]),), **options)
        driver.run()
        driver.assert_solo(key)


def test_a_stop_id_before_min_tokens_does_not_end_the_answer() -> None:
    """Whatever the sampler says; B046 asks for no stop of any kind before that."""
    driver = Driver()
    key = driver.add(prompt_of(8), max_tokens=8, min_tokens=3, stop_token_ids=frozenset({5}))

    def stop(result: StepResult) -> None:
        result.token_ids[0] = 5

    for _ in range(3):
        driver.launch()
        driver.commit(stop)
        driver.collect()
    assert driver.answers[key, 0] == [5, 5, 5]
    assert driver.ended[key].reason is FinishReason.STOP


def test_only_rows_of_the_prompt_give_prompt_log_probabilities() -> None:
    """What is recomputed of an answer does not."""
    sampling = SamplingParams(temperature=1.0, seed=7, prompt_logprobs=0)
    driver = Driver(chunk=8, budget=8)
    driver.add(prompt_of(20), 30, sampling=sampling, resume=(ResumedChoice((5,) * 12),))
    flagged = []
    for _ in range(6):
        driver.launch()
        batch = driver.scheduler._in_flight[-1].batch
        flagged.append((batch.starts[0], batch.prompt_logprob_rows))
        driver.commit()
    assert flagged == [(0, [0]), (8, [0]), (16, [0]), (24, []), (32, []), (33, [])]


def test_prompt_log_probabilities_come_once_and_whole() -> None:
    """Chunked, cached and preempted: one entry per prompt position that has a successor."""
    sampling = SamplingParams(temperature=1.0, seed=7, prompt_logprobs=0)
    driver = Driver(num_blocks=5, max_num_seqs=3, budget=32, chunk=6)
    keys = [driver.add(prompt_of(16, seed), max_tokens=30) for seed in range(2)]
    keys += [driver.add(prompt_of(17, 2), max_tokens=10, sampling=sampling)]
    driver.run()
    assert driver.ended[keys[2]].preemptions > 0
    assert driver.num_prompt_logprobs == {keys[2]: 16}
    again = driver.add(prompt_of(17, 2), max_tokens=4, sampling=sampling)
    driver.run()
    assert driver.num_prompt_logprobs[again] == 16
    driver.assert_solo(again)
