"""The double's ``EngineInspector``, which tells of an engine's layers."""

import json
from typing import Any

from tests.doubles.tensorrt.names import IErrorRecorder, LayerInformationFormat


class EngineInspector:
    """Describes an engine's layers, by the names that the plan keeps: one for each step."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._recorder: IErrorRecorder | None = None
        self._context: Any = None

    @property
    def error_recorder(self) -> IErrorRecorder | None:
        """What gets its errors."""
        return self._recorder

    @error_recorder.setter
    def error_recorder(self, recorder: IErrorRecorder | None) -> None:
        """Set what gets its errors."""
        self._recorder = recorder

    @property
    def execution_context(self) -> Any:
        """The context whose shapes are looked at."""
        return self._context

    @execution_context.setter
    def execution_context(self, context: Any) -> None:
        """Set the context whose shapes are looked at."""
        self._context = context

    def get_layer_information(self, layer_index: int, format: LayerInformationFormat) -> str:  # noqa: A002  (the real one's name)
        """Return the description of one layer."""
        name = self._names[layer_index]
        return json.dumps(name) if format is LayerInformationFormat.JSON else name

    def get_engine_information(self, format: LayerInformationFormat) -> str:  # noqa: A002  (the real one's name)
        """Return the description of all layers."""
        if format is LayerInformationFormat.JSON:
            return json.dumps({"Layers": self._names, "Bindings": []})
        return "\n".join(["Layers:", *self._names, "", "Bindings:"])
