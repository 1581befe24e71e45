"""How quickly `tokcap report` makes a page of many tokens, and how smoothly a browser scrolls through it.

    python -m bench.page                    # 200,000 tokens in 40 calls
    python -m bench.page --tokens 20000     # that it runs

Needs Debian's `chromium` and the package playwright; the strip is drawn without a graphics card.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.inspection import open_to_look
from tokcap.report import report

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ("main",)

SCROLLED = """([mode, step]) => new Promise((done) => {
  document.querySelector("input[value=" + mode + "]").click();
  const strip = document.querySelector(".strip"), times = [];
  let at = 0, last = performance.now();
  const begun = last;
  const next = (now) => {
    times.push(now - last);
    last = now;
    strip.scrollTop = at++ * step;
    if (at < 180) return requestAnimationFrame(next);
    times.sort((a, b) => a - b);
    done([(1000 * times.length) / (performance.now() - begun), times[Math.floor(times.length * 0.99)]]);
  };
  requestAnimationFrame(next);
})"""


def made(directory: Path, tokens: int, calls: int) -> None:
    """One conversation of so many ids, nine of ten of them sampled."""
    random = np.random.default_rng(7)
    words = [f" word{number}".encode() for number in range(500)]
    between, sampled = tokens // calls // 10, tokens // calls * 9 // 10
    with FileStore(directory) as store:
        ids = random.integers(0, len(words), between)
        for call in range(calls):
            answer = random.integers(0, len(words), sampled)
            log_probs = -np.abs(random.gumbel(0.2, 1.2, sampled))
            pieces = [words[token] for token in answer]
            store.put_now(TokenEntry("large", f"call-{call:04d}", ids, answer, log_probs, pieces=pieces))
            ids = np.concatenate([ids, answer, random.integers(0, len(words), between)])
        store.freeze_now("large").close()


def scrolled(page: Page) -> Iterator[tuple[str, int, float, float]]:
    """(how tokens are shown, pixels a frame, frames a second, milliseconds of the 99th of 100 frames)."""
    for mode in ("text", "ids", "dense"):
        for step in (60, 400):
            rate, slow = page.evaluate(SCROLLED, [mode, step])
            yield mode, step, rate, slow


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--calls", type=int, default=40)
    asked = parser.parse_args(arguments)
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        sys.stderr.write("this needs chromium and the package playwright\n")
        return 2
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        made(Path(directory) / "store", asked.tokens, asked.calls)
        begun = time.perf_counter()
        html = report(open_to_look(Path(directory) / "store"), ["large"])
        _say(f"{asked.tokens:,} tokens: a page of {len(html) / 1e6:.1f} MB in {time.perf_counter() - begun:.2f} s")
        file = Path(directory) / "page.html"
        file.write_bytes(html)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for width, height in ((1440, 900), (2560, 1440)):
            size: Any = {"width": width, "height": height}
            page = browser.new_page(viewport=size)
            begun = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector(".strip[data-frames]")
            elements = page.evaluate("document.querySelectorAll('*').length")
            _say(f"{width} x {height}: there in {time.perf_counter() - begun:.2f} s, {elements} elements")
            for mode, step, rate, slow in scrolled(page):
                _say(f"  {mode:5} {step:3} pixels a frame: {rate:.0f} frames a second, 99 of 100 within {slow:.0f} ms")
            page.close()
        browser.close()
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
