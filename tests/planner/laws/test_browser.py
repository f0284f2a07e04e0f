"""The report in a real browser, headless Chromium: its elements are there and its pictures are painted."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

from meshwright.planner.report.report import report
from tests.planner.report.pages import Outline, contents_of, plan_of
from tests.planner.report.test_report import SECTIONS

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_CHROMIUM is None, reason="no chromium here; install the Debian package chromium"),
]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)

GENERATE, TRAIN = (0x3A, 0x78, 0xBA), (0x1F, 0x4C, 0x80)
"""Colours of actor_generate and actor_train on a light page, red, green, blue."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report(contents_of(plan_of(), "rehearsed", "measured")), encoding="utf-8")
    return path


def chromium(page: Path, *flags: str) -> str:
    """What the browser prints."""
    assert _CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [_CHROMIUM, *_FLAGS, profile, *flags, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.check_all
def test_the_browser_finds_every_section_and_picture(page: Path) -> None:
    outline = Outline(chromium(page, "--dump-dom").replace("<!DOCTYPE html>", ""))
    assert [name for name in outline.ids if not name.startswith("hatch-")] == SECTIONS
    assert outline.attributes.count(("class", "plot")) == 9
    assert "REHEARSAL" in " ".join(outline.text)
    assert len(outline.names) == len(Outline(page.read_text()).names)


@pytest.mark.check_all
@pytest.mark.parametrize("width", [800, 1400])
def test_the_stages_are_painted_on_a_narrow_and_on_a_wide_page(page: Path, width: int) -> None:
    picture = page.with_name("page.png")
    half = ("--force-device-scale-factor=0.5", f"--window-size={width},900")
    chromium(page, *half, f"--screenshot={picture}")
    size, pixels = read_png(picture.read_bytes())
    assert size == (width // 2, 450)
    for colour in (GENERATE, TRAIN):
        assert pixels[colour] > 500


def read_png(data: bytes) -> tuple[tuple[int, int], Counter[tuple[int, int, int]]]:
    """Width and height, and how often each colour occurs. https://www.w3.org/TR/png-3/, 8 bits, not interlaced."""
    chunks: dict[bytes, bytes] = {}
    at = 8
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + data[at + 8 : at + 8 + length]
        at += 12 + length
    width, height, depth, colour_type, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, interlaced) == (8, 0)
    step = {2: 3, 6: 4}[colour_type]
    raw, stride = zlib.decompress(chunks[b"IDAT"]), width * step
    before, pixels = bytearray(stride), Counter[tuple[int, int, int]]()
    for top in range(0, len(raw), stride + 1):
        row = unfiltered(raw[top], bytearray(raw[top + 1 : top + 1 + stride]), before, step)
        pixels.update(zip(row[0::step], row[1::step], row[2::step], strict=True))
        before = row
    return (width, height), pixels


def unfiltered(kind: int, row: bytearray, above: bytearray, step: int) -> bytearray:
    for place in range(len(row)) if kind else ():
        left = row[place - step] if place >= step else 0
        corner = above[place - step] if place >= step else 0
        predicted = (0, left, above[place], (left + above[place]) // 2, paeth(left, above[place], corner))[kind]
        row[place] = (row[place] + predicted) & 0xFF
    return row


def paeth(left: int, above: int, corner: int) -> int:
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))
