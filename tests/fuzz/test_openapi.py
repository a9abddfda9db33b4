"""The server's OpenAPI document against the server: what it allows is answered, all else is refused."""

import asyncio

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynctrt import FunctionModel, TensorSpec
from asynctrt.serving.openapi import document
from tests.serving.support import WAIT_S, serving

pytestmark = [pytest.mark.anyio, pytest.mark.tier2, pytest.mark.timeout(240)]
NOT_IN_A_SCHEMA = ("rows", "bytes", "NUL", "float64", "whole")
"""Words of refusals that no schema foresees, such as of tensors with other rows than the others have."""


def mixed(inputs):
    return {"words": np.full(len(inputs["flags"]), "ü".encode(), "S4")}


def models():
    """Models of numbers, of several datatypes, and without a batch axis."""
    names = {"inputs": "i", "outputs": "o"}
    alone = {key: TensorSpec(name, "float32", (2,), axis=None) for key, name in names.items()}
    inputs = [TensorSpec("flags", "bool"), TensorSpec("small", "uint8", (2, 1)), TensorSpec("text", "str")]
    return {
        "negative": FunctionModel(
            lambda inputs: {"o": -inputs["i"]},
            **{key: TensorSpec(name, "float32", (4,)) for key, name in names.items()},
        ),
        "a/b {c}": FunctionModel(mixed, inputs=inputs, outputs=TensorSpec("words", "S4")),
        "alone": FunctionModel(lambda inputs: {"o": inputs["i"]}, **alone),
    }


@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "wrong"])
async def test_a_request_is_answered_as_the_document_says(is_allowed):
    # Imported here: they take a while, and only this test needs them.
    import schemathesis
    from schemathesis.specs.openapi import checks as described

    modes = schemathesis.GenerationMode
    mode = modes.POSITIVE if is_allowed else modes.NEGATIVE
    checks = [described.status_code_conformance, described.response_schema_conformance]
    faults = []
    async with serving(models()) as server:
        operations = schemathesis.openapi.from_dict(document(server.api)).get_all_operations()
        predicting = [one.ok() for one in operations if one.ok().path.endswith(":predict")]

        @settings(
            max_examples=150,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.one_of([one.as_strategy(generation_mode=mode) for one in predicting]))
        def check(case):
            # No parameters at all are also taken as null, of which the document does not say anything.
            assume(not isinstance(case.body, dict) or case.body.get("parameters", {}) is not None)
            answer = case.call(base_url=server.http_url, timeout=WAIT_S)
            case.validate_response(answer, checks=checks)
            said = answer.json().get("error", "") if answer.content else ""
            is_answered = answer.status_code == 200
            is_foreseen = is_answered or not any(word in said for word in NOT_IN_A_SCHEMA)
            if is_answered != is_allowed and (is_foreseen or not is_allowed):
                faults.append((answer.status_code, case.body, said))

        await asyncio.to_thread(check)
        assert server.api.in_flight == 0
    assert not faults, faults
