"""examples/deploy/: each file is valid, they agree with each other, and what they say to run is run."""

import base64
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import yaml

import asynctrt
from asynctrt.serving.command import configure
from asynctrt.serving.settings import ServerSettings
from tests.helpers import free_port, installed, needed
from tests.models import double_onnx, scale_onnx

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "deploy"
WAIT_S = 40
CLOSING_S = 5
"""What a grace period has to allow for after the server's own limits."""

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(90)]
DEPLOYMENT, SERVICE, HPA, RUNTIME, INFERENCE, COMPOSE, ADAPTER, BUDGET, POLICY, MONITOR, TOKENS = (
    yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for name in (
        *("deployment", "service", "hpa", "kserve-runtime"),
        *("kserve-service", "compose", "prometheus-adapter"),
        *("pdb", "networkpolicy", "servicemonitor", "tokens"),
    )
)
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(KSERVE,) = RUNTIME["spec"]["containers"]


def dockerfile():
    """The instructions of the Dockerfile, and its last stage's by name."""
    needed(find_spec("dockerfile_parse"), "dockerfile-parse is missing: pip install '.[deploy]'")
    from dockerfile_parse import DockerfileParser

    parsed = DockerfileParser(fileobj=io.BytesIO((FOLDER / "Dockerfile").read_bytes())).structure
    steps = [(one["instruction"], one["value"]) for one in parsed if one["instruction"] != "COMMENT"]
    last = max(number for number, (name, _) in enumerate(steps) if name == "FROM")
    return steps, dict(steps[last:])


def image_command():
    _, last = dockerfile()
    assert json.loads(last["ENTRYPOINT"]) == ["asynctrt"]
    return json.loads(last["CMD"])


def image_environment():
    """What ENV sets, but the PATH."""
    _, last = dockerfile()
    found = dict(item.split("=", 1) for item in shlex.split(last["ENV"].replace("\\\n", " ")))
    assert found.pop("PATH").startswith("/opt/asynctrt/bin:")
    return found


def settings_of(arguments):
    """The server's settings by a container's arguments, as `asynctrt serve` has them."""
    names = {name.replace("_", "-"): name for name in ServerSettings.__dataclass_fields__}
    given = {}
    for flag, value in pairs(arguments[2:]):
        name = names.get(flag, flag)
        given.setdefault(name, []).append(value)
    known = {
        name: tuple(values)
        if name == "allow_hosts"
        else float(values[0])
        if name in ("drain_delay", "drain_timeout")
        else values[0]
        for name, values in given.items()
    }
    known |= {name: int(known[name]) for name in known if name.endswith("_port")}
    return configure({**known, "models": ["module:attribute"]}, {}).settings


def pairs(arguments):
    """Yield flags and their values, of ``--flag=value`` and ``--flag value``."""
    left = iter(arguments)
    for one in left:
        assert one.startswith("--"), one
        flag, equals, value = one[2:].partition("=")
        yield flag, value if equals else next(left)


