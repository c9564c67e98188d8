"""Draws docs/screens/*.png: every page of the console in Chromium, against an emulated fleet under a load it cannot
quite serve. Takes about five minutes; `python docs/make_screens.py [FOLDER]`."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/ui/console"), str(ROOT / "benchmarks")]
from bench_fleet import CLI, running  # noqa: E402
from console_browser import Tab, browsing  # noqa: E402

FLEET = ("--engine", "emulated", "--prefill", "2", "--decode", "4", "--pool", "1", "--hardware", "H20",
         "--speed", "0.25")  # fmt: skip
LOAD = ("--trace", "generated:agentic", "--rate", "1.6", "--num", "5000", "--slo", "ttft=2,tpot=0.2")
WARM_S = 150.0
PORT = 18773
NUM_COLOURS = 192
LOCALES = {"en": "en-US", "zh-Hant": "zh-TW"}
SETTLE_MS = 1500


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, running(Path(state), *FLEET) as fleet:
        console = subprocess.Popen([*CLI, "console", "--url", fleet.url, "--port", str(PORT)])
        load = subprocess.Popen([*CLI, "bench", "--url", fleet.url, *LOAD], stdout=subprocess.DEVNULL)
        try:
            time.sleep(WARM_S)
            draw(folder, f"http://127.0.0.1:{PORT}")
        finally:
            for process in (load, console):
                process.terminate()
                process.wait(30)
    return 0


def draw(folder: Path, url: str) -> None:
    """Overview in both languages and both themes, every other page in one of each."""
    for lang in LOCALES:
        for scheme in ("light", "dark"):
            shoot(folder, url, "overview", lang, scheme)
    shoot(folder, url, "rebalance", "en", "dark", rebalance, 1500)
    shoot(folder, url, "instances", "en", "dark")
    shoot(folder, url, "requests", "en", "light", missed, 1650)
    shoot(folder, url, "kv", "zh-Hant", "dark", height=1350)
    shoot(folder, url, "playground", "en", "light", ask)
    shoot(folder, url, "replay", "en", "dark", height=1350)
    shoot(folder, url, "audit", "zh-Hant", "light")
    shoot(folder, url, "traffic", "en", "light", height=1250)
    shoot(folder, url, "planner", "zh-Hant", "dark", plan, 1350)


def shoot(
    folder: Path, url: str, name: str, lang: str, scheme: str, act: Callable[[Tab], None] | None = None,
    height: int = 1000,
) -> None:  # fmt: skip
    """One page as a PNG of few colours."""
    with browsing(url, scheme=scheme, locale=LOCALES[lang], height=height) as tab:
        tab.open("" if name == "overview" else name)
        if act is not None:
            act(tab)
        tab.page.wait_for_timeout(SETTLE_MS)
        picture = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB")
    file = folder / f"{name}-{lang}-{scheme}.png"
    picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file} {file.stat().st_size / 1024:.0f} KiB", flush=True)


def rebalance(tab: Tab) -> None:
    """One decode instance becomes prefill, from the dry run until its effect is measured."""
    tab.page.get_by_test_id("stNumberInputStepUp").first.click()
    tab.button("Predict").click()
    tab.button("Apply").click(timeout=30_000)
    tab.page.get_by_role("button", name="Undo plan").wait_for(timeout=120_000)


def missed(tab: Tab) -> None:
    """The slowest request in detail."""
    tab.page.get_by_role("radio", name="slowest").click()


def ask(tab: Tab) -> None:
    tab.page.get_by_test_id("stChatInputTextArea").fill("Why is prefill the bottleneck?")
    tab.page.get_by_test_id("stChatInputTextArea").press("Enter")
    tab.page.get_by_text("TTFT").first.wait_for(timeout=60_000)


def plan(tab: Tab) -> None:
    """The present fleet beside the best one of the same GPUs."""
    tab.page.locator(".st-key-plan button").click()
    tab.page.get_by_test_id("stAlertContentSuccess").wait_for(timeout=300_000)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/screens"))
