"""Define the command line. The only importer of ``typer``."""

import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import anyio

import asynctrt
from asynctrt._util.process import DEVICE_LOST, INTERRUPTED
from asynctrt._util.synonyms import ALL_SYNONYMS, SHORT_FLAGS, nearest_name
from asynctrt._util.validation import REMOVED_OPTIONS, docs_of, printable, removed, seconds_of
from asynctrt.backends.build_options import BuildOptions
from asynctrt.backends.tensorrt.signatures import VARIABLE as ALLOWED_SIGNERS
from asynctrt.cli import demo as demonstration
from asynctrt.cli.environment import check_values, misspelt
from asynctrt.doctor import TIMEOUT_S as DOCTOR_TIMEOUT_S
from asynctrt.doctor import Level, diagnose
from asynctrt.errors import AsynctrtError, DeviceLostError, MissingExtraError, UsageError
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.options import Options
from asynctrt.plans.opened import open_file
from asynctrt.plans.plan_file import find_plan
from asynctrt.plans.text import lines_of_opened, lines_of_plan
from asynctrt.serving.settings import ServerSettings

try:
    import typer
    import typer.core
    from rich.console import Console, ConsoleOptions, RenderHook
    from rich.markup import escape
    from rich.segment import Segment

    from asynctrt.cli.build_terminal import build_bar
except ImportError as error:
    raise MissingExtraError("the command line needs typer and rich: pip install 'asynctrt[cli]'") from error

LEVEL_STYLES: Final = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.ERROR: "bold red",
}
"""Styles for the first line of the doctor's findings."""

REMOVED: Final = {
    "bench": "Use `asynctrt load MODEL --sweep callers=1,32,256`.",
    "keys": "Make keys with `ssh-keygen -t ed25519`, and list the trusted ones in an allowed-signers file.",
    "sign": "Use `ssh-keygen -Y sign -n asynctrt -f KEY PLAN`.",
    "verify": "Use `ssh-keygen -Y verify -n asynctrt -f ALLOWED_SIGNERS -I NAME -s PLAN.sig < PLAN`.",
    "env": "A flag of `asynctrt serve` is also a variable: --http-port is ASYNCTRT_SERVE_HTTP_PORT.",
    "simulate": "Use `asynctrt load`, which measures the engine itself.",
}
"""Removed commands, with their replacements."""


def _seconds(given: Any) -> float:
    """Return a number of seconds, from a number or from a time such as 30s or 2ms."""
    try:
        return float(given)
    except ValueError:
        try:
            return seconds_of(given)
        except ValueError:
            raise typer.BadParameter(
                f"{given!r} is not a number of seconds, nor a time such as 2ms, 30s or 1m30s"
            ) from None


def _time_option(text: str) -> Any:
    """Return a flag for a time."""
    return typer.Option(parser=_seconds, metavar="<seconds>", help=text)


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="A model behind await: batching inference for asyncio.",
    rich_markup_mode=None,
)


class _Harmless(RenderHook):
    """A hook that keeps printed text from controlling the terminal, except for the console's own styles."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Cleaned(one) for one in renderables]


class _Cleaned:
    def __init__(self, what: Any) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._what, options):
            text = segment.text if segment.control else printable(segment.text, keep="\n\t")
            yield segment._replace(text=text)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    console.push_render_hook(_Harmless())
    return console


out = _console()
err = _console(stderr=True)


def _say(line: str, style: str | None = None) -> None:
    out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


class _Command(typer.core.TyperCommand):
    """A command that suggests its flags for other programs' names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Compare names: depending on typer's version, the class is from click or from typer's copy of it.
            if type(error).__name__ == "NoSuchOption":
                _suggest(error, [name for item in self.params if (name := item.name)])
            raise


