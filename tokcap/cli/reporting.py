"""`tokcap report`: one HTML page about a rollout, several, or a store."""

from __future__ import annotations

import os
import sys

import click

from .options import as_json, directory, rollout_globs, tokenizer

__all__ = ("report_verb",)


@click.command("report")
@rollout_globs
@directory
@tokenizer
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False),
    default="tokcap-report.html",
    show_default=True,
    metavar="FILE",
    help="Where to write the page; `-` is standard output. A file that is there is replaced.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=0),
    default=None,
    metavar="N",
    help="Distinct token ids in the page, 12 to 16 bytes each. Of rollouts beyond that only a row is shown. "
    "[default: 1000000]",
)
@click.option("--open", "open_it", is_flag=True, help="Show the page in the browser of this machine.")
@as_json
def report_verb(
    globs: tuple[str, ...],
    directory: str | None,
    tokenizer: str | None,
    out: str,
    max_tokens: int | None,
    open_it: bool,
    as_json: bool,
) -> int:
    """Make one self-contained HTML page: calls as a tree, every token with its log-prob and mask, drift, reasons.

    It opens from disk and asks no network for anything. Without a name it is about the whole store: a table of all
    rollouts, and the calls and tokens of those in which something is masked, lost or drifted, then of others, as far as
    --max-tokens goes.

    \b
    Examples:
      tokcap report task-9-3 --open
      tokcap report 'task-9-*' --out task-9.html
      tokcap report --dir /mnt/dead-node/tokcap --out node.html
    """
    from ..inspection import open_to_look, rows
    from ..report.contents import MAX_TOKENS, contents_of
    from ..report.page import page_of
    from .naming import meant, nothing, texts_of
    from .output import print_json
    from .progress import progress_bar

    if out == "-" and (open_it or as_json):
        raise click.UsageError("--out - is standard output, which --open and --json can't go with")
    store = open_to_look(directory)
    if globs and not meant(store, globs, {}):
        return nothing(store.directory, asked=True)
    with progress_bar("looking at rollouts") as progress:
        found = rows(store, globs, progress=progress)
    if not found:
        nothing(store.directory, asked=False)
    texts = texts_of(store, tokenizer, [row.rollout_id for row in found] if len(found) == 1 else ())
    with progress_bar("reading tokens") as progress:
        contents = contents_of(
            store, found, max_tokens=MAX_TOKENS if max_tokens is None else max_tokens, texts=texts, progress=progress
        )
    page = page_of(contents, title=store.directory, whole=not globs)
    if out == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(page)
        return 0
    path = os.path.abspath(out)
    _write(path, page)
    left_out = len(found) - len(contents.rollouts)
    if as_json:
        print_json(
            {
                "out": path,
                "bytes": len(page),
                "rollouts": len(found),
                "shown": len(contents.rollouts),
                "with_tokens": contents.with_tokens,
                "tokens": contents.tokens,
            }
        )
    else:
        _say(path, len(page), len(found), left_out, contents.tokens)
    if open_it:
        click.launch(path)
    return 0


def _say(path: str, size_in_bytes: int, rollouts: int, left_out: int, tokens: int) -> None:
    from .output import amount, line, safe, size

    told = f"{amount(rollouts)} rollout{'s' * (rollouts != 1)}, {amount(tokens)} distinct token ids"
    line(f"{safe(path)}: {told}, {size(size_in_bytes)}")
    if left_out:
        sys.stderr.write(
            f"tokcap: {amount(left_out)} of {amount(rollouts)} rollouts have only a row in the page; name those that "
            "you want to see, or give a larger --max-tokens\n"
        )


def _write(path: str, page: bytes) -> None:
    """Whole or not at all: under a name beside it first. Not for others to read: it holds what was recorded.

    What is there and is no file, a pipe or /dev/null, stays what it is and is written into.
    """
    from tempfile import NamedTemporaryFile

    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as there:
            there.write(page)
        return
    with NamedTemporaryFile(dir=os.path.dirname(path), prefix=".tokcap-report-", delete=False) as file:
        try:
            file.write(page)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
