"""A page in a real browser, without a screen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: make setup-system installs it")


def pictured(page: Path, profile: Path, *, dark: bool = False) -> Path:
    """A picture of the page, 1200 x 800, next to it."""
    picture = page.with_suffix(".png")
    words = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    words += " --disable-component-update --disable-sync --hide-scrollbars --window-size=1200,800"
    words += " --blink-settings=preferredColorScheme=0" * dark
    command = [str(CHROMIUM), *words.split(), f"--screenshot={picture}", f"--user-data-dir={profile}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture


def in_browser(page: Path, profile: Path) -> tuple[str, str]:
    """The document that the browser made of the page, and its messages meanwhile."""
    words = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    words += " --disable-component-update --disable-sync --enable-logging=stderr --v=0 --dump-dom"
    command = [str(CHROMIUM), *words.split(), f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def overflow_in_browser(page: Path, profile: Path, *, width: int) -> int:
    """By how many pixels the page is wider than a window of `width`: a reader would scroll sideways for each line."""
    frame = page.with_name("frame.html")
    measure = "const root = frame.contentDocument.documentElement; document.title = root.scrollWidth - root.clientWidth"
    style = f"width: {width}px; height: 800px; border: 0"
    frame.write_text(f'<iframe id="frame" src="{page.name}" style="{style}" onload="{measure}"></iframe>')
    words = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    words += " --disable-component-update --disable-sync --allow-file-access-from-files --dump-dom"
    command = [str(CHROMIUM), *words.split(), f"--user-data-dir={profile}", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split("<title>")[1].split("</title>")[0])
