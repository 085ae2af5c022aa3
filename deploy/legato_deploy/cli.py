"""The ``legato`` command."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from legato.errors import LegatoError
from legato_router.config import HELP as ROUTER_HELP, RouterConfig
from legato_worker.config import HELP as WORKER_HELP, WorkerConfig
from rich.console import Console
from rich.table import Table

from .settings import SettingsError, load, with_options
from .store import CATALOGUE, ModelStore, StoreError, console_progress, default_root, pull

app = typer.Typer(
    help="Serve language models over gRPC, with continuous batching and paged KV.\n\n"
    "Start here: `legato up` runs a router and a worker on this machine and answers a prompt.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file with sections `router` and `worker`"),
]
Address = Annotated[
    str,
    typer.Option("--address", "-a", help="router address; several with commas between"),
]
DEFAULT_ADDRESS = "localhost:7070"


def _store() -> ModelStore:
    return ModelStore(default_root())


@app.command()
def up(
    model: Annotated[str, typer.Argument(help="catalogue name, stored name or model folder")] = (
        "smollm2-135m-instruct"
    ),
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="worker processes")] = 1,
    port: Annotated[int, typer.Option(help="router port; 0 = any free one")] = 7070,
    prompt: Annotated[
        str, typer.Option(help="asked once everything is up; empty = ask nothing")
    ] = "In one short paragraph: what does an orchestra play legato?",
    stay: Annotated[
        bool | None,
        typer.Option("--stay/--no-stay", help="stay up after the answer; default: on a terminal"),
    ] = None,
    runner: Annotated[str, typer.Option(help="torch, or simulated (no weights)")] = "torch",
    config: ConfigFile = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show the logs")] = False,
) -> None:
    """Run a router and workers on this machine; one Ctrl-C ends all.

    Pulls the model if it is not in the store, waits until all are healthy, asks a first prompt
    through router and worker, and prints what to try next.
    """
    from .local_system import LocalSystem, run_up

    store, console = _store(), Console(stderr=True)
    if not Path(model).exists() and model not in {stored.name for stored in store.list()}:
        with console_progress(console) as progress:
            pull(store, model, progress)
    system = LocalSystem(
        model=model, num_workers=workers, port=port, runner=runner, config=config, verbose=verbose
    )
    stay = sys.stdin.isatty() and sys.stdout.isatty() if stay is None else stay
    raise typer.Exit(asyncio.run(run_up(system, prompt=prompt, stay=stay)))


@app.command()
@with_options(RouterConfig, ROUTER_HELP)
def router(flags: dict[str, Any], config: ConfigFile = None) -> None:
    """Run a router: the door for clients. Stateless; run as many as you like.

    Each setting can also come from the environment (LEGATO_ROUTER_LISTEN, ...) or from the file
    given by --config (section `router`); flags win over environment, environment over file.
    """
    from legato_router.serve import ModelSource, serve

    settings = load(RouterConfig, "router", flags, file=config)
    _print_settings("router", settings)
    stored = [_store().resolve(name) for name in settings.models]
    sources = [ModelSource(model.name, model.path, model.fingerprint) for model in stored]
    raise typer.Exit(asyncio.run(serve(settings, sources)))


@app.command()
@with_options(WorkerConfig, WORKER_HELP)
def worker(flags: dict[str, Any], config: ConfigFile = None) -> None:
    """Run a worker: one model, its scheduler and its KV cache. Routers attach to it.

    Each setting can also come from the environment (LEGATO_WORKER_MODEL, ...) or from the file
    given by --config (section `worker`); flags win over environment, environment over file.
    """
    from legato_worker.serve import ModelSource, serve

    settings = load(WorkerConfig, "worker", flags, file=config)
    _print_settings("worker", settings)
    model = _store().resolve(settings.model)
    source = ModelSource(model.name, model.path, model.fingerprint)
    raise typer.Exit(asyncio.run(serve(settings, source)))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue; - reads standard input")],
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="served model; default: the only one")] = "",
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-m", help="tokens")] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 = greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus, (0, 1]")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling repeatable")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; repeatable")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template: plain text")] = False,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="timings at the end")] = True,
) -> None:
    """Ask a running router one prompt and watch the answer come, token by token."""
    from .ask import ask

    text = sys.stdin.read() if prompt == "-" else prompt
    fields: dict[str, Any] = {
        "model": model,
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop or [],
    }
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if seed is not None:
        fields["seed"] = seed
    asyncio.run(ask(address, text, fields, raw=raw, stats=stats))


@app.command()
def chat(
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="served model; default: the only one")] = "",
    system: Annotated[str, typer.Option(help="system message")] = "",
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 = greedy")] = 0.7,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="per answer")] = 512,
) -> None:
    """Talk with a served model. Ctrl-C cuts an answer short; Ctrl-D or /quit leaves."""
    from .ask import converse

    converse(address, model, system, temperature=temperature, max_tokens=max_tokens)


@app.command("pull")
def pull_model(
    what: Annotated[str, typer.Argument(help="catalogue name, model folder, or hub id")],
    name: Annotated[str | None, typer.Option(help="name in the store")] = None,
) -> None:
    """Put a model into the local store (LEGATO_HOME, default ~/.cache/legato).

    Takes a name of the catalogue (see `legato models`), a folder with safetensors, or a hub id.
    """
    console = Console(stderr=True)
    with console_progress(console) as progress:
        stored = pull(_store(), what, progress, name)
    print(f"{stored.name}  {stored.num_bytes / 1e6:.0f} MB  {stored.path}")


@app.command()
def models(
    address: Annotated[
        str, typer.Option("--address", "-a", help="also list what this router serves")
    ] = "",
) -> None:
    """List the models in the store, those that can be pulled, and those that a router serves."""
    table = Table(box=None, pad_edge=False)
    for title in ("model", "where", "size", "fingerprint"):
        table.add_column(title, overflow="fold")
    stored = {model.name: model for model in _store().list()}
    for model in stored.values():
        size = f"{model.num_bytes / 1e6:.0f} MB"
        table.add_row(model.name, str(model.path), size, model.fingerprint[:12])
    for name in CATALOGUE:
        if name not in stored:
            table.add_row(name, f"not here; get it: legato pull {name}", "", "")
    Console().print(table)
    if address:
        from .ask import list_served

        asyncio.run(list_served(address))


def _print_settings(section: str, settings: object) -> None:
    import structlog

    structlog.get_logger(f"legato.{section}").info("settings", **_public(settings))


def _public(settings: object) -> dict[str, Any]:
    import dataclasses

    values = dataclasses.asdict(settings)  # type: ignore[call-overload]
    return {k: "(set)" if k == "resume_key" and v else v for k, v in values.items()}


def main() -> None:
    """Entry point: errors of use become one line, not a traceback."""
    try:
        app()
    except (SettingsError, StoreError, LegatoError, ValueError) as error:
        print(f"legato: {error}", file=sys.stderr)
        if isinstance(error, LegatoError) and "failed to connect" in error.message:
            print("legato: is a router running there? `legato up` starts one", file=sys.stderr)
        sys.exit(130 if isinstance(error.__cause__, KeyboardInterrupt) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
