"""The site builds in strict mode, its links lead somewhere, and it opens in a browser."""

import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from filelock import FileLock

from gradrein.persample import PerSample

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "site"))
import live  # noqa: E402
import publish  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        self.links |= {attributes[key] for key in ("href", "src") if attributes.get(key)}


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build a copy, once for all workers."""
    pytest.importorskip("zensical", reason="built with zensical: make test-docs")
    pytest.importorskip("matplotlib", reason="notebooks draw with it: make test-docs")
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "site").exists():
            build(folder)
    return folder / "site"


def build(folder):
    """Build the site, with a stand-in for the report, which `make docs` runs."""
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    import notebooks  # needs matplotlib

    notebooks.write_pages(folder / "docs/notebooks")
    (folder / "docs/live").mkdir(exist_ok=True)
    live.trace_page(folder / "docs/live/trace.html")
    (folder / "docs/live/report.html").write_text("<!doctype html><title>report</title><h1>report</h1>")
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr


def test_internal_links_and_anchors_exist(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    missing = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            where = (path.parent / unquote(target)).resolve() if target else path
            where = where / "index.html" if where.is_dir() else where
            lost = anchor and where in pages and unquote(anchor) not in pages[where].anchors
            if not target.startswith("/") and (not where.exists() or lost):
                missing.append(f"{path.relative_to(site)} -> {link}")
    assert not missing, "\n".join(sorted(missing))


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]+)|<link[^>]*stylesheet[^>]*href=\"(https?:[^\"]+)",
            path.read_text(),
        )
        assert not loaded, f"{path.relative_to(site)} loads {loaded}"


def test_every_name_of_the_reference_says_what_to_see_also(site):
    for path in (site / "api").glob("*/index.html"):
        if path.parent.name == "errors":  # a tree of its own
            continue
        sections = re.split(r"<h2 id=", path.read_text())[1:]
        without = [part.split('"')[1] for part in sections if "doc-heading" in part and 'class="see-also"' not in part]
        assert not without, f"{path.parent.name}: {without}"


def test_the_reference_has_the_methods_of_a_result(site):
    page = (site / "api/per-sample/index.html").read_text()
    methods = [name for name, _ in inspect.getmembers(PerSample, inspect.isfunction) if not name.startswith("_")]
    assert "clip_" in methods
    assert not [name for name in methods if f'id="gradrein.persample.PerSample.{name}"' not in page]


def test_search_finds_the_drop_in(site):
    assert "clip_grad_norm_" in (site / "search.json").read_text()


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")


@contextlib.contextmanager
def served(folder):
    """Serve a folder, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def opened(address, profile, *options):
    """Open a page in a browser, and return its document and what the browser logged."""
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
              "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--dump-dom",
              f"--user-data-dir={profile}"]  # fmt: skip
    done = subprocess.run([BROWSER, *common, *options, address], capture_output=True, text=True, timeout=240)
    return done.stdout, done.stderr


@pytest.fixture
def versions(site, tmp_path):
    """The site as it is published: a folder for each version."""
    publish.place(site, tmp_path, "dev")
    return tmp_path


@needs_browser
@pytest.mark.parametrize(
    ("page", "size", "scheme"), [("", "1200,900", "default"), ("api/clip/", "400,900", "slate")], ids=["light", "dark"]
)
def test_pages_open_without_an_error(versions, tmp_path_factory, page, size, scheme):
    options = [f"--blink-settings=preferredColorScheme={int(scheme == 'default')}", "--virtual-time-budget=4000"]
    with served(versions) as address:
        page, log = opened(
            f"{address}/dev/{page}", tmp_path_factory.mktemp("profile"), *options, f"--window-size={size}"
        )
    assert "CONSOLE" not in log
    assert "<h1" in page
    assert re.search(rf'<body[^>]*data-md-color-scheme="{scheme}"', page)  # drawn with its theme
    assert 'class="md-version"' in page


# Each page in a frame of each width; a page that is wider than its frame says so.
WIDE = """<!doctype html><body><script>
const pages = PAGES;
const frame = document.createElement("iframe");
frame.style.height = "900px";
document.body.append(frame);
async function look() {
  for (const page of pages) for (const width of [1200, 400]) {
    frame.style.width = width + "px";
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const wide = frame.contentDocument.documentElement.scrollWidth;
    if (wide > width) document.body.append(`TOO WIDE ${page} ${wide} of ${width};`);
  }
  document.body.append("LOOKED AT " + pages.length);
}
look();
</script>"""


@needs_browser
def test_no_page_is_wider_than_its_window(site, tmp_path):
    pages = sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    (folder / "wide.html").write_text(WIDE.replace("PAGES", json.dumps([f"{page}/" for page in pages])))
    with served(folder) as address:
        page, _ = opened(f"{address}/wide.html", tmp_path / "profile", "--window-size=1300,1000", "--timeout=200000")
    said = page.rpartition("</script>")[2]
    assert f"LOOKED AT {len(pages)}" in said
    assert "TOO WIDE" not in said, said


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the site and says nothing."""

    def log_message(self, *_):
        pass
