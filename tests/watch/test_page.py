import dataclasses
import html.parser
import math
import re
import shutil
import struct

import pytest

from gradrein.watch.report.charts import Axis
from gradrein.watch.report.html import to_html
from gradrein.watch.report.report import report_on

from .processes import run_process
from .runs import healthy, in_part
from .test_findings import TRIGGERS, nonfinite, swinging, two_kinds

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page(runs):
    return to_html([report_on(run) for run in runs])


EVERY = [make for makes in TRIGGERS.values() for make in makes]


class Balanced(html.parser.HTMLParser):
    """Checks that every element is closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("make", [healthy, lambda: healthy(n=0), lambda: healthy(n=1), in_part, *EVERY])
def test_the_page_is_whole_and_fetches_nothing(make):
    text = page([make()])
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "http" not in text
    assert "<script" not in text
    assert re.search(r'="[^"]*nan', text) is None  # no coordinate that is not a number


def test_two_runs_are_before_and_after():
    text = page([swinging(), healthy()])
    assert "Before and after" in text
    assert "Findings before" in text
    assert "No findings" in text
    assert re.search(r"With the change the training loss ends at [0-9.]+ in place of [0-9.]+: The training loss", text)


def test_several_ranks_have_a_part_of_their_own():
    text = page([in_part()])
    assert "<h2>Ranks</h2>" in text
    assert "Rank 1 stopped early: its record breaks off after" in text
    assert "<h2>Ranks" not in page([healthy()])


def test_names_are_escaped():
    run = healthy()
    run.names[0] = "<img src=x onerror=alert(1)>.weight"
    run.norms[:] = [[None, *row[1:]] for row in run.norms]
    run.header["argv"] = ["<b>train</b>.py"]
    text = page([run])
    assert "<img" not in text
    assert "<b>train" not in text
    assert "&lt;img" in text


def test_an_axis_has_ticks_inside_it():
    for low, high, log in (
        (0.0, 1.0, False),
        (-3.0, 900.0, False),
        (1e-7, 1e3, True),
        (0.2, 3.0, True),
        (5.0, 5.0, False),
    ):
        axis = Axis.around([low, high], log)
        ticks = axis.ticks()
        assert 1 <= len(ticks) <= 12
        assert all(axis.low <= t <= axis.high for t in ticks)
        assert all(0 <= axis.position(v) <= 1 for v in (low, high, -1e9, 1e9, math.inf))


@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it(tmp_path, width):
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    report_on(nonfinite()).write_page(file, before=report_on(two_kinds()))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --enable-logging=stderr --hide-scrollbars"
    done = run_process(
        [BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2400",
         f"--screenshot={picture}", file.as_uri()],
    )  # fmt: skip
    assert picture.exists(), done.stderr
    assert "CONSOLE" not in done.stderr
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24])[1] == 2400
    assert len(data) > 20_000  # something is drawn


def test_what_is_drawn_is_the_optimizer_that_the_advice_is_about():
    calm, bad = dataclasses.replace(healthy(), n_optimizers=2), dataclasses.replace(swinging(), n_optimizers=2, opt=1)
    page = to_html([report_on(calm, bad)])
    assert "was called on for optimizer 1 (SGD)" in page
    assert "was called on for" not in to_html([report_on(swinging())])
