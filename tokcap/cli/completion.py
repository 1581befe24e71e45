"""`tokcap completion`: the script of the parser's library that completes in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .group import tokcap
from .status import NO

__all__ = ("completion_verb",)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_verb(shell: str) -> int:
    """Print the script that completes verbs, options and rollout ids.

    \b
    Examples:
      tokcap completion bash >> ~/.bashrc
      tokcap completion zsh > "${fpath[1]}/_tokcap"
      tokcap completion fish > ~/.config/fish/completions/tokcap.fish
    """
    found = get_completion_class(shell)
    if found is None:
        return NO
    click.echo(found(tokcap, {}, "tokcap", "_TOKCAP_COMPLETE").source())
    return 0
