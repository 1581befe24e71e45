"""The command `tokcap`: the door to `tokcap.cli`, which needs the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from .version import __version__

__all__ = ("main",)

_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status. arguments: those of the process by default."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if find_spec("click") is None:
        if given == ["--version"]:
            sys.stdout.write(f"tokcap {__version__}\n")
            return 0
        sys.stderr.write('tokcap\'s commands need two libraries more: pip install "tokcap[cli]"\n')
        return _USAGE_ERROR
    from .cli import run

    return run(given)


if __name__ == "__main__":
    sys.exit(main())