def _suggest(error: Any, names: list[str]) -> None:
    """Make the error for an unknown flag suggest the flag that is meant, not one that only looks similar."""
    given = error.option_name.lstrip("-").removeprefix("no-").replace("-", "_")
    if given in REMOVED_OPTIONS:
        error.message += f". T{removed(given)[1:]}"
        error.possibilities = []
        return
    meant = nearest_name(given, names, ALL_SYNONYMS | SHORT_FLAGS)
    error.possibilities = [_flag_of(meant)] if meant else []


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add(
    function: Callable[..., None],
    *examples: str,
    flags: Iterable[inspect.Parameter] = (),
    settings: Iterable[type] = (),
    **more: Any,
) -> None:
    """Add a command of the function's name.

    :param examples: lines for the end of its help, which fit 80 columns.
    :param flags: its parameters, if the function takes them by name.
    :param settings: classes whose fields are more of its flags.
    """
    if flags:
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        fields = (flag for cls in settings for flag in _field_flags(cls))
        signature = inspect.Signature([context, *flags, *fields])
        function.__signature__ = signature  # type: ignore[attr-defined]  # Typer reads it.
    epilog = "\n\n".join(["Examples:", *examples])
    app.command(function.__name__.lstrip("_"), cls=_Command, epilog=epilog, **more)(function)


def main() -> None:
    """Run the command. Show an asynctrt error as its message, without a traceback."""
    try:
        command = "".join(sys.argv[1:2])
        if command in REMOVED:
            raise UsageError(f"`asynctrt {command}` was removed. {REMOVED[command]}")
        app()
    except AsynctrtError as error:
        err.print(
            f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"asynctrt {asynctrt.__version__}", highlight=False)
        raise typer.Exit


def _demo(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Use the files in this folder. Default: Python's standard library.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    seconds: Annotated[float, _time_option("How long each way is measured.")] = 2.5,
) -> None:
    """Show in a minute what asynctrt is for.

    First, up to 500 files are identified with the ONNX model of magika. On their bytes, the engine is then
    measured beside a good batcher by hand: under plain load, overload, with callers who leave, with poison,
    beside other work, and on shutdown. Ctrl-C ends it at any time.
    """

    def note(text: str) -> None:
        if err.is_terminal:
            err.file.write(f"\r{text:<60.60}\r")
            err.file.flush()

    def say(text: str) -> None:
        note("")
        out.print(text, highlight=False, markup=False)

    # Before there is a loop, Ctrl-C ends the search at once.
    files = demonstration.find_files((folder,) if folder else demonstration.default_folders())
    course = demonstration.Course(files, seconds, say, note)
    was_interrupted = _run(course.run)
    note("")
    _end(was_interrupted)


_add(_demo, "asynctrt demo", "asynctrt demo ~/Downloads --seconds 10")


