"""The words that verbs take: all that the library knows, and the same option for the same thing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import get_args

import click
import pytest

from tokcap.cli.exporting import size_option
from tokcap.cli.group import VERBS, tokcap
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
        ("drift", "--class", get_args(DriftKind)),
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
