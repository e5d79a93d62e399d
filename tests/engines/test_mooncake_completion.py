"""Both ways of completion against doubles: what is asked, what never again, and what is freed when."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np
import pytest

from orchestrator.engines.base import Batch
from orchestrator.engines.mooncake_abi import COMPLETED, UNKNOWN, Abi
from orchestrator.engines.mooncake_abi import FAILED as TASK_FAILED
from orchestrator.engines.mooncake_abi import WAITING as TASK_WAITING
from orchestrator.engines.mooncake_completion import LOOK_AHEAD, BatchStatus, Completion, OneBlock
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError
from protocols.ids import Session
from tests.engines.native_double import FAILED, LANDED, TIMED_OUT, WAITING, NativeDouble

PEER, OTHER = Session("peer:1"), Session("other:1")


def submit(completion: Completion[object], count: int, session: Session = PEER) -> Batch:
    numbers = list(range(1, count + 1))
    array = np.array(numbers)
    return completion.submit(session, Blocks(array, array, array), (numbers, numbers, numbers))


@pytest.fixture
def native() -> NativeDouble:
    return NativeDouble()


@pytest.fixture
def one_block(native: NativeDouble) -> Completion[object]:
    return cast(Completion[object], OneBlock(native.transfer_submit_write, native.transfer_check_status))


class TestOneBlock:
    def test_each_block_has_its_own_verdict(self, native: NativeDouble, one_block: Completion[object]) -> None:
        batch = submit(one_block, 3)
        native.status = {1: LANDED, 3: FAILED}
        assert one_block.poll() == 2
        assert batch.in_doubt == [2]
        assert not batch.done
        native.status[2] = LANDED
        assert one_block.poll() == 1
        assert batch.done
        assert batch.in_doubt == [2]
        assert one_block.pending == 0
        assert one_block.poll() == 0  # and the double would not survive a second question
        assert len(native.written) == 3

    @pytest.mark.row("B2")
    def test_a_refused_first_block_submits_nothing(self, native: NativeDouble, one_block: Completion[object]) -> None:
        native.refuse_after = 0
        with pytest.raises(BrokenPeerError):
            submit(one_block, 3)
        assert one_block.pending == 0
        assert one_block.poll() == 0

    @pytest.mark.row("B2")
    def test_a_refusal_in_the_middle_drains_what_went_before(
        self, native: NativeDouble, one_block: Completion[object]
    ) -> None:
        native.refuse_after = 2
        batch = submit(one_block, 5)
        assert len(native.written) == 2
        assert batch.never_submitted == [2, 3, 4]
        calls: list[str] = []
        batch.add_callbacks(lambda _: calls.append("done"), lambda _: calls.append("failed"))
        assert calls == ["failed"], "known at once: whoever submits may stop"
        one_block.poll()
        assert not batch.done
        native.always = LANDED
        assert one_block.poll() == 2
        assert calls == ["failed", "done"]
        assert batch.quiet
        assert not batch.landed

    @pytest.mark.row("B4")
    @pytest.mark.parametrize("end", [LANDED, FAILED])
    def test_a_native_timeout_is_no_end(self, native: NativeDouble, one_block: Completion[object], end: int) -> None:
        batch = submit(one_block, 1)
        native.status = {1: TIMED_OUT}
        for _ in range(3):
            assert one_block.poll() == 0
        assert not batch.done
        assert batch.in_doubt == []
        native.status = {1: end}
        assert one_block.poll() == 1
        assert batch.landed == (end == LANDED)

    def test_a_poll_asks_a_bounded_number_per_session(
        self, native: NativeDouble, one_block: Completion[object]
    ) -> None:
        submit(one_block, 60)
        submit(one_block, 60, OTHER)
        one_block.poll()
        assert Counter(native.asked).most_common(1)[0][1] == 1
        assert sorted(native.asked) == [*range(1, LOOK_AHEAD + 1), *range(61, 61 + LOOK_AHEAD)]
        native.asked.clear()
        native.status = dict.fromkeys(range(1, 61), LANDED)
        assert one_block.poll() == 60

    def test_a_stuck_block_hides_nothing_behind_it(self, native: NativeDouble, one_block: Completion[object]) -> None:
        batches = [submit(one_block, 1) for _ in range(40)]
        native.always = LANDED
        native.status = {1: WAITING, 7: WAITING}
        one_block.poll()
        assert [batch.done for batch in batches].count(False) == 2

    def test_the_end_leaves_open_blocks_in_doubt_and_asks_nothing(
        self, native: NativeDouble, one_block: Completion[object]
    ) -> None:
        batch = submit(one_block, 3)
        native.status = {2: LANDED}
        one_block.poll()
        native.asked.clear()
        one_block.abandon()
        assert not batch.done, "its sources may be read until the engine is deleted"
        assert one_block.poll() == 0
        one_block.finish()
        assert batch.done
        assert batch.in_doubt == [0, 2]
        assert native.asked == []
        with pytest.raises(BrokenPeerError):
            submit(one_block, 1)

    def test_the_end_reaches_every_batch_past_a_callback_that_raises(
        self, native: NativeDouble, one_block: Completion[object], caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: Batch) -> None:
            raise LookupError("from the callback")

        batches = [submit(one_block, 2) for _ in range(3)]
        batches[0].add_callbacks(fail, fail)
        one_block.abandon()
        one_block.finish()
        assert all(batch.done for batch in batches)
        assert "from the callback" in caplog.text


class AbiDouble:
    """Batch status by script; dies of a freed id, and of freeing a batch with running tasks."""

    def __init__(self) -> None:
        self.tasks: dict[int, list[int]] = {}
        self.asked: Counter[tuple[int, int]] = Counter()
        self.freed: list[int] = []
        self.free_answer = True

    def submit(self, session: str, src: list[int], dst: list[int], length: list[int]) -> int:
        ident = len(self.tasks) + 1
        self.tasks[ident] = [TASK_WAITING] * len(src)
        return ident

    def batch_status(self, ident: int) -> int:
        assert ident not in self.freed
        for state in self.tasks[ident]:  # as the library does: the first that is not COMPLETED decides
            if state != COMPLETED:
                return state if TASK_FAILED not in self.tasks[ident] else TASK_FAILED
        return COMPLETED

    def task_status(self, ident: int, task: int) -> int:
        assert ident not in self.freed
        self.asked[ident, task] += 1
        return self.tasks[ident][task]

    def free(self, ident: int) -> bool:
        assert ident not in self.freed
        assert all(state in (COMPLETED, TASK_FAILED) for state in self.tasks[ident])
        self.freed.append(ident)
        return self.free_answer


class TestBatchStatus:
    @pytest.fixture
    def abi(self) -> AbiDouble:
        return AbiDouble()

    @pytest.fixture
    def batches(self, abi: AbiDouble) -> Completion[object]:
        return cast(Completion[object], BatchStatus(abi.submit, cast(Abi, abi)))

    def test_a_good_batch_is_asked_as_a_whole_and_freed_once(self, abi: AbiDouble, batches: Completion[object]) -> None:
        batch = submit(batches, 3)
        assert batches.poll() == 0
        abi.tasks[1] = [COMPLETED] * 3
        assert batches.poll() == 3
        assert batch.landed
        assert abi.freed == [1]
        assert not abi.asked
        assert batches.poll() == 0

    @pytest.mark.row("B4")
    def test_after_a_failure_each_block_is_asked_until_all_are_terminal(
        self, abi: AbiDouble, batches: Completion[object]
    ) -> None:
        batch = submit(batches, 4)
        abi.tasks[1] = [COMPLETED, TASK_FAILED, TASK_WAITING, TASK_WAITING]
        assert batches.poll() == 2
        assert batch.in_doubt == [1]
        assert not batch.done
        assert abi.freed == []
        abi.tasks[1][2:] = [TASK_WAITING, TASK_FAILED]
        assert batches.poll() == 1
        abi.tasks[1][2] = COMPLETED
        assert batches.poll() == 1
        assert batch.done
        assert batch.in_doubt == [1, 3]
        assert abi.freed == [1]
        assert abi.asked[1, 1] == 1, "a terminal block is not asked again"

    @pytest.mark.parametrize("odd", [5, UNKNOWN, 3])
    def test_a_timeout_or_an_unknown_state_is_no_end(
        self, abi: AbiDouble, batches: Completion[object], odd: int
    ) -> None:
        batch = submit(batches, 2)
        abi.tasks[1] = [odd, COMPLETED]
        batches.poll()
        batches.poll()
        assert not batch.done
        assert abi.freed == []
        abi.tasks[1][0] = COMPLETED
        batches.poll()
        assert batch.landed
        assert abi.freed == [1]

    @pytest.mark.row("B2")
    def test_a_refused_batch_submits_nothing(self, batches: Completion[object]) -> None:
        refusing = cast(Completion[object], BatchStatus(lambda *_: 0, cast(Abi, None)))
        with pytest.raises(BrokenPeerError):
            submit(refusing, 2)
        assert refusing.pending == 0

    def test_a_batch_that_is_not_freed_is_said_and_forgotten(
        self, abi: AbiDouble, batches: Completion[object], caplog: pytest.LogCaptureFixture
    ) -> None:
        batch = submit(batches, 1)
        abi.tasks[1] = [COMPLETED]
        abi.free_answer = False
        batches.poll()
        assert batch.landed
        assert "leaked" in caplog.text
        assert batches.poll() == 0

    def test_the_end_leaves_open_blocks_in_doubt(self, abi: AbiDouble, batches: Completion[object]) -> None:
        whole, partly = submit(batches, 2), submit(batches, 3)
        abi.tasks[2] = [COMPLETED, TASK_FAILED, TASK_WAITING]
        batches.poll()
        batches.abandon()
        assert batches.poll() == 0
        batches.finish()
        assert whole.in_doubt == [0, 1]
        assert partly.in_doubt == [1, 2]
        assert abi.freed == []
        with pytest.raises(BrokenPeerError):
            submit(batches, 1)
