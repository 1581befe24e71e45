"""The words that verbs take: all that the library knows, and the same option for the same thing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from tokcap import FileStore, TokenEntry
from tokcap.cli.exporting import size_option
from tokcap.cli.group import VERBS, tokcap
from tokcap.command import main
from tokcap.inspection import text
from tokcap.inspection.row import RowState
from tokcap.inspection.statistics import By
from tokcap.protocol import Outcome
from tokcap.trajectory import DriftKind
from tokcap.trajectory.verdicts import Category
from tokcap.transfer import FORMATS, LEVELS
from tokcap.transfer.exporting import WantedState


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every verb, and those below a verb."""
    context = click.Context(tokcap)
    for verb, _ in VERBS:
        command = tokcap.get_command(context, verb)
        assert command is not None
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", inner) for name, inner in command.commands.items())
        else:
            yield verb, command


OPTIONS = {
    (verb, name): parameter
    for verb, command in commands()
    for parameter in command.params
    if isinstance(parameter, click.Option)
    for name in parameter.opts
}


@pytest.mark.parametrize(
    ("verb", "option", "words"),
    [
        ("ls", "--state", set(get_args(RowState)) - {"absent"}),
        ("calls", "--outcome", get_args(Outcome)),
        ("calls", "--verdict", set(get_args(Category)) - {"masked"}),  # which single ids are
        ("drift", "--kind", get_args(DriftKind)),
        ("stats", "--by", get_args(By)),
        ("export", "--by", LEVELS),
        ("export", "--format", FORMATS),
        ("export", "--state", get_args(WantedState)),
    ],
)
def test_an_option_takes_every_word_that_there_is(verb: str, option: str, words: Collection[str]) -> None:
    kind = OPTIONS[verb, option].type
    assert isinstance(kind, click.Choice)
    assert set(kind.choices) == set(words)


@pytest.mark.parametrize("verb", [verb for verb, _ in commands() if verb not in ("completion", "serve")])
def test_every_verb_names_its_store_and_speaks_to_programs(verb: str) -> None:
    assert OPTIONS[verb, "-d"] is OPTIONS[verb, "--dir"]
    assert OPTIONS[verb, "--json"].is_flag


@pytest.mark.parametrize("verb", ["import nemo-gym", "import traffic", "retire", "reset", "sweep", "verify"])
def test_whatever_changes_a_store_can_share_it_with_a_unix_group(verb: str) -> None:
    assert OPTIONS[verb, "--unix-group"].metavar == "GROUP"
    assert (verb, "--group") not in OPTIONS  # of `ls` and `stats` it is the group of a rollout


@pytest.mark.parametrize("verb", [verb for verb, option in OPTIONS if option == "--limit"])
def test_a_limit_is_a_number_of_which_none_means_all(verb: str) -> None:
    option = OPTIONS[verb, "--limit"]
    assert isinstance(option.type, click.IntRange)
    assert (option.type.min, option.metavar) == (0, "N")
    assert "0: all" in str(option.help)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("7", 7), ("7B", 7), ("1k", 1 << 10), ("2 MB", 2 << 20), ("3GiB", 3 << 30), ("1T", 1 << 40)],
)
def test_sizes_are_powers_of_1024(written: str, expected: int) -> None:
    option = OPTIONS["export", "--part-bytes"]
    assert size_option(click.Context(tokcap), option, written) == expected


@pytest.mark.parametrize("written", ["", "0", "0GB", "-1", "1.5GB", "1X", "GB"])
def test_what_is_no_size_is_refused(written: str) -> None:
    with pytest.raises(click.BadParameter):
        size_option(click.Context(tokcap), OPTIONS["export", "--part-bytes"], written)


def test_all_verbs_know_the_bytes_of_as_many_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(tmp_path / "store") as store:
        store.put_now(TokenEntry("r-1", "c0", [1], [2, 3], [-0.5, -0.5]))
        store.put_now(TokenEntry("r-1", "c1", [1, 2, 4], [2], [-0.5]))
    read: list[int] = []

    def pieces_of_store(store: FileStore, first: Collection[str] = (), *, most: int = 0) -> text.KnownPieces:
        read.append(most)
        return text.KnownPieces()

    monkeypatch.setattr(text, "pieces_of_store", pieces_of_store)
    verbs = ("show r-1", "calls", "cat r-1 c0", "diff r-1 c1", "drift", "report --out OUT")
    for words in verbs:
        main(arguments_of(words, tmp_path, str(tmp_path / "store")))
    assert len(read) == len(verbs) and len(set(read)) == 1


# ---- exit statuses


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """One with a rollout, one without any."""
    full, empty = (tmp_path_factory.mktemp("stores") / name for name in ("full", "empty"))
    FileStore(empty).close_now()
    with FileStore(full) as store:
        store.put_now(TokenEntry("r-1", "c0", [1], [2], [-0.5]))
        store.freeze_now("r-1").close()
    return str(full), str(empty)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def arguments_of(words: str, tmp_path: Path, directory: str) -> list[str]:
    return [*words.replace("OUT", str(tmp_path / "out")).split(), "--dir", directory]


@pytest.mark.parametrize(
    "words",
    [
        "ls none-*", "ls --state open", "stats none-*", "stats --group none", "calls none-*", "calls --outcome lost",
        "drift none-*", "drift --kind edited", "drift --kind edited --totals --json", "verify none-*",
        "export none-* --to OUT.jsonl", "export --state open --to OUT.jsonl", "report none-* --out OUT.html",
        "reset none-* --yes",
    ],
)  # fmt: skip
def test_what_matches_nothing_is_no(
    words: str, stores: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments_of(words, tmp_path, stores[0])) == 1
    assert words.startswith("drift --kind") or capsys.readouterr().err.startswith("tokcap")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "words",
    [
        "ls nobody", "ls nobody r-1", "stats nobody", "show nobody", "calls nobody", "cat nobody c0", "cat r-1 nobody",
        "diff r-1 nobody", "diff nobody c0", "drift nobody", "verify nobody", "verify nobody r-1",
        "verify nobody --repair", "export nobody --to OUT.jsonl", "report nobody --out OUT.html",
        "reset nobody --yes", "reset r-1 nobody --yes", "retire nobody", "retire nobody --current --yes",
        f"retire nobody --snapshot-id {'0' * 32} --version 1",
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_is_said(
    words: str, stores: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments_of(words, tmp_path, stores[0])) == 3
    assert "nobody" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "words",
    [
        "ls", "stats", "calls", "drift", "du", "tail", "top --once --interval 0.1", "verify",
        "report --out OUT.html", "export --to OUT.jsonl",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["", " --json"])
def test_a_store_without_rollouts_is_no_failure(
    words: str, how: str, stores: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments_of(words + how, tmp_path, stores[1])) == 0
    assert f"no rollouts in {stores[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["calls", "calls --json", "drift", "drift --json"])
def test_a_directory_that_cannot_be_listed_hides_no_other(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path / "store") as store:
        for name in ("a", "b"):
            store.put_now(TokenEntry(name, "c0", [1], [2], [-0.5]))
            store.freeze_now(name).close()
    shard = next((tmp_path / "store").glob("rollouts/*/b")).parent
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if path == str(shard):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert main([*words.split(), "--dir", str(tmp_path / "store")]) == 4
    told = capsys.readouterr()
    assert f"tokcap: rollouts/{shard.name} can't be listed: " in told.err
    assert "1 rollout" in told.out or '"rollouts":1' in told.out or "c0" in told.out
