"""What clients have in common, whatever they speak."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from asynctrt.client.persistence import check_settings, only_input
from asynctrt.tensors import Array


class Client(ABC):
    """A client of a server. :func:`asynctrt.client.connect` makes it; enter it with ``async with``.

    Any number of tasks may use it at once.
    """

    def __init__(self, url: str, max_in_flight: int, attempts: int, *, idempotent: bool) -> None:
        check_settings(max_in_flight, attempts)
        self.url = url
        self._attempts = attempts
        self._idempotent = idempotent
        self._only_inputs: dict[tuple[str, str], str] = {}

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connection; requests in flight fail with ``ConnectionLostError``. Idempotent."""

    @abstractmethod
    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        idempotent: bool | None = None,
    ) -> dict[str, Array]:
        """Run rows through a model of the server.

        :param model: the model's name; ignored on the websocket of a single model.
        :param inputs: an array, for a model with one input; or arrays by tensor name, each ``(rows, *dims)``
            of the tensor's dtype; for BYTES, byte strings or text. The name of a model's only input is asked
            for once.
        :param version: the model's version; the newest if empty.
        :param outputs: the wanted outputs; all by default.
        :param timeout: seconds that the request may be queued on the server.
        :param priority: 1 is the most urgent; 0 means the model's default.
        :param deadline: seconds until there has to be an answer, with all attempts. The server learns of it
            as the longest time in its queue.
        :param idempotent: whether the request may be computed twice; as given to ``connect`` by default.
        :raises AsynctrtError: the server's error, as :meth:`asynctrt.Engine.infer` would raise it.
        :raises ConnectionLostError: if the connection is lost before the answer arrives.
        :raises DeadlineError: if there is no answer within ``deadline``, or the request was queued for longer
            than ``timeout``.
        :raises UsageError: for an array without a name, if the model has several inputs.
        """

    @abstractmethod
    async def metadata(self, model: str, *, version: str = "") -> dict[str, Any]:
        """Return KServe's description of a model: its versions, platform, inputs and outputs.

        :raises AsynctrtError: the server's error.
        :raises ConnectionLostError: if there is no answer.
        """

    async def _only_input(self, model: str, version: str) -> str:
        known = self._only_inputs.get((model, version))
        if known is None:
            known = only_input(model, await self.metadata(model, version=version))
            self._only_inputs[model, version] = known
        return known
