"""A local engine's entry point for rows in shared memory, used by a worker."""

from collections.abc import Callable
from typing import Any

from asynctrt.core.inputs import Checked, InputCheck
from asynctrt.core.splitting import SplitCall, Splitter
from asynctrt.devices.base import Device
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.driver import Driver
from asynctrt.runtime.staging import Slab
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request


class Intake:
    """Takes rows that were checked separately, and lets batches use them in place.

    :param check: the check of inputs, whose ``validate`` returns the argument of :meth:`submit`.
    :param device: the device that the batches run on.
    :param fits: returns whether rows of a key fit one batch.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        splitter: Splitter,
        check: InputCheck,
        pool: ContextPool,
        device: Device,
        fits: Callable[[int, BatchKey], bool],
    ) -> None:
        self._driver = driver
        self._splitter = splitter
        self._pool = pool
        self._fits = fits
        self.check = check
        self.device = device

    def __repr__(self) -> str:
        return f"<Intake of {self._driver!r}>"

    def submit(self, future: Any, checked: Checked, timeout_ns: int | None, priority: int) -> Request | None:
        """Queue checked rows.

        :param future: any object with a future's methods; it is resolved the same way.
        :returns: their request; ``None``, with nothing queued, if there are more rows than a batch holds.
        """
        arrays, rows, key = checked
        if not self._fits(rows, key):
            return None
        return self._driver.submit(arrays, rows, key, priority, timeout_ns, future)

    def submit_split(self, checked: Checked, timeout_ns: int | None, priority: int) -> SplitCall:
        """Queue checked rows in parts.

        :raises InputError: for more rows than the queue can ever hold.
        """
        arrays, rows, key = checked
        return self._splitter.submit(arrays, rows, key, priority, timeout_ns)

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller was cancelled."""
        self._driver.cancel(request)

    def on_launch(self, note: Callable[[Batch], None]) -> None:
        """Call ``note`` with each batch before its rows are used. ``note`` must not raise."""
        self._driver.on_launch = note

    def forget_inputs(self, slab: Slab) -> None:
        """Forget a slab that is about to be freed. No batch may still use it."""
        self._pool.forget_inputs(slab)
