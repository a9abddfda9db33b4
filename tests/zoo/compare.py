"""Run requests through engines and directly, and compare the answers."""

import asyncio
import math

import numpy as np
import onnxruntime as ort

LOG_FATAL_ONLY = 4


def direct_session(path, threads=1):
    """Return a session of ONNX Runtime; 0 threads stand for its default, one for each core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOG_FATAL_ONLY
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def direct_answer(session, request):
    """Return the outputs of one run by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, request), strict=True))


async def ask(engine, requests, callers):
    """Return the answers to all requests, of which each caller takes one after the other."""
    answers = [None] * len(requests)
    numbers = iter(range(len(requests)))

    async def caller():
        for number in numbers:
            answers[number] = await engine.infer(requests[number])

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return answers


def leaves(value):
    """Yield the arrays that a value consists of; a map or a sequence also yields its keys or its length."""
    if isinstance(value, dict):
        yield np.array(list(value), object)
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        yield np.array(len(value))
        for item in value:
            yield from leaves(item)
    else:
        yield np.asarray(value)


def pairs(ours, direct):
    """Return the arrays of two answers in pairs; ``None`` if one has what the other has not."""
    if set(ours) != set(direct):
        return None
    sides = [[leaf for name in direct for leaf in leaves(side[name])] for side in (ours, direct)]
    return list(zip(*sides, strict=True)) if len(sides[0]) == len(sides[1]) else None


def difference(ours, direct):
    """Return how far an answer is from a direct one, over the largest value in each tensor.

    Infinity stands for other names, shapes, dtypes, strings or integers.
    """
    found = pairs(ours, direct)
    return math.inf if found is None else max(_difference(*pair) for pair in found)


def _difference(ours, direct):
    if ours.shape != direct.shape or ours.dtype != direct.dtype:
        return math.inf
    if ours.dtype.kind != "f":
        return 0.0 if np.array_equal(ours, direct) else math.inf
    if not direct.size or np.array_equal(ours, direct, equal_nan=True):
        return 0.0
    ours, direct = ours.astype(np.float64), direct.astype(np.float64)
    largest = np.abs(direct).max() or 1.0
    found = float(np.abs(ours - direct).max() / largest)
    return math.inf if math.isnan(found) else found


def is_same(ours, direct):
    """Return whether two answers are equal bit for bit."""
    found = pairs(ours, direct)
    return found is not None and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and (np.array_equal(one, other) if one.dtype == object else one.tobytes() == other.tobytes())
        for one, other in found
    )
