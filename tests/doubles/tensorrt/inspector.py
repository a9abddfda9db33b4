"""The double's ``EngineInspector``, which tells of an engine's layers."""

import json

from tests.doubles.tensorrt.names import LayerInformationFormat


class EngineInspector:
    """Describes an engine's layers, by the names that the plan keeps: one for each step."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def get_engine_information(self, format: LayerInformationFormat) -> str:  # noqa: A002  (the real one's name)
        """Return the description of all layers."""
        assert format is LayerInformationFormat.JSON, "the double writes nothing else"
        return json.dumps({"Layers": self._names, "Bindings": []})
