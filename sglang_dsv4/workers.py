"""Threads that send requests, of which none keeps a program that is told to end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `count` threads that is waited for where the body comes to its end.

    Whatever else ends the body, such as Ctrl-C, drops the tasks that have not begun and does not wait for those that
    have: they are answered, or fail when their server is stopped, which is up to somebody further out.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
