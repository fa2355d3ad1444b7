"""The pool against scripted workers: no Ray, so every kind of failure can be played exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlcompute.actors.dispatch import MAX_FRUITLESS_ROUNDS, WorkerPool
from rlcompute.actors.messages import Reply
from rlcompute.errors import StageTimeoutError, WorkerError

Answer = Callable[[int, dict[int, Any]], Reply | str | None]


class ScriptedGroup:
    """Stands in for RLlib's group: ``answer`` returns a reply, "dies", or None for silence."""

    def __init__(self, workers: int, answer: Answer) -> None:
        self.all = list(range(1, workers + 1))
        self.dead: set[int] = set()
        self.answer = answer
        self.calls: list[dict[int, list[int]]] = []

    def healthy_env_runner_ids(self) -> list[int]:
        return [w for w in self.all if w not in self.dead]

    def num_healthy_remote_env_runners(self) -> int:
        return len(self.healthy_env_runner_ids())

    def num_remote_env_runners(self) -> int:
        return len(self.all)

    def foreach_env_runner(
        self, method: str, *, kwargs: list[dict[str, Any]], remote_worker_ids: list[int], **_: Any
    ) -> list[Reply]:
        self.calls.append({w: list(kw["tasks"]) for w, kw in zip(remote_worker_ids, kwargs, strict=True)})
        replies = []
        for worker, kw in zip(remote_worker_ids, kwargs, strict=True):
            reply = self.answer(worker, kw["tasks"])
            if reply == "dies":
                self.dead.add(worker)
            elif isinstance(reply, Reply):
                replies.append(reply)
        return replies


def make_pool(group: ScriptedGroup, synced: list[int] | None = None, revive: bool = True) -> WorkerPool:
    def restore() -> None:
        if revive:
            group.dead.clear()

    return WorkerPool(
        group,  # type: ignore[arg-type]
        restore=restore,
        sync=lambda: (synced if synced is not None else []).append(1),
        timeout_s=0.3,
    )


def double(worker: int, tasks: dict[int, Any]) -> Reply:
    return Reply(worker, results={number: 2 * task for number, task in tasks.items()})


def results(done: dict[int, Any]) -> dict[int, Any]:
    return {number: finished.result for number, finished in done.items()}


def test_tasks_are_spread_and_collected() -> None:
    group = ScriptedGroup(2, double)
    done = make_pool(group).scatter("s", "m", {0: 10, 1: 11, 2: 12})
    assert results(done) == {0: 20, 1: 22, 2: 24}
    assert group.calls == [{1: [0, 2], 2: [1]}]
    assert [done[number].worker for number in range(3)] == [1, 2, 1]


def test_calls_are_bounded_and_progress_is_told() -> None:
    told: list[list[int]] = []
    group = ScriptedGroup(2, double)
    done = make_pool(group).scatter(
        "s",
        "m",
        {n: n for n in range(5)},
        tasks_per_call=1,
        progress=lambda finished: told.append(sorted(finished)),
    )
    assert results(done) == {n: 2 * n for n in range(5)}
    assert told == [[0, 1], [2, 3], [4]]


def test_tasks_of_a_dead_worker_go_to_the_others() -> None:
    def answer(worker: int, tasks: dict[int, Any]) -> Reply | str:
        return "dies" if worker == 2 else double(worker, tasks)

    group = ScriptedGroup(2, answer)
    pool = make_pool(group, revive=False)
    done = pool.scatter("s", "m", {n: n for n in range(4)})
    assert results(done) == {n: 2 * n for n in range(4)}
    assert group.calls == [{1: [0, 2], 2: [1, 3]}, {1: [1, 3]}]
    assert pool.deaths == 1


def test_an_exception_on_a_worker_ends_the_run_with_its_traceback() -> None:
    def answer(worker: int, tasks: dict[int, Any]) -> Reply:
        return Reply(worker, failure="Traceback ...\nKeyError: 'gate'", pid=42)

    with pytest.raises(
        WorkerError, match=r"(?s)stage 'sample': rollout worker 1 \(process 42.*KeyError: 'gate'"
    ):
        make_pool(ScriptedGroup(1, answer)).scatter("sample", "m", {0: 0})


def test_silence_is_a_timeout_that_names_the_stage() -> None:
    def answer(worker: int, tasks: dict[int, Any]) -> Reply | None:
        return None if worker == 2 else double(worker, tasks)

    with pytest.raises(StageTimeoutError, match=r"stage 'sample': rollout worker\(s\) 2 did not answer"):
        make_pool(ScriptedGroup(2, answer)).scatter("sample", "m", {0: 0, 1: 1})


def test_workers_that_never_come_back_are_a_timeout() -> None:
    group = ScriptedGroup(1, double)
    group.dead.add(1)
    with pytest.raises(StageTimeoutError, match="no rollout worker came back"):
        make_pool(group, revive=False).scatter("sample", "m", {0: 0})


def test_workers_that_keep_dying_end_the_run() -> None:
    group = ScriptedGroup(1, lambda worker, tasks: "dies")
    with pytest.raises(WorkerError, match="died in"):
        make_pool(group).scatter("sample", "m", {0: 0})
    assert len(group.calls) == MAX_FRUITLESS_ROUNDS


def test_a_worker_with_old_weights_is_synced_and_asked_again() -> None:
    synced: list[int] = []

    def answer(worker: int, tasks: dict[int, Any]) -> Reply:
        return double(worker, tasks) if synced else Reply(worker, stale=True)

    done = make_pool(ScriptedGroup(1, answer), synced).scatter("s", "m", {0: 3}, weights_version=7)
    assert results(done) == {0: 6}
    assert synced == [1]


def test_a_task_without_a_result_is_left_out() -> None:
    def answer(worker: int, tasks: dict[int, Any]) -> Reply:
        return Reply(worker, results={0: "kept"})

    assert results(make_pool(ScriptedGroup(1, answer)).call("s", "m", {1: {0: None, 1: None}})) == {0: "kept"}
