"""How a round trip and a request went on each device."""

from collections.abc import Iterator
from typing import Any, Final

from asynctrt.doctor.children import Ending, Outcome
from asynctrt.doctor.facts import Facts
from asynctrt.doctor.findings import Finding, error, ok, unknown, warning

EVENT_US_MAX: Final = 1000
"""An event on an idle device that takes longer to be seen is remarkable."""


def check(facts: Facts) -> Iterator[Finding]:
    """Yield how each device did."""
    for name, outcome in facts.engines.items():
        yield from _of_one(facts, name, outcome)
    if not facts.gpus and not facts.expects_gpu:
        yield unknown(
            "engine.gpu",
            "How events, pinned memory and an engine do on a GPU: there is none here",
            "They are tried where there is one.",
        )


def _of_one(facts: Facts, name: str, outcome: Outcome) -> Iterator[Finding]:
    if not outcome.has_answered:
        # Without a driver there is nothing to try, and a finding says so.
        if name == "host" or facts.driver.has_answered:
            yield _failed(name, outcome)
        return
    value = outcome.value
    if outcome.ending is not Ending.ANSWERED:
        yield _failed(name, outcome)
    if value["event_us"] > EVENT_US_MAX:
        yield warning(
            "engine.event",
            f"{name}: an event of an idle stream is seen after {value['event_us']:,.0f} µs",
            "Every batch waits as long before its answer is noticed.",
            "Look for others that use the device or the cores (nvidia-smi, top), and at the clocks",
        )
    if value.get("module_loading") == "eager":
        yield warning(
            "cuda.lazy_loading",
            f"{name}: CUDA loads every kernel of every library at once",
            "That takes time, and hundreds of MiB of memory on the GPU and the host.",
            "export CUDA_MODULE_LOADING=LAZY",
        )
    yield _engine(name, value)


def _failed(name: str, outcome: Outcome) -> Finding:
    verb = {Ending.HUNG: "hangs", Ending.CRASHED: "crashes"}.get(outcome.ending, "fails")
    return error(
        "engine.failed",
        f"A minimal engine on {name} {verb}: {outcome.said}",
        "Nothing can be served on this device as things are.",
        "Mend what is found above first. If nothing is, please report it with this output",
    )


def _engine(name: str, value: dict[str, Any]) -> Finding:
    engine = value["engine"]
    if not engine["is_right"]:
        return error(
            "engine.wrong",
            f"{name}: a minimal engine gave a wrong answer",
            "Nothing that this device computes can be trusted.",
            "Look at the GPU's memory errors (nvidia-smi -q -d ECC), and have it examined",
        )
    return ok(
        "engine",
        f"{name}: event seen after {value['event_us']:.1f} µs; 64 MiB of staging memory; an engine opened in "
        f"{engine['open_ms']:.0f} ms and answered in {engine['answer_ms']:.1f} ms",
    )
