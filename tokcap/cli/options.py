"""Options and arguments that several verbs have."""

from __future__ import annotations

from collections.abc import Callable
from glob import escape
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

__all__ = (
    "as_json",
    "call_argument",
    "complete_rollout",
    "directory",
    "rollout_argument",
    "rollout_globs",
    "tokenizer",
    "unix_group",
)

_F = TypeVar("_F", bound=Callable[..., Any])
_MOST_OFFERED = 200


def directory(function: _F) -> _F:
    """`--dir`: the store; the verb opens it with `tokcap.inspection.open_to_look`."""
    return click.option(
        "-d",
        "--dir",
        "directory",
        metavar="DIRECTORY",
        type=click.Path(file_okay=False),
        help="The store. [default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG]",
    )(function)


def as_json(function: _F) -> _F:
    """`--json`: for programs, one JSON object a line; NaN is null."""
    return click.option("--json", "as_json", is_flag=True, help="For programs: JSON, one object a line.")(function)


def unix_group(function: _F) -> _F:
    """`--unix-group`: as `group=` of `FileStore`; `--group` is the group of a rollout."""
    return click.option(
        "--unix-group", metavar="GROUP", help="The Unix group of users that share the store, if one does."
    )(function)


def tokenizer(function: _F) -> _F:
    """`--tokenizer`: where the bytes of ids come from if the engine told none."""
    return click.option(
        "--tokenizer",
        metavar="PATH",
        type=click.Path(exists=True),
        help="tokenizer.json, or a directory with one: shows the text of ids of which the engine told none. "
        "Needs the extra `tokenizer`.",
    )(function)


def complete_rollout(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Rollout ids of the store that begin like this; nothing if there is no store. Only names are read."""
    del parameter
    try:
        from ..inspection import open_to_look, wanted_ids

        with open_to_look(context.params.get("directory")) as store:
            found = wanted_ids(store, (f"{escape(incomplete)}*",))
    except Exception:  # whatever it is, a shell that waits for words gets none
        return []
    return [CompletionItem(name) for name in found[:_MOST_OFFERED]]


def rollout_argument(name: str = "rollout") -> Callable[[_F], _F]:
    """One rollout id."""
    return click.argument(name, metavar=name.upper(), shell_complete=complete_rollout)


def call_argument(name: str = "call") -> Callable[[_F], _F]:
    """One model call id of the rollout before it; `ID#N` names choice N."""
    return click.argument(name, metavar=name.upper())


def rollout_globs(function: _F) -> _F:
    """Any number of rollout ids or globs; none means all."""
    return click.argument("globs", metavar="[ROLLOUT|GLOB]...", nargs=-1, shell_complete=complete_rollout)(function)
