"""`tokcap export`: rollouts into files of other formats."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import click

from .options import as_json, directory, rollout_globs
from .status import NO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..transfer import Exported

__all__ = ("export_verb", "size_option")

_FORMATS = ("jsonl", "jsonl.gz", "npz", "parquet", "safetensors")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_NAMED = 20


def size_option(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """512MB, 2GiB, 1048576: units are powers of 1024."""
    del context, parameter
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(I?B)?", value.upper())
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{value!r} is no size; as in 512MB or 2GB")
    return int(found[1]) * _UNITS[found[2]]


@click.command("export")
@rollout_globs
@directory
@click.option(
    "--to",
    required=True,
    metavar="PATH",
    type=click.Path(),
    help="A file, if it ends in .jsonl, .jsonl.gz, .npz, .parquet or .safetensors: it appears when it is complete, and "
    "a killed export begins anew. Else a directory of parts: a killed export goes on, a repeated one adds what is new.",
)
@click.option("--format", type=click.Choice(_FORMATS), help="Of the parts of a directory; a file's name says it.")
@click.option(
    "--by",
    type=click.Choice(["rollout", "trajectory", "call"]),
    default="trajectory",
    show_default=True,
    help="What a record is.",
)
@click.option(
    "--state",
    type=click.Choice(["frozen", "open", "any"]),
    default="frozen",
    show_default=True,
    help="frozen: what can't change any more, finished or not. open: as it is at this moment.",
)
@click.option("--untrained", is_flag=True, help="Also trajectories of which nothing is trained.")
@click.option("--models", multiple=True, metavar="MODEL", help="Which models are trained; may be repeated.")
@click.option("--strict-build", is_flag=True, help="Mask a whole rollout on any doubt, as NeMo Gym does.")
@click.option("--exclude-not-behaviour", is_flag=True, help="Don't train log-probs known not to be those sampled from.")
@click.option(
    "--part-bytes",
    default="512MB",
    show_default=True,
    metavar="SIZE",
    callback=size_option,
    help="Of the records in a part, in memory; npz and safetensors hold one.",
)
@click.option("--strict", is_flag=True, help="Exit status 1 if a rollout was left out, is damaged, or changed since.")
@as_json
def export_verb(
    globs: tuple[str, ...],
    directory: str | None,
    to: str,
    format: str | None,
    by: str,
    state: str,
    untrained: bool,
    models: tuple[str, ...],
    strict_build: bool,
    exclude_not_behaviour: bool,
    part_bytes: int,
    strict: bool,
    as_json: bool,
) -> int:
    """Write trajectories, calls or rollouts to JSONL, npz, parquet or safetensors, with every value exact.

    Nothing in the store is changed, nothing is retired. What was left out, and why, is told on standard error. The
    columns and their types: python -c "import tokcap.transfer as t; help(t)"

    \b
    Examples:
      tokcap export --to train.parquet
      tokcap export 'task-9-*' --to calls.jsonl.gz --by call
      tokcap export --to parts --format safetensors --part-bytes 256MB   # repeat it after a kill: it goes on
    """
    from ..inspection import open_to_look, wanted_ids
    from ..inspection.telling import without_directory
    from ..transfer import export
    from .naming import check_named, is_glob, nothing
    from .output import counted, line, print_json, safe, size
    from .progress import progress_bar

    store = open_to_look(directory)
    names = [name for name in globs if not is_glob(name)]
    check_named(store, names, wanted_ids(store, names) if names else ())
    with progress_bar("exporting") as progress:
        done = export(
            store,
            to,
            globs,
            format=format,
            by=by,  # type: ignore[arg-type] # click has checked it
            state=state,  # type: ignore[arg-type]
            untrained=untrained,
            models=models or None,
            strict=strict_build,
            exclude_not_behaviour=exclude_not_behaviour,
            part_bytes=part_bytes,
            progress=progress,
        )

    def short(reasons: dict[str, str]) -> dict[str, str]:
        return {name: without_directory(why, store.directory, name) for name, why in reasons.items()}

    left_out = list(_left_out(done, short))
    for said in left_out:
        sys.stderr.write(f"tokcap export: {safe(said)}\n")
    if as_json:
        print_json(done)
    else:
        count = f"{counted(done.rollouts, 'rollout')}, {counted(done.records, 'record')}, {size(done.bytes)}"
        already = f" ({counted(done.already, 'rollout')} there already)" if done.already else ""
        to = f" to {safe(done.to)}" if done.parts or done.already else "; nothing was written"
        line(f"{count}{to}{already}")
    if not done.rollouts and not done.already:
        return NO if left_out else nothing(store.directory, asked=bool(globs))
    return NO if strict and not done.complete else 0


def _left_out(done: Exported, short: Callable[[dict[str, str]], dict[str, str]]) -> Iterator[str]:
    if done.skipped:
        yield "left out: " + ", ".join(f"{count} {why}" for why, count in sorted(done.skipped.items()))
    if done.without_records:
        yield f"without a record, as nothing of them is trained: {done.without_records} (`tokcap ls --masked`)"
    yield from _named("unreadable", {name or "a directory": why for name, why in short(done.unreadable).items()})
    yield from _named("exported without what is damaged (`tokcap verify`)", short(done.damaged))
    yield from _named(
        "changed since it was exported",
        {name: f"it is in {part}; remove that file and repeat the command" for name, part in done.changed.items()},
    )


def _named(what: str, rollouts: dict[str, str]) -> Iterator[str]:
    for shown, (rollout_id, why) in enumerate(rollouts.items()):
        if shown == _MOST_NAMED:
            yield f"{what}: {len(rollouts) - shown} more"
            return
        yield f"{what}: {rollout_id}: {why}"
