"""Threads for what no reply waits for."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from memstream.errors import MemstreamError

_log = logging.getLogger(__name__)


class Worker:
    """Does one job after the other in a thread of its own; a failure is logged at once and raised by ``flush``.

    Args:
        name: of the thread, and of the work in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._jobs: list[Future[object]] = []
        self._failed: BaseException | None = None  # the first failure since the last flush
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"memstream-{name}")

    def submit(self, job: Callable[[], object]) -> None:
        """Queues a job; after ``shutdown``, and while the interpreter ends, it is dropped."""
        with self._lock:
            if self._closed:
                return
            try:
                future = self._thread.submit(self._told, job)
            except RuntimeError:  # the interpreter ends, and threads end before what is registered with atexit
                return
            done = [job for job in self._jobs if job.done()]
            self._failed = self._failed or next((e for job in done if (e := job.exception()) is not None), None)
            self._jobs = [job for job in self._jobs if not job.done()]
            self._jobs.append(future)

    def flush(self) -> None:
        """Waits for everything queued, and for what that queues.

        Raises:
            MemstreamError: the first of what went wrong since the last flush.
        """
        while True:
            with self._lock:
                if not self._jobs:
                    failed, self._failed = self._failed, None
                    break
                job = self._jobs.pop(0)
            error = job.exception()
            with self._lock:
                self._failed = self._failed or error
        if failed is not None:
            raise failed

    def shutdown(self) -> None:
        """Takes no more work and ends the thread."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)

    def _told(self, job: Callable[[], object]) -> object:
        """Runs a job, and tells at once what went wrong."""
        try:
            return job()
        except BaseException as error:
            _log.error("%s in the background failed: %s", self._name, error)
            raise


class Regularly:
    """Does something again and again in the background, until it is stopped or its object is gone.

    Args:
        name: of the thread, and of the work in messages.
        method: of an object that may be collected meanwhile; what goes wrong is logged, and the next time comes.
        every_s: seconds between two times, and before the first.
    """

    def __init__(self, name: str, method: Callable[[], None], *, every_s: float) -> None:
        self.stopped = threading.Event()
        self._name, self._method, self._every_s = name, weakref.WeakMethod(method), every_s
        self._thread = threading.Thread(target=self._run, name=f"memstream-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stopped.wait(self._every_s) and (method := self._method()) is not None:
            try:
                method()
            except MemstreamError as error:
                _log.error("%s in the background failed: %s", self._name, error)
            del method  # so that the object can be collected meanwhile

    def stop(self) -> None:
        """Ends, after the run that has begun."""
        self.stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
