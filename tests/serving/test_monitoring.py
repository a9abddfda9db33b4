"""The dashboard and the alert rules under examples/: what they ask for is what a server exports."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.support import WAIT_S, connected, request, serving
from tests.serving.test_http import infer

FOLDER = Path(__file__).parent.parent.parent / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
RULES = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
QUERIES = {
    **{
        f"{panel['title']} {one['refId']}": one["expr"]
        for panel in DASHBOARD["panels"]
        for one in panel["targets"]
    },
    **{rule["alert"]: rule["expr"] for rule in RULES},
    "models": DASHBOARD["templating"]["list"][1]["query"],
}
NAME = re.compile(r"\b(?:asynctrt|nv|process|python)_\w+")
MATCHER = re.compile(r"(\w+)\s*=~?\s*\"([^\"]*)\"")


async def exported(monkeypatch):
    """The labels of each sample that a server has once it was sampled, by its name."""
    monkeypatch.setattr("asynctrt.serving.server.SAMPLE_S", 0.15)
    async with serving() as server, connected(server) as raw, asyncio.timeout(WAIT_S):
        raw.send(infer(1))
        assert (await raw.answer())[0] == 200
        text = ""
        while "asynctrt_busy_share{" not in text:
            raw.send(request("/metrics"))
            text = (await raw.answer())[2].decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser gives every counter a _total; Triton's have none in the text.
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            samples.setdefault(name, []).append(sample.labels)
    return samples


@pytest.mark.anyio
async def test_every_metric_and_label_that_is_asked_for_is_there(monkeypatch):
    samples = await exported(monkeypatch)
    for title, query in QUERIES.items():
        if title == "AsynctrtGone":
            assert query.startswith("up{")  # That is Prometheus's own.
            continue
        names = NAME.findall(query)
        assert names, title
        for name in names:
            assert name in samples, f"{title}: {name}"
        labels = {label for name in names for known in samples.get(name, ()) for label in known}
        grouped = {
            label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")
        }
        assert grouped <= labels | {"instance"}, title
        for label, pattern in MATCHER.findall(query):
            values = {known.get(label) for name in names for known in samples.get(name, ())}
            if pattern != "$model":
                assert set(pattern.split("|")) <= values, f"{title}: {label}"


def test_the_rules_are_whole():
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 5
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_panels_do_not_overlap():
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in DASHBOARD["panels"]})
