"""The page in a real browser without a window: its script runs, nothing is fetched, both themes look like something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_packs import bare_pack, full_pack

from moeconv.report.writer import write_report
from moert.pack.reader import Pack

pytest.importorskip("matplotlib", reason="the report's figures need matplotlib")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
SECTIONS = ["importance", "widths", "dense", "curve", "paths", "coverage", "steps", "samples", "experts"]
LIGHT, DARK = "1", "0"  # Blink's numbers for the preferred colour scheme


class Document(HTMLParser):
    """What the browser says the page became: sections with the length of their text, figures with their marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ready = ""
        self.sections: dict[str, int] = {}
        self.marks: dict[str, int] = {}
        self._section = self._figure = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "html":
            self.ready = values.get("data-ready", "")
        elif tag == "section":
            self._section = values["id"]
            self.sections[self._section] = 0
        elif tag == "figure":
            self._figure = values["id"]
            self.marks[self._figure] = 0
        elif tag in ("path", "image", "use", "text") and self._figure:
            self.marks[self._figure] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in ("section", "figure"):
            self._figure = ""
            self._section = "" if tag == "section" else self._section

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += len(data.strip())


def browse(page: Path, home: Path, *options: str) -> tuple[str, str]:
    """(stdout, stderr) of a browser that has a fresh profile and no network worth the name."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home / 'profile'}", "--enable-logging=stderr",
        "--window-size=900,4600", "--virtual-time-budget=500", *options, page.as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def console(log: str) -> list[str]:
    """Lines of the page's console: errors of scripts, refused or failed requests."""
    return [line for line in log.splitlines() if "CONSOLE" in line]


def requests(netlog: Path) -> set[str]:
    """Addresses on the network that a page from a file asked for; what the browser asks on its own is not its."""
    text = netlog.read_text("utf-8", errors="replace")
    return set(re.findall(r'"network_isolation_key":"file://.*?"url":"((?:http|ws)[^"]*)"', text))


def pixels(png: Path) -> np.ndarray:
    """[height, width, 3], from 0 to 1."""
    from matplotlib.image import imread

    return imread(png)[..., :3]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    return write_report(Pack.open(full_pack(root / "p")), root / "report")[0]


def test_every_section_renders_and_nothing_is_fetched(page: Path, tmp_path: Path) -> None:
    netlog = tmp_path / "net.json"
    dom, log = browse(page, tmp_path, "--dump-dom", f"--log-net-log={netlog}")
    document = Document(dom)
    assert document.ready == str(len(SECTIONS))
    assert list(document.sections) == SECTIONS
    assert min(document.sections.values()) > 50, document.sections
    assert len(document.marks) == 8
    assert min(document.marks.values()) > 10, document.marks
    assert console(log) == []
    assert requests(netlog) == set()


def test_sorting_by_a_column_orders_the_rows(page: Path, tmp_path: Path) -> None:
    """On a copy without the policy, where a second script presses the button for bytes. The copy also asks for an
    image from elsewhere, so that the check above is known to see such a thing."""
    more = '<script>document.querySelectorAll("th button")[4].click();</script><img src="http://elsewhere.test/x.png">'
    text, removed = re.subn('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    assert removed == 1
    copy, netlog = tmp_path / "copy.html", tmp_path / "net.json"
    copy.write_text(text.replace("</body>", f"{more}</body>"), "utf-8")
    dom, _ = browse(copy, tmp_path, "--dump-dom", f"--log-net-log={netlog}")
    assert requests(netlog) == {"http://elsewhere.test/x.png"}
    table = dom.split('class="sortable"')[1]
    assert 'aria-sort="ascending"' in table
    nbytes = [int(row.split('data-value="')[4].split('"')[0]) for row in table.split("<tr><td>")[1:]]
    assert len(nbytes) == 64
    assert nbytes == sorted(nbytes)
    assert nbytes[0] < nbytes[-1]


def test_light_and_dark_differ_and_neither_is_blank(page: Path, tmp_path: Path) -> None:
    shots = {}
    for scheme in (LIGHT, DARK):
        out = tmp_path / f"{scheme}.png"
        browse(page, tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={out}")
        shots[scheme] = pixels(out)
    background = {scheme: float(shot[2, 2].mean()) for scheme, shot in shots.items()}
    assert background[LIGHT] > 0.9
    assert background[DARK] < 0.2
    for scheme, shot in shots.items():
        other = np.abs(shot - shot[2, 2]).max(axis=2) > 0.3
        assert 0.05 < other.mean() < 0.8, scheme
        assert all(band.any() for band in np.array_split(other[:4500], 9)), f"an empty stretch in {scheme}"


def test_a_bare_pack_has_a_page_too(tmp_path: Path) -> None:
    page = write_report(Pack.open(bare_pack(tmp_path / "p")), tmp_path / "report")[0]
    dom, log = browse(page, tmp_path, "--dump-dom")
    document = Document(dom)
    assert document.ready == str(len(SECTIONS))
    assert list(document.sections) == SECTIONS
    assert list(document.marks) == ["figure-widths"]
    assert console(log) == []
