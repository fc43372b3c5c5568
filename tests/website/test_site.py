"""The site of the documentation: built strictly, whole without a network, searched and read in a browser."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chromium import PROGRAM, Chromium

from tests.loaded_scripts import SCRIPTS
from tests.unused_port import unused_port
from trainkit import __version__
from trainkit.cli.app import COMMANDS
from trainkit.recipe.schema.fields import schema

ROOT = SCRIPTS.parent
pytestmark = [pytest.mark.cli, pytest.mark.needs("zensical>=0.0.60")]
IN_BROWSER = [
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (scripts/cluster/packages installs it)"),
]


def run(website: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build a checkout's site into a folder."""
    argv = [sys.executable, str(website), "--into", str(target)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built version's folder; an older version lies beside it."""
    target = tmp_path_factory.mktemp("docs")
    (target / "0.0.9").mkdir()
    (target / "0.0.9" / "index.html").write_text("older")
    done = run(SCRIPTS / "website" / "website.py", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / __version__


@pytest.fixture
def website(tmp_path: Path) -> Path:
    """The program in a copy of the checkout, whose pages a test may spoil."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("docs", "scripts/website"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    for name in ("trainkit", "configs", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path / "scripts" / "website" / "website.py"


def pages(site: Path) -> list[str]:
    return sorted(page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html"))


def test_every_page_is_there_as_html_and_as_markdown_and_is_listed_for_programs(site: Path) -> None:
    names = pages(site)
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {*names}
    assert all((site / f"{name}.md").is_file() for name in names)
    listed = re.findall(r"^- \[.+\]\((\S+)\.md\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == names
    whole = (site / "llms-full.txt").read_text()
    assert all((site / f"{name}.md").read_text().strip() in whole for name in names)


def test_the_version_is_shown_and_leads_to_all_versions_with_the_newest_first(site: Path) -> None:
    page = (site / "reference" / "keys.html").read_text()
    assert f"trainkit {__version__}" in page and 'href="../../index.html"' in page
    found = re.findall(r'href="([\d.]+)/index.html"', (site.parent / "index.html").read_text())
    assert found == [__version__, "0.0.9"]


def test_the_reference_has_every_key_command_exit_code_and_file_of_a_run(site: Path) -> None:
    keys = (site / "reference" / "keys.md").read_text()
    assert not [key for key in schema().settings if f"- `{key}`" not in keys and f"# {key}: " not in keys]
    commands = (site / "reference" / "commands.md").read_text()
    assert not [name for name in COMMANDS if f"\n## trainkit {name}\n" not in commands]
    assert "\n## trainkit runs diff\n" in commands and "| `--dry-run` |" in commands
    assert "| 137 | a rank or the launcher was ended" in (site / "reference" / "exit-codes.md").read_text()
    files = (site / "reference" / "run-files.md").read_text()
    assert "| `metrics.jsonl` |" in files and "| `ranks` |" in files


@pytest.mark.e2e
def test_mistakes_in_a_page_end_the_build_and_keep_the_last_site(website: Path, tmp_path: Path) -> None:
    last = tmp_path / "out" / __version__
    last.mkdir(parents=True)
    (last / "index.html").write_text("last")
    with (tmp_path / "docs" / "use.md").open("a") as page:
        page.write("\n[gone](nowhere.md)\n\n[gone](runs.md#nothing-of-that-name)\n\n![gone](pictures/nothing.svg)\n")
        page.write('\n<img src="https://example.com/a.png">\n')
    done = run(website, tmp_path / "out")
    assert done.returncode == 1
    assert "page does not exist" in done.stderr and "anchor does not exist" in done.stderr
    assert "use.html: there is no pictures/nothing.svg" in done.stderr
    assert "use.html: fetches https://example.com/a.png" in done.stderr
    assert "\nerror: " in done.stderr and "\n  next: " in done.stderr and "Traceback" not in done.stderr
    assert (last / "index.html").read_text() == "last"


def test_a_page_outside_the_navigation_and_one_that_is_missing_are_named(website: Path, tmp_path: Path) -> None:
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    (tmp_path / "docs" / "use.md").unlink()
    done = run(website, tmp_path / "out")
    assert done.returncode == 1
    assert "lost.md: in docs/, and not in the navigation" in done.stderr
    assert "use.md: in the navigation, and not in docs/" in done.stderr
    assert not (tmp_path / "out").exists()


def fetched(address: str, words: str) -> bool:
    """Whether a page has words, within two minutes."""
    for _ in range(240):
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=30) as answer:
            if words in answer.read().decode():
                return True
        time.sleep(0.5)
    return False


@pytest.mark.e2e
def test_what_is_served_follows_a_change_and_ends_with_its_server(website: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{unused_port()}"
    argv = [sys.executable, str(website), "--serve", "--address", address]
    served = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert fetched(f"http://{address}/use.html", "Let it answer")
        server = psutil.Process(served.pid).children()
        with (tmp_path / "docs" / "use.md").open("a") as page:
            page.write("\nA new sentence.\n")
        assert fetched(f"http://{address}/use.html", "A new sentence.")
    finally:
        served.terminate()
        assert served.wait(60) == 143
    assert len(server) == 1 and not server[0].is_running()


def test_pictures_are_small_whole_and_shown_by_a_page() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    pictures = [*(ROOT / "docs" / "pictures").iterdir()]
    assert len(pictures) >= 6
    for picture in pictures:
        assert picture.stat().st_size <= 150_000, picture.name
        assert any(f"pictures/{picture.name})" in text for text in texts), f"no page shows {picture.name}"
        if picture.suffix == ".svg":
            assert not re.search(r"(url\(|href=|src=)\s*[\"']?https?:", picture.read_text()), picture.name


def settled(browser: Chromium, condition: str) -> Any:
    """Wait, half a minute at most, until an expression has a value, and return it."""
    loop = f"""(async () => {{
        for (let round = 0; round < 300; round++) {{
            const value = {condition};
            if (value) return value;
            await new Promise(done => setTimeout(done, 100));
        }}
    }})()"""
    return browser.evaluate(loop)


# Texts whose contrast with what is behind them is below 4.5 to 1 (WCAG 2, level AA), each with its ratio.
PALE = """(() => {
    const parts = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a] };
    const linear = each => each <= 10 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const over = (below, above) => below.map((each, at) => each * (1 - above[3]) + above[at] * above[3]);
    const shown = {visibilityProperty: true, opacityProperty: true};
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), pale = [];
    while (texts.nextNode()) {
        const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement, behind = [];
        if (!text || !element.checkVisibility(shown) || element.closest('.md-header__title')) continue;
        for (let each = element; each; each = each.parentElement) {
            behind.unshift(parts(getComputedStyle(each).backgroundColor));
        }
        const ground = behind.reduce(over, [255, 255, 255]);
        const [one, other] = [ground, over(ground, parts(getComputedStyle(element).color))].map(light);
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < 4.5) pale.push(`${text}: ${ratio.toFixed(2)}`);
    }
    return pale;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


