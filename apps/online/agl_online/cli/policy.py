"""`agl policy`: what runs have trained, taken along and served."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.cli.options import AsJson, Set
from agl_core.cli.screen import print_json
from agl_core.reading.words import score, size

if TYPE_CHECKING:
    from agl_core.cli.screen import Screen

Runs = Annotated[Path, typer.Argument(help="A run's folder, or the folder that holds the runs.")]
Name = Annotated[str, typer.Argument(metavar="NAME@STEP", help="As calc@40, calc@latest, calc@best or calc@stable.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME[@STEP]...", help="As calc@40; calc alone: all that move.")]
Out = Annotated[Path, typer.Option(help="The folder to write; it must not exist.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="The engine to use; by default the run's, if it can.")
]

policy = typer.Typer(help="List, export, merge and serve what runs have trained.", no_args_is_help=True)


@policy.command("list")
def list_(folder: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """List the versions that runs have saved, each with its run and the evaluation behind it."""
    from rich.table import Table

    from agl_core.cli.screen import Screen
    from agl_online.policies.details import list_policies

    entries = list_policies(folder)
    if as_json:
        print_json(entries)
        return
    table = Table("policy", "also", "run", "state", "weights")
    for column in ("size", "reward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("evaluated on")
    for each in entries:
        found = each.headline
        on = "–" if found is None else f"{found.set}, {found.mode}" + (f", {found.rollouts}" if found.rollouts else "")
        reward = None if found is None else found.reward
        also = ", ".join(each.aliases) or "–"
        table.add_row(each.name, also, str(each.run), each.state, each.kind, size(each.size), score(reward), on)
    Screen().print(table)


@policy.command()
def export(name: Name, out: Out, set_: Set = [], as_json: AsJson = False) -> None:  # noqa: B006
    """Write a version as a Hugging Face folder, with tokenizer, chat template and model card.

    It has all weights, or the adapter alone if the run trained one; agl policy merge then writes all weights.
    """
    from agl_online.policies.export import export as write
    from agl_online.policies.naming import parse

    version = parse(name).resolve()
    write(version, out, set_)
    _say_written(str(version), out, as_json)


@policy.command()
def merge(name: Name, out: Out, engine: EngineName = None, set_: Set = [], as_json: AsJson = False) -> None:  # noqa: B006
    """Merge a version's LoRA adapter into its base, and write all weights as a Hugging Face folder.

    It is refused if the base is not the one that the adapter was trained on.
    """
    from agl_online.policies.export import merge as write
    from agl_online.policies.naming import parse

    version = parse(name).resolve()
    write(version, out, set_, engine)
    _say_written(str(version), out, as_json)


@policy.command()
def promote(name: Name) -> None:
    """Make a version the stable one: NAME@stable means it from now on, also where it is being served.

    Its checkpoint is kept, however many come later.
    """
    from agl_core.cli.screen import Screen
    from agl_core.errors import ConfigError
    from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints
    from agl_online.ledger import Ledger
    from agl_online.policies.naming import parse

    version = parse(name).resolve()
    if version.checkpoint is None:
        raise ConfigError(f"{version} is what training started from, and no checkpoint of the run.")
    if Ledger.of_run(version.run).exists:
        raise ConfigError(f"{version.run} is deployed, and its versions are tested: agl versions promote {version}.")
    Checkpoints(version.run / CHECKPOINTS, keep=1).mark_stable(version.policy, version.step)
    Screen().print(f"{version.name}@stable is {version}")


@policy.command()
def serve(
    names: Names,
    host: Host = "127.0.0.1",
    port: Port = 8400,
    engine: EngineName = None,
    set_: Set = [],  # noqa: B006
) -> None:
    """Serve versions to any client of OpenAI's or Anthropic's APIs, without a trainer.

    Requests name a version as their model: calc@40, calc@latest, calc@best, calc@stable. When a run that is being
    trained writes a checkpoint, or a version is promoted, names that move lead to the new version; calls in flight are
    answered by the old one. Adapters of the same weights share them.

    To be reached from other machines, set AGL_POLICY_KEY, which clients send as their API key, and name an address of
    this machine with --host. What crosses the network is not encrypted. Ctrl-C or SIGTERM stops it.
    """
    from agl_core.cli.screen import Screen
    from agl_core.server.listening import run
    from agl_core.wire.keys import take_key
    from agl_online.policies.gateway import POLICY_KEY

    run(_serve(names, host, port, take_key(POLICY_KEY), engine, set_, Screen()))


async def _serve(
    names: list[str], host: str, port: int, key: str | None, engine: str | None, overrides: list[str], console: Screen
) -> None:
    from agl_online.cli.serve import until_signalled
    from agl_online.policies.serving import serving

    console.print("starting the engine")
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serving(names, host=host, port=port, key=key, say=console.print, engine=engine, overrides=overrides)
        )
        url = served.server.base_url
        first = next(iter(served.shelf.names))
        console.print(f"serving at {url}/v1 (Anthropic's clients: {url})")
        bearer = "" if key is None else " -H 'Authorization: Bearer '$AGL_POLICY_KEY"
        body = f'{{"model": "{first}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        console.print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{bearer} -d '{body}'")
        following = asyncio.ensure_future(served.follow())
        stopping = asyncio.ensure_future(until_signalled())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            console.print("stopping")
        finally:
            following.cancel()
            stopping.cancel()


def _say_written(version: str, out: Path, as_json: bool) -> None:
    from agl_core.cli.screen import Screen

    if as_json:
        print_json({"policy": version, "folder": out})
        return
    Screen().print(f"{version} is in {out}")
