"""Runs one job at a time in a thread, so that the callback of a button does not block the kernel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

Job = Callable[[threading.Event], None]


class Worker:
    """Runs one job at a time, and refuses a second one while it runs.

    The callbacks, like the job, may run in the thread. They can set values of widgets, but must neither print nor use
    pyplot.

    Args:
        on_busy: called with True before a job and with False after it.
        on_error: called with the exception that a job raised.
        thread: False runs jobs in the calling thread, as does a platform without threads.
    """

    def __init__(
        self, on_busy: Callable[[bool], object], on_error: Callable[[BaseException], object], thread: bool = True
    ) -> None:
        self._on_busy, self._on_error, self._threaded = on_busy, on_error, thread
        self._lock = threading.Lock()
        self._cancel = threading.Event()
        self._idle = threading.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return not self._idle.is_set()

    def start(self, job: Job, wait: bool = False) -> bool:
        """Start a job.

        Args:
            job: called with the event that `stop` sets.
            wait: run the job in the calling thread.

        Returns:
            False, without doing anything, if a job is running.
        """
        if not self._lock.acquire(blocking=False):
            return False
        self._idle.clear()
        self._cancel = threading.Event()
        self._on_busy(True)
        if self._threaded and not wait:
            try:
                threading.Thread(target=self._run, args=(job,), name="specnb-panel", daemon=True).start()
                return True
            except RuntimeError:  # the platform has no threads
                pass
        self._run(job)
        return True

    def stop(self) -> None:
        """Ask the job to end within one step."""
        self._cancel.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the job to end. False if it is still running after `timeout` seconds."""
        return self._idle.wait(timeout)

    def _run(self, job: Job) -> None:
        error: BaseException | None = None
        try:
            with _mute_logs():
                job(self._cancel)
        except BaseException as raised:  # a thread would lose any error, interrupts included
            error = raised
        try:
            if error is not None:
                self._on_error(error)
            self._on_busy(False)
        finally:
            self._lock.release()
            self._idle.set()


class _mute_logs:
    """Hides the log lines of this thread. They would appear in the output of whatever cell ran last."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        names = ("transformers", "huggingface_hub")
        self._handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
        for handler in self._handlers:
            handler.addFilter(self._foreign)

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._foreign)

    def _foreign(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


class no_progress_bars:
    """Hides progress bars. From a thread they would appear in the output of whatever cell ran last."""

    def __enter__(self) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
        from transformers.utils import logging

        self._hub, self._own = not are_progress_bars_disabled(), logging.is_progress_bar_enabled()
        disable_progress_bars()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging

        if self._own:
            logging.enable_progress_bar()
        if self._hub:
            enable_progress_bars()
