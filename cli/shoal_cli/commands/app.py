"""The command tree. Each command is a module; it is imported when this one is, what it needs when
it runs.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from shoal_cli.commands import (
    bench_device,
    copy,
    describe,
    inspect,
    items,
    jobs,
    logs,
    partition,
    plan,
    report,
    run,
    standalone,
    targets,
    top,
    why,
)
from shoal_cli.commands.failures import INTERRUPTED, print_failure
from shoal_cli.commands.option_groups import with_options
from shoal_cli.commands.options import help_of
from shoal_protocol.interpreter import module_command

EPILOG = (
    "A first run:  shoal run model.onnx --inputs in --outputs out --devices 3 --budget 64Mi\n\n"
    "Completion:   shoal --install-completion"
)

app = typer.Typer(
    name="shoal",
    help="Run neural networks that fit on no single device: cut, placed and streamed over many.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_VERSIONED: Final = ("onnxruntime", "onnx", "grpcio", "protobuf", "numpy")
_EXTRA: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_RAW: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _add(command: Callable[..., None], **settings: Any) -> None:
    add = app.command(command.__name__.replace("_", "-"), help=help_of(command), **settings)
    add(with_options(command))


_add(run.run, no_args_is_help=True, epilog=run.EPILOG)
_add(partition.partition, no_args_is_help=True, epilog=partition.EPILOG)
_add(plan.plan, no_args_is_help=True, epilog=plan.EPILOG)
_add(report.report, no_args_is_help=True, epilog=report.EPILOG)
_add(bench_device.bench_device, no_args_is_help=True, epilog=bench_device.EPILOG)
_add(inspect.inspect, no_args_is_help=True, epilog=inspect.EPILOG)
_add(copy.copy, no_args_is_help=True, epilog=copy.EPILOG)
_add(standalone.coordinator, epilog=standalone.EPILOG, context_settings=_EXTRA)
_add(standalone.invite, epilog=standalone.INVITE_EPILOG)
_add(standalone.forget, no_args_is_help=True, epilog=standalone.FORGET_EPILOG)
_add(standalone.join, no_args_is_help=True, epilog=standalone.JOIN_EPILOG)
_add(jobs.devices, epilog=jobs.DEVICES_EPILOG)
_add(jobs.jobs, epilog=jobs.JOBS_EPILOG)
_add(jobs.cancel, no_args_is_help=True, epilog=jobs.CANCEL_EPILOG)
_add(jobs.end, no_args_is_help=True, epilog=jobs.END_EPILOG)
_add(top.top, epilog=top.EPILOG)
_add(describe.describe, epilog=describe.EPILOG)
_add(why.why, no_args_is_help=True, epilog=why.EPILOG)
_add(logs.logs, epilog=logs.EPILOG)
_add(items.items, no_args_is_help=True, epilog=items.EPILOG)
_add(items.retry, no_args_is_help=True, epilog=items.RETRY_EPILOG)


def _add_process(name: str, what: str, whose: str, *flags: str) -> None:
    """A process with options of its own, which takes this one's place; `flags` are Python's."""

    def become(context: typer.Context) -> None:
        package = f"shoal_{name}"
        if find_spec(package) is None:
            raise typer.BadParameter(f"{name} is not installed here: no {package}")
        command = [*module_command(package, *flags), *context.args]
        os.execv(sys.executable, command)  # noqa: S606 - see above

    text = f"Run {what} (shoal {name} --help shows {whose} own options)."
    app.command(name, help=text, context_settings=_RAW, add_help_option=False)(become)


_add_process("agent", "one agent", "the agent's", "-OO")
_add_process("operator", "the operator of a cluster", "its")


@app.command()
def version() -> None:
    """Print the versions of shoal, of its protocol, and of what it stands on."""
    import platform

    from shoal_protocol import PROTOCOL

    versions = {"shoal": _version("shoal"), "protocol": str(PROTOCOL)}
    versions["python"] = platform.python_version()
    versions |= {package: _version(package) for package in _VERSIONED}
    width = max(map(len, versions))
    for name, found in versions.items():
        typer.echo(f"{name:<{width}}  {found}")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


_debug = False


@app.callback()
def options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show tracebacks instead of short errors.", envvar="SHOAL_DEBUG"
        ),
    ] = False,
    versions: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="As the command `version`."
        ),
    ] = False,
) -> None:
    """What holds for every command."""
    global _debug  # noqa: PLW0603 - one process, one command line
    _debug = debug


@cache
def _command() -> Callable[..., Any]:
    """The command tree as it is run. To make it takes longer than many commands do, of which one
    process may run several."""
    return typer.main.get_command(app)


def _called() -> str:
    """How the user has called this: as a command, or as a plugin of kubectl."""
    return "kubectl shoal" if Path(sys.argv[0]).name == targets.PLUGIN else "shoal"


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line; the exit status. The one place where errors become text."""
    try:
        # A value that may be left away is more than typer offers.
        whole = ["--verify=0" if each == "--verify" else each for each in arguments]
        _command()(whole, prog_name=_called())
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        status = None if _debug else print_failure(error)
        if status is None:
            raise
        return status
    return 0
