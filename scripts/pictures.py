"""Makes the pictures of the README: `tokcap show` as SVG, `tokcap report` as PNG, of recorded rollouts.

Needs a checkout, the extra `cli`, and for the report a Chromium and playwright. They go to scripts/pictures/.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.planted_defects import capture
from tests import recordings
from tokcap import FileStore

ROLLOUTS = ("linear-2", "linear-3", "retry-mid-0", "retry-last-0", "sub-agent-0", "compaction-0", "parallel-0")
SHOWN, NOT_TRAINED = "sub-agent-0", "retry-last-0"
COLUMNS = 160
SIZE = (1280, 1000)
LARGEST = 150_000
"""Bytes of a picture."""
_FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
"""Which rich would load from the network."""


async def write_store(directory: Path, names: Sequence[str]) -> None:
    """Recorded rollouts as servers capture them, frozen."""
    store = FileStore(directory, require_intent=True)
    for name in names:
        for call in recordings.load(name).calls:
            if call.outcome != "no_generation" and call.path == "/v1/chat/completions":
                await capture(store, name, call)
        await store.finish(name, meta={"reward": 1.0})
        (await store.freeze(name)).close()
    await store.close()


def on_a_terminal(arguments: Sequence[str], columns: int = COLUMNS) -> str:
    """What a command prints on a terminal of that width, colours included."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(columns)}
    environment.pop("NO_COLOR", None)
    printed = bytearray()
    with subprocess.Popen(arguments, stdout=theirs, stdin=theirs, env=environment) as process:
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # nobody holds the other end any more
                break
            if not part:
                break
            printed += part
    os.close(ours)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)} ended with status {process.returncode}")
    return printed.decode().replace("\r\n", "\n")


def as_svg(text: str, title: str) -> str:
    """Terminal output as a picture."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    shown = Text.from_ansi(text.rstrip())
    width = max(line.cell_len for line in shown.split())
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    return console.export_svg(title=title, code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT))


def as_png(page: Path, picture: Path, *, hidden: str = "") -> None:
    """A page in light colours, as a headless Chromium shows it, without the line `hidden`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        view.goto(page.resolve().as_uri())
        view.wait_for_timeout(500)
        # The name of a temporary directory says nothing to anybody.
        view.evaluate(
            "text => { for (const one of document.querySelectorAll('p')) if (one.textContent === text) one.remove() }",
            hidden,
        )
        view.screenshot(path=picture)
        browser.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parent / "pictures", help="where they go")
    parser.add_argument("--only", choices=("show", "report"), help="make these only")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    tokcap = [sys.executable, "-m", "tokcap.command"]
    made: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="tokcap-pictures-") as scratch:
        directory = Path(scratch, "store")
        asyncio.run(write_store(directory, ROLLOUTS))
        if options.only != "report":
            for name, command in (("ls", ["ls"]), ("show", ["show", SHOWN]), ("show-masked", ["show", NOT_TRAINED])):
                text = on_a_terminal([*tokcap, *command, "--dir", str(directory)])
                made.append(options.out / f"{name}.svg")
                made[-1].write_text(as_svg(text, " ".join(["tokcap", *command])))
        if options.only != "show":
            for name, rest in (("report-rollout", [SHOWN]), ("report-store", [])):
                page = Path(scratch, f"{name}.html")
                subprocess.run([*tokcap, "report", *rest, "--dir", directory, "--out", page], check=True)
                made.append(options.out / f"{name}.png")
                as_png(page, made[-1], hidden=str(directory))
    for picture in made:
        print(f"{picture}: {picture.stat().st_size:,} bytes")
    return 0 if all(picture.stat().st_size <= LARGEST for picture in made) else 1


if __name__ == "__main__":
    sys.exit(main())