class TestValid:
    @pytest.mark.parametrize("version", ["1.30", "1.37"])
    @pytest.mark.parametrize(
        "manifest", [DEPLOYMENT, SERVICE, HPA, BUDGET, POLICY], ids=lambda one: one["kind"]
    )
    def test_kubernetes(self, manifest, version):
        validate_kubernetes(manifest, version)

    @pytest.mark.parametrize("version", ["1.30", "1.37"])
    def test_the_containers_of_the_runtime_are_those_of_a_pod(self, version):
        spec = {name: RUNTIME["spec"][name] for name in ("containers", "volumes")}
        validate_kubernetes(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, version
        )

    @pytest.mark.parametrize("version", ["1.30", "1.37"])
    def test_a_patch_gives_the_pods_their_tokens(self, version):
        patched, tokens = json.loads(json.dumps([DEPLOYMENT, TOKENS]))
        pod, patch = patched["spec"]["template"]["spec"], tokens["spec"]["template"]["spec"]
        (added,) = patch["containers"]
        assert added.pop("name") == CONTAINER["name"]
        pod["volumes"] += patch["volumes"]
        for name, items in added.items():
            pod["containers"][0][name] = pod["containers"][0].get(name, []) + items
        validate_kubernetes(patched, version)
        (variable,) = added["env"]
        assert variable["name"].removeprefix("ASYNCTRT_SERVE_").lower() in ServerSettings.__dataclass_fields__
        assert Path(variable["value"]).parent == Path(added["volumeMounts"][0]["mountPath"])
        assert f"--from-file={Path(variable['value']).name}" in (FOLDER / "tokens.yaml").read_text()

    def test_compose(self):
        for service in COMPOSE["services"].values():
            assert (FOLDER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).is_file()

    def test_everything_is_tried(self):
        names = {
            *("Dockerfile", "Dockerfile.dockerignore", "compose.yaml", "deployment.yaml", "service.yaml")
        }
        names |= {
            "asynctrt.service",
            "asynctrt.socket",
            "hpa.yaml",
            "kserve-runtime.yaml",
            "kserve-service.yaml",
            "nginx.conf",
            "prometheus-adapter.yaml",
            "pdb.yaml",
            "networkpolicy.yaml",
            "servicemonitor.yaml",
            "tokens.yaml",
        }
        assert {path.name for path in FOLDER.iterdir() if path.is_file()} == names


def validate_kubernetes(manifest, version):
    needed(find_spec("kubernetes_validate"), "kubernetes-validate is missing: pip install '.[deploy]'")
    import kubernetes_validate

    kubernetes_validate.validate(manifest, version, strict=True)


class TestTheDockerfile:
    def test_what_it_copies_is_there_and_reaches_the_build(self, tmp_path):
        """A wheel is built from nothing but what COPY takes, as in the image."""
        steps, _ = dockerfile()
        ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        for name, value in steps:
            *sources, target = value.split()
            if name != "COPY" or sources[0].startswith("--from"):
                continue
            for source in sources:
                assert f"!{source}" in ignored
                place = tmp_path / target if source != target and target != "./" else tmp_path / source
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, place)
        needed(find_spec("hatchling"), "hatchling is missing: pip install -e '.[dev]'")
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list((tmp_path / "dist").glob("asynctrt-*.whl"))

    def test_its_extras_are_there(self):
        steps, _ = dockerfile()
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = dict(value.split("=") for name, value in steps if name == "ARG" and "=" in value)
        assert set(named["EXTRAS"].split(",")) <= set(extras)
        for line in re.findall(r"EXTRAS=([\w,]+)", (FOLDER / "Dockerfile").read_text()):
            assert set(line.rstrip(",").split(",")) <= set(extras)

    def test_the_base_is_an_argument_and_the_user_is_not_root(self):
        steps, last = dockerfile()
        assert steps[0] == ("ARG", "BASE=nvidia/cuda:13.0.1-base-ubuntu24.04")
        assert [value for name, value in steps if name == "FROM"] == ["${BASE} AS build", "${BASE}"]
        assert last["USER"] == "10001:10001"
        assert last["STOPSIGNAL"] == "SIGTERM"
        assert {POD["securityContext"]["runAsUser"], KSERVE["securityContext"]["runAsUser"]} == {10001}


