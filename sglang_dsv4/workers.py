"""Threads that send requests, of which none keeps a program that is told to end.

Those of `concurrent.futures` are waited for when the interpreter ends, and a server may take minutes for what they have
asked it; these are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Workers:
    """A context manager: `count` daemon threads, whose tasks are waited for where the body comes to its end.

    Whatever else ends the body, such as Ctrl-C or a task that failed, drops the tasks that have not begun and does not
    wait for those that have: they are answered, or fail when their server is stopped, which is up to somebody further
    out.
    """

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            wait(self._futures)
        for future in self._futures:
            future.cancel()
        for _ in range(self._count):
            self._tasks.put(None)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Runs function(*arguments) as soon as a thread is free."""
        future: Future[T] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._futures.append(future)
        self._tasks.put(task)
        return future

    def gather(self, function: Callable[..., T], *columns: Iterable[Any]) -> list[T]:
        """function(*row) of every row of the columns, in their order. Raises what the first one to fail raised, without
        waiting for the others."""
        futures = [self.submit(function, *row) for row in zip(*columns, strict=True)]
        self.until(futures)
        return [future.result() for future in futures]

    @staticmethod
    def until(futures: Iterable[Future[Any]]) -> None:
        """Until all are done. Raises what the first one to fail raised, without waiting for the others."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                raise error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