def undisturbed(browser: Chromium, site: Path) -> None:
    assert browser.complaints == []
    assert [each for each in browser.requests if not each.startswith((site.as_uri(), "data:"))] == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
class TestInChromium:
    """From the disk, without a server."""

    pytestmark = IN_BROWSER

    @pytest.mark.parametrize("page", ["index", "how-it-works", "runs", "reference/commands"])
    def test_a_page_is_quiet_fits_its_window_and_has_the_readers_colours(
        self, browser: Chromium, site: Path, page: str, width: int, dark: bool
    ) -> None:
        browser.open(f"{site.as_uri()}/{page}.html", width, dark=dark)
        assert settled(browser, "document.documentElement.classList.contains('js')")
        undisturbed(browser, site)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.evaluate("[...document.images].every(each => each.complete && each.naturalWidth > 0)")
        colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        shades = [int(each) for each in re.findall(r"\d+", colour)[:3]]
        assert all(each < 60 for each in shades) if dark else all(each > 200 for each in shades), colour
        assert browser.evaluate(PALE) == []

    def test_the_search_finds_a_page_and_leads_to_it(
        self, browser: Chromium, site: Path, width: int, dark: bool
    ) -> None:
        browser.open(f"{site.as_uri()}/reference/keys.html", width, dark=dark)
        opener = "document.querySelector(innerWidth > 1000 ? '.md-search__button' : 'label[for=__search]')"
        assert settled(browser, f"{opener} !== null")
        field = "document.activeElement.shadowRoot?.activeElement"
        assert settled(browser, f"({field} || ({opener}.click(), null)) && true")
        browser.call("Input.insertText", text="straggler")
        links = "[...document.activeElement.shadowRoot.querySelectorAll('a')].map(each => each.href)"
        found = settled(browser, f"{links}.length ? {links} : null")
        assert any("/runs.html" in each for each in found), found
        undisturbed(browser, site)