class TestTheyAgree:
    def test_ports(self):
        settings = settings_of(CONTAINER["args"])
        ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
        assert ports == {
            "http": settings.http_port,
            "grpc": settings.grpc_port,
            "metrics": settings.metrics_port,
        }
        assert {port["targetPort"] for port in SERVICE["spec"]["ports"]} == set(ports)
        annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
        assert int(annotations["prometheus.io/port"]) == settings.metrics_port
        _, last = dockerfile()
        image = settings_of(image_command())
        assert last["EXPOSE"].split() == [str(image.http_port), str(image.grpc_port), str(image.metrics_port)]
        (service,) = COMPOSE["services"].values()
        assert {port.split(":")[2] for port in service["ports"]} == set(last["EXPOSE"].split())
        runtime = settings_of(KSERVE["args"])
        assert [port["containerPort"] for port in KSERVE["ports"]] == [runtime.http_port]
        assert int(RUNTIME["spec"]["annotations"]["prometheus.kserve.io/port"]) == runtime.metrics_port

    def test_labels_and_names(self):
        labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
        assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
        for selector in (BUDGET["spec"]["selector"], POLICY["spec"]["podSelector"]):
            assert selector["matchLabels"] == labels
        assert MONITOR["spec"]["selector"]["matchLabels"] == SERVICE["metadata"]["labels"]
        target = HPA["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])
        hosts = settings_of(CONTAINER["args"]).allow_hosts
        assert SERVICE["metadata"]["name"] in hosts
        assert list(COMPOSE["services"]) == list(
            settings_of(COMPOSE["services"]["asynctrt"]["command"]).allow_hosts
        )
        model = INFERENCE["spec"]["predictor"]["model"]
        assert model["runtime"] == RUNTIME["metadata"]["name"]
        assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
        assert model["modelFormat"]["name"] in {
            one["name"] for one in RUNTIME["spec"]["supportedModelFormats"]
        }
        names = {one["pods"]["metric"]["name"] for one in HPA["spec"]["metrics"]}
        (rule,) = ADAPTER["rules"]["custom"]
        assert all(re.search(rf'[|"]{name}[|"]', rule["seriesQuery"]) for name in names)

    def test_the_ports_of_the_policy_and_the_monitor(self):
        named = {port["name"] for port in CONTAINER["ports"]}
        assert {port["port"] for rule in POLICY["spec"]["ingress"] for port in rule["ports"]} == named
        (endpoint,) = MONITOR["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in SERVICE["spec"]["ports"]}
        annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
        assert endpoint["path"] == annotations["prometheus.io/path"]

    def test_images_are_of_this_version(self):
        (service,) = COMPOSE["services"].values()
        wanted = f"asynctrt:{asynctrt.__version__}"
        assert {CONTAINER["image"], KSERVE["image"], service["image"]} == {wanted}
        for path in (FOLDER / "Dockerfile", ROOT / "docs" / "deploying.md"):
            assert f"-t {wanted} ." in path.read_text()

    def test_an_update_of_a_single_pod_is_no_outage(self):
        assert HPA["spec"]["minReplicas"] == 1
        rolling = DEPLOYMENT["spec"]["strategy"]["rollingUpdate"]
        assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (1, 0)

    def test_grace_periods_are_longer_than_the_drain(self):
        (service,) = COMPOSE["services"].values()
        stop_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
        for arguments, before_s, grace_s in (
            (CONTAINER["args"], stop_s, POD["terminationGracePeriodSeconds"]),
            (KSERVE["args"], 0, INFERENCE["spec"]["predictor"]["terminationGracePeriodSeconds"]),
            (service["command"], 0, int(service["stop_grace_period"].removesuffix("s"))),
        ):
            settings = settings_of(arguments)
            assert before_s + settings.drain_delay + settings.drain_timeout + CLOSING_S <= grace_s

    def test_mounts_are_of_volumes_and_nothing_else_is_written(self):
        for container, volumes in ((CONTAINER, POD["volumes"]), (KSERVE, RUNTIME["spec"]["volumes"])):
            assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in volumes}
            assert container["securityContext"]["readOnlyRootFilesystem"]
            writable = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert writable == {"/tmp"}
        environment = image_environment()
        assert all(value.startswith("/tmp") for value in (environment["HOME"], environment["XDG_CACHE_HOME"]))


RUN = {
    "Dockerfile": SimpleNamespace(arguments=image_command, container=None, grace_s=40),
    "compose": SimpleNamespace(
        arguments=lambda: COMPOSE["services"]["asynctrt"]["command"], container=None, grace_s=40
    ),
    "Deployment": SimpleNamespace(arguments=lambda: CONTAINER["args"], container=CONTAINER, grace_s=40),
    "ServingRuntime": SimpleNamespace(arguments=lambda: KSERVE["args"], container=KSERVE, grace_s=35),
}


@contextmanager
def served(arguments, folder):
    """Run a container's arguments here: with other ports, models of this folder, and without a GPU."""
    given = list(pairs(arguments[2:]))
    assert arguments[:2] == ["serve", "/mnt/models"]
    assert ("device", "cuda:0") in given
    assert ("host", "0.0.0.0") in given
    settings = settings_of(arguments)
    ports = {getattr(settings, f"{name}_port"): free_port() for name in ("http", "grpc", "metrics")}
    given = [(flag, value) for flag, value in given if not flag.endswith("-port") and flag != "device"]
    given += [("device", "host"), ("http-port", str(ports[settings.http_port]))]
    given += [("grpc-port", str(ports[settings.grpc_port]))]
    given += [("metrics-port", str(ports[settings.metrics_port]))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {
        name: value.replace("/tmp", str(folder / "tmp"), 1) for name, value in image_environment().items()
    }
    (folder / "tmp").mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "asynctrt", "serve", str(folder / "models")),
            *(text for flag, value in given for text in (f"--{flag}", value)),
        ],
        cwd=folder / "tmp",
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    reader.start()
    try:
        yield process, ports, settings, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def ask(port, path, body=None, host=None):
    """Return the status and the body of an answer; 0 if nobody listens."""
    headers = {"Content-Type": "application/json"} | ({"Host": host} if host else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", data, headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except (URLError, ConnectionError):
        return 0, ""


def until(condition, lines):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "".join(lines)
        time.sleep(0.02)


def rows(count):
    data = [1.0] * 4 * count
    return {"inputs": [{"name": "input", "datatype": "FP32", "shape": [count, 4], "data": data}]}


def models_in(folder):
    """Two models in Triton's layout, one of which takes its time."""
    for name in ("double", "slow"):
        (folder / "models" / name / "1").mkdir(parents=True)
    double_onnx(folder / "models" / "double" / "1" / "model.onnx")
    scale_onnx(folder / "models" / "slow" / "1" / "model.onnx", 3, work=300)


@pytest.mark.parametrize("name", RUN)
def test_what_it_says_to_run_is_run(name, tmp_path):
    """Probes answer, hosts are accepted, the autoscaler's metrics are there, and SIGTERM drains."""
    one = RUN[name]
    arguments = one.arguments()
    models_in(tmp_path)
    with served(arguments, tmp_path) as (process, ports, settings, lines), ThreadPoolExecutor(4) as pool:
        http = ports[settings.http_port]
        if name == "Dockerfile":
            assert healthcheck(http) != 0
        for path, port in (
            probes(one.container) if one.container else [("/v2/health/ready", settings.http_port)]
        ):
            until(lambda path=path, port=port: ask(ports[port], path)[0] == 200, lines)
        if name == "Dockerfile":
            assert healthcheck(http) == 0
        for host in [None, *(("any.example" if host == "*" else host) for host in settings.allow_hosts)]:
            status, answer = ask(http, "/v2/models/double/infer", rows(2), host)
            assert status == 200, answer
            assert json.loads(answer)["outputs"][0]["data"] == [2.0] * 8
        if settings.allow_hosts != ("*",):
            assert ask(http, "/v2/models/double/infer", rows(1), "elsewhere.example")[0] == 403
        metrics = ports[settings.metrics_port]
        until(lambda: "asynctrt_busy_share{" in ask(metrics, "/metrics")[1], lines)
        known = ask(metrics, "/metrics")[1]
        for metric in HPA["spec"]["metrics"]:
            assert f"\n{metric['pods']['metric']['name']}{{" in known
        asked = [pool.submit(ask, http, "/v2/models/slow/infer", rows(64)) for _ in range(4)]
        until(lambda: are_taken(asked, metrics), lines)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        if settings.drain_delay:
            until(lambda: ask(http, "/v2/health/ready")[0] == 503, lines)
            assert ask(http, "/v2/health/live")[0] == 200
            assert ask(http, "/v2/models/double/infer", rows(1))[0] == 200
        assert [one.result(WAIT_S)[0] for one in asked] == [200] * 4
        assert process.wait(one.grace_s) == 0
        assert settings.drain_delay <= time.monotonic() - began < one.grace_s
        if name == "Dockerfile":
            assert healthcheck(http) != 0
    for line in lines:
        assert json.loads(line)["level"] in ("info", "warning"), line
    assert all(path.name == "cache" for path in (tmp_path / "tmp").iterdir())


def are_taken(asked, port):
    """Return whether a server has all of these requests, and computes one: it then answers them all."""
    done = sum(one.done() for one in asked)
    told = ask(port, "/metrics")[1]
    busy = re.search(r'^asynctrt_in_flight_batches\{model="slow",version="1"\} [1-9]', told, re.MULTILINE)
    (taken,) = re.findall(r"^asynctrt_server_requests_in_flight (\d+)", told, re.MULTILINE)
    return done == len(asked) or (busy and done + int(taken) == len(asked))


def probes(container):
    """Yield the path and the port of each probe of a container."""
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        http = container[kind]["httpGet"]
        yield http["path"], named.get(http["port"], http["port"])


def healthcheck(port):
    """Run the image's health check at this port, and return its status."""
    _, last = dockerfile()
    options, _, text = last["HEALTHCHECK"].partition("CMD ")
    assert fnmatch(options, "*--interval=* --timeout=* --start-period=*")
    python, *rest = json.loads(text)
    assert python == "python3"
    rest = [part.replace(":8000/", f":{port}/") for part in rest]
    return subprocess.run(
        [sys.executable, *rest], capture_output=True, check=False, timeout=WAIT_S
    ).returncode


def test_nginx_asks_for_a_password_and_passes_the_user_on(tmp_path):
    """The file as it is, but for the port and TLS; and the command of docs/deploying.md."""
    nginx = installed(Path("/usr/sbin/nginx"))
    port, front = free_port(), free_port()
    users = tmp_path / "users"
    users.write_text("alice:{PLAIN}secret\n")
    site = (FOLDER / "nginx.conf").read_text().replace("/etc/nginx/models.users", str(users))
    site = re.sub(r" *ssl_.*\n", "", site).replace("listen 443 ssl", f"listen 127.0.0.1:{front}")
    temporary = " ".join(
        f"{one}_temp_path {tmp_path}/{one};" for one in ("proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}/body; {temporary}\n"
        f"{site.replace('127.0.0.1:8000', f'127.0.0.1:{port}')}}}"
    )
    (command,) = re.findall(
        r"^asynctrt (serve .*X-User)$", (ROOT / "docs" / "deploying.md").read_text(), re.MULTILINE
    )
    model = str(double_onnx(tmp_path / "model.onnx"))
    arguments = [model if word == "model.onnx" else word for word in command.split()]
    server = [sys.executable, "-m", "asynctrt", *arguments, f"--http-port={port}", "--no-grpc"]
    with (
        subprocess.Popen(server) as served,
        subprocess.Popen([nginx, "-c", config, "-p", tmp_path]) as proxy,
    ):
        try:
            deadline = time.monotonic() + WAIT_S
            while (status := through_nginx(front, "alice:secret")[0]) != 200:
                assert time.monotonic() < deadline, status
                time.sleep(0.1)
            assert through_nginx(front, None)[0] == 401
            assert through_nginx(front, "alice:wrong")[0] == 401
            body = b'{"instances": [[1, 2, 3, 4]]}'
            origin = "https://models.example.com"
            answer = through_nginx(front, "alice:secret", "/v1/models/model:predict", body, origin)
            assert answer == (200, {"predictions": [[2.0, 4.0, 6.0, 8.0]]})
            other = through_nginx(
                front, "alice:secret", "/v1/models/model:predict", body, "https://evil.example"
            )
            assert other[0] == 403
        finally:
            served.terminate()
            proxy.terminate()


def through_nginx(port, user, path="/v2/models/model", body=None, origin=None):
    """Send a request as a client of models.example.com; return the status and the answer's JSON."""
    headers = {"Host": "models.example.com", "Content-Type": "application/json"}
    if user is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    if origin is not None:
        headers["Origin"] = origin
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", body, headers), timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, None
    except URLError:
        return 0, None