def _doctor(
    device: Annotated[
        str | None,
        typer.Option(help="The device that has to work, host or cuda:0."),
    ] = None,
    timeout: Annotated[float, _time_option("How long each probe may take.")] = DOCTOR_TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Examine this machine, and say what to do about each finding.

    It looks at the driver, packages and engines. Whatever may crash or hang is tried in a child process.
    The exit status is 0 without errors, even with warnings, and 3 with errors.
    """
    with err.status("Examining this machine"):
        report = diagnose(device, timeout=timeout)
    if as_json:
        out.print_json(json.dumps(report.as_json()))
    else:
        for level, line in report.lines():
            is_first = line[:1] not in ("", " ")
            _say(line, LEVEL_STYLES[level] if level and is_first else None)
    raise typer.Exit(report.status)


_add(_doctor, "asynctrt doctor", "asynctrt doctor --device cuda:0 && asynctrt serve ...")


def _inspect(
    file: Annotated[str, typer.Argument(help="A TensorRT plan or an ONNX model.", show_default=False)],
    *,
    open_it: Annotated[
        bool,
        typer.Option("--open", help="Open a plan with its runtime. That runs its code: trust it first."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Where to open it. Default: cuda:0 for a plan, or host.")
    ] = None,
    tensorrt: Annotated[
        list[str] | None, typer.Option(help="How a plan is opened: NAME=VALUE, once for each.")
    ] = None,
    onnx: Annotated[
        list[str] | None, typer.Option(help="How an ONNX model is opened: NAME=VALUE, once for each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show a model's tensors, versions, sizes, weights and batching.

    An ONNX model is opened. A plan is run only with --open; if opening fails, the error is shown with all
    else that is known. The exit status is 1 if the file cannot be read or opened.
    """
    path = Path(file)
    options = Options(tensorrt=tensorrt, onnx=onnx)  # type: ignore[arg-type]  # Their checks convert them.
    found = find_plan(path)
    opened, refusal = None, None
    if open_it or found is None:
        try:
            opened = open_file(path, device, options=options)
        except AsynctrtError as error:
            refusal = error
    if as_json:
        said = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        told = opened and dataclasses.asdict(opened)
        report = {"file": found and dataclasses.asdict(found), "opened": told, "refused": said}
        out.print_json(json.dumps(report))
    else:
        for line in (*(lines_of_plan(found) if found else ()), *(lines_of_opened(opened) if opened else ())):
            _say(line)
        if refusal is not None:
            raise refusal
    if refusal is not None:
        raise typer.Exit(1)


_add(_inspect, "asynctrt inspect model.onnx", "asynctrt inspect model.plan --open")


def _serve(ctx: typer.Context, **given: Any) -> None:
    """Serve models over HTTP, gRPC and websockets, with a dashboard.

    It speaks KServe V2 and plain JSON. MODEL is PATH, NAME=PATH or NAME:VERSION=PATH, where PATH is an .onnx
    file, a TensorRT plan or module:attribute (a model, an engine, a pipeline, a @batch function, or a
    function that makes one); or a folder of models in Triton's layout, NAME/VERSION/model.onnx or model.plan,
    each model with a config.pbtxt if it needs one.

    A setting is a flag, an environment variable (--http-port is ASYNCTRT_SERVE_HTTP_PORT), or a name in the
    TOML file of --config (http_port). Flags win over the environment, which wins over the file. Models with
    separate options are tables of the file, [[models]], each with a path.

    Times are in seconds, or have a unit: 0.5, 500ms, 1m30s.
    """
    # They need the extra `serve`, which the other commands do not.
    from asynctrt.serving import command, fronts, line_writer  # noqa: PLC0415

    check_values(os.environ, _variables())
    settings = {name: value for name, value in given.items() if _is_given(ctx, name)}
    path = settings.pop("config", None)
    config = command.configure(settings, command.read_config(path) if path else {})
    config = dataclasses.replace(config, notes=tuple(misspelt(os.environ, _variables())))

    writer = line_writer.standard_error()

    def say(line: str) -> None:
        if writer is None:
            err.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            writer.put(f"{printable(line)}\n".encode())

    job = command.check if given["check"] else fronts.serve
    try:
        was_interrupted = _run(lambda: job(config, say))
    except DeviceLostError as error:
        say(f"error: {error}")
        raise typer.Exit(DEVICE_LOST) from error
    finally:
        if writer is not None:
            writer.flush()
    if was_interrupted:
        raise typer.Exit(INTERRUPTED)


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether the user gave a parameter, as a flag or in the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _field_flags(cls: type[Any]) -> list[inspect.Parameter]:
    """Return a flag for each field of a settings class, with the field's documentation as its help."""
    kinds, texts = get_type_hints(cls), docs_of(cls)
    flags = []
    for item in dataclasses.fields(cls):
        kind, default = kinds[item.name], item.default
        if get_origin(kind) is tuple or any(
            get_origin(part) in (Mapping, Iterable) for part in get_args(kind)
        ):
            kind, default = list[str] | None, None
        elif str in get_args(kind):
            kind = str | None  # A rate, for example, may be a number or a text.
        check = item.metadata["check"]
        is_time = check is not None and "of seconds" in check.expected
        flags.append(_flag(item.name, kind, default, texts[item.name], is_time=is_time))
    return flags


def _flag(
    name: str, kind: Any, default: Any, text: str, *, is_time: bool = False, envvar: str | None = None
) -> inspect.Parameter:
    """Return a flag of a command.

    :param is_time: whether its value is a number of seconds, or a time with a unit.
    """
    # Name a flag that is off by default explicitly, so that typer adds no --no- form.
    names = [_flag_of(name)] if default is False else []
    info = typer.Option(
        *names,
        help=text,
        envvar=envvar,
        show_envvar=False,
        show_default=default is not None and default is not False,
        metavar="<seconds>" if is_time else None,
        parser=_seconds if is_time else None,
    )
    return _parameter(name, kind, default, info)


def _argument(
    name: str, metavar: str, text: str, kind: Any = str, default: Any = inspect.Parameter.empty, **more: Any
) -> inspect.Parameter:
    info = typer.Argument(metavar=metavar, help=text, show_envvar=False, show_default=False, **more)
    return _parameter(name, kind, default, info)


def _parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


_add(
    _serve,
    "asynctrt serve model.onnx --max-rows 32 --max-delay 0.002",
    "asynctrt serve classifier=model.plan --device cuda:0 --tokens-file tokens",
    "asynctrt serve models/ --model-control --check",
    flags=(
        _argument(
            "models",
            "MODEL",
            "The models to serve. Also ASYNCTRT_SERVE_MODELS, with spaces between them.",
            list[str] | None,
            None,
            envvar="ASYNCTRT_SERVE_MODELS",
        ),
        _flag("config", Path | None, None, "A TOML file of settings and models."),
        _flag("device", str, "host", "The device that models run on."),
        _flag("check", bool, False, "Load everything, say whether it could be served, and exit: 0 or 1."),
    ),
    settings=(ServerSettings, Options),
    context_settings={"auto_envvar_prefix": "ASYNCTRT_SERVE"},
)


def _build(ctx: typer.Context, model: str, **given: Any) -> None:
    """Build a TensorRT plan from an ONNX model.

    A manifest is written beside it: PLAN.json. Profiles are proposed from --max-rows and --dims, or given:
    --profiles input=1x3x224x224:16x3x224x224:64x3x224x224. TensorRT for RTX builds without a GPU. Ctrl-C ends
    the build.
    """
    from asynctrt.plans.building import build  # noqa: PLC0415  (few commands need it)
    from asynctrt.plans.text import lines_of_manifest  # noqa: PLC0415

    settings = {name: value for name, value in given.items() if _is_given(ctx, name)}
    files = {name: settings.pop(name, None) for name in ("plan", "device")}
    if "verbosity" in settings:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("asynctrt").setLevel(settings["verbosity"])
    try:
        with build_bar(err) as progress:
            built = build(model, progress=progress, **files, **settings)
    except KeyboardInterrupt as error:
        err.print("[yellow]Interrupted: nothing was written.[/]")
        raise typer.Exit(INTERRUPTED) from error
    _say(f"written       {built.path}")
    for line in lines_of_manifest(built.manifest):
        _say(line)


_add(
    _build,
    "asynctrt build model.onnx -o model.plan --dims length=1:128:512",
    flags=(
        _argument("model", "MODEL", "The .onnx file."),
        _parameter(
            "plan",
            Path | None,
            None,
            typer.Option("--output", "-o", help="Where to write the plan. Default: MODEL.plan"),
        ),
        _flag("device", str | None, None, "The GPU to build on, such as cuda:0."),
    ),
    settings=(BuildOptions,),
)


def _load(ctx: typer.Context, target: str, **given: Any) -> None:
    """Measure the throughput and latency of a model or a server.

    TARGET is a model to open, model.onnx or module:attribute; a server's model,
    http://HOST:PORT/v2/models/NAME, grpc://HOST:PORT/NAME or ws://HOST:PORT/v2/models/NAME/ws. For any other
    address, http://HOST:PORT/PATH or ws://HOST:PORT/PATH, --body says what to send; a coroutine function,
    module:function, is called.

    Times are in seconds, or have a unit: 0.5, 500ms, 1m30s.

    The exit status is 3 if an --slo is missed or most requests failed, 4 if the figures are void because the
    load generator was the bottleneck, and 5 if there were too few requests to judge an --slo.
    """
    # They need the extra `load`, which the other commands do not.
    from asynctrt.loadtest import command, terminal  # noqa: PLC0415

    settings = {name: value for name, value in given.items() if _is_given(ctx, name)}
    planned = command.plan(target, settings)
    reports: list[Any] = []

    async def measure() -> None:
        with terminal.LiveView(err, f"asynctrt load {target}") as view:
            reports.append(await command.load(planned, view.watch))

    if _run(measure):
        err.print("[yellow]Interrupted before anything was measured.[/]")
        raise typer.Exit(INTERRUPTED)
    (report,) = reports
    shown_on = err if planned.prints_json else out
    try:
        terminal.show(shown_on, report)
    finally:  # What reads the figures may have ended, as head does.
        written = command.write(planned, report)
    for path in written:
        err.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
    if not report.complete and not report.void:
        _end(was_interrupted=True)
    raise typer.Exit(command.exit_status(report))


LOAD_TOKEN: Final = "ASYNCTRT_LOAD_TOKEN"  # noqa: S105  (a variable's name, not a secret)

LOAD_FLAGS: Final = (
    ("device", str, "host", "The device of a model that is opened for the test."),
    ("body", str | None, None, "What to send to a server without KServe: JSON or text with ${input}; @FILE."),
    ("header", list[str] | None, None, "A header of every request, over gRPC metadata: 'Name: value'."),
    ("method", str | None, None, "The method of HTTP. Default: POST with a --body, else GET."),
    (
        "until_message",
        str | None,
        None,
        "What tells the last message of a websocket's answer: 3, done=true, /regex/ or a text. Default: 1.",
    ),
    ("ca", Path | None, None, "PEM certificates to trust over TLS, instead of the system's."),
    ("cert", Path | None, None, "The client's certificate over TLS, as PEM, for servers that ask for one."),
    ("key", Path | None, None, "Its key as PEM. Default: it is in --cert."),
    ("insecure", bool, False, "Do not check the server's certificate."),
    (
        "sweep",
        list[str] | None,
        None,
        "Try each value: rate=100,200, or doubling, callers=1:64. Several sweeps are combined.",
    ),
    ("search", bool, False, "Find the highest rate that meets the --slo, to within 5%."),
    ("json", Path | None, None, "Write the report to this file as JSON; - is standard output."),
    ("report", Path | None, None, "Write the report to this file: .html with charts, or .csv."),
)
"""Flags of ``load`` besides the settings of a load test and of an engine."""


_add(
    _load,
    "asynctrt load model.onnx --callers 64 --seconds 30",
    "asynctrt load http://127.0.0.1:8000/v2/models/m --rate 500 --slo 'p99<20ms'",
    "asynctrt load model.onnx --search --slo 'p99<20ms' --json -",
    flags=(
        _argument("target", "TARGET", "The model or server to measure."),
        _flag("token", str | None, None, f"The server's bearer token. Also {LOAD_TOKEN}.", envvar=LOAD_TOKEN),
        *(_flag(*flag) for flag in LOAD_FLAGS),
    ),
    settings=(LoadSettings, Options),
)


def _compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The first report.", show_default=False)],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The second report.", show_default=False)],
    fail_if: Annotated[
        list[str] | None, typer.Option(help="Exit with status 3 if this is true of B: 'p99>+10%'.")
    ] = None,
) -> None:
    """Compare two reports that asynctrt load wrote with --json.

    If a report has several runs, as a sweep has, the means over all of them are compared.
    """
    from asynctrt.loadtest import command, comparing, terminal  # noqa: PLC0415

    reports = [command.read_report(path) for path in (before, after)]
    terminal.show_lines(out, comparing.differences(*reports), str(before), str(after))
    failed, not_checked = comparing.gate(fail_if or (), *reports)
    for why in failed:
        err.print(f"[bold red]Failed[/]: {escape(why)}", highlight=False, soft_wrap=True)
    for why in not_checked:
        err.print(f"[bold yellow]Not judged[/]: {escape(why)}", highlight=False, soft_wrap=True)
    raise typer.Exit(command.NOT_GOOD if failed else command.UNJUDGED if not_checked else 0)


_add(_compare, "asynctrt compare before.json after.json --fail-if 'p99>+10%'")


def _variables() -> list[str]:
    """Return the environment variables that set something."""
    flags = [name for name in inspect.signature(_serve).parameters if name not in ("ctx", "check")]
    return [f"ASYNCTRT_SERVE_{name.upper()}" for name in flags] + [LOAD_TOKEN, ALLOWED_SIGNERS]


def _run(job: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    """Run a job on a new event loop; return whether Ctrl-C interrupted it. The job still cleans up."""
    try:
        anyio.run(job, backend="asyncio", backend_options={"use_uvloop": True})
    except KeyboardInterrupt:
        return True
    except ExceptionGroup as group:
        # Many callers failed in the same way, so report only the first error.
        error: Exception | None = group.subgroup(AsynctrtError)
        if error is None:
            raise
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group
    return False


def _end(was_interrupted: bool) -> None:
    if was_interrupted:
        err.print("[yellow]Interrupted: only what was measured until then is shown.[/]")
        raise typer.Exit(INTERRUPTED)
