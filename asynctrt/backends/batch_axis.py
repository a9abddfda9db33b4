"""The rule that the first axis of every tensor counts rows, and the refusals of models that break it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asynctrt.errors import ModelError

Shape = Sequence[int | str | None]
"""Dimensions as a runtime reports them; names, ``None`` and negative numbers stand for dynamic ones."""


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The batch axis of one model.

    :param model: the model's name, for messages.
    :param fix: how to create such a model again, as the start of a sentence in messages: ``Export the
        model``.
    """

    model: str
    fix: str

    def fixed_rows(self, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> int | None:
        """Return the batch size if it is fixed, and ``None`` if it is dynamic.

        :raises ModelError: if an input or output is missing, if one has no axes, if the inputs do not share a
            batch axis, or if the first axis of an output has a fixed size that is not the batch size.
        """
        if not inputs or not outputs:
            raise ModelError(
                f"{self.model!r} has {len(inputs)} inputs and {len(outputs)} outputs, but needs at least one "
                "of each"
            )
        for kind, side in (("input", inputs), ("output", outputs)):
            for name, shape in side.items():
                if not shape:
                    raise ModelError(
                        f"{kind} {name!r} of {self.model!r} is a scalar, or has no known rank. {self.fix} "
                        "with a first axis that counts rows"
                    )
        sizes = {_size(shape) for shape in inputs.values()}
        if len(sizes) > 1:
            raise ModelError(
                f"the inputs of {self.model!r} do not share a batch axis: {dict(inputs)}. {self.fix} with a "
                "dynamic first axis on every input"
            )
        rows = sizes.pop()
        for name, shape in outputs.items():
            if _size(shape) not in (None, rows):
                raise ModelError(
                    f"output {name!r} of {self.model!r} has the fixed first axis {shape[0]}, so its rows "
                    f"cannot be separated. {self.fix} with a first axis that counts rows on every output"
                )
        return rows

    def second_axis_error(self, kind: str, name: str, axis: int) -> ModelError:
        """Return the error for a tensor that has the batch size on another axis as well."""
        return ModelError(
            f"{kind} {name!r} of {self.model!r} has the batch size on axis {axis} too, so rows of one batch "
            "would see each other, and requests cannot share a batch"
        )


def _size(shape: Shape) -> int | None:
    first = shape[0]
    return first if isinstance(first, int) and first >= 0 else None
