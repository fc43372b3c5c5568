"""Build the site of the documentation, show it, draw its pictures, or walk its tasks: called by `scripts/docs`."""

from __future__ import annotations

import argparse
import html
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(FOLDER)]

from reference import PAGES  # noqa: E402

from trainkit import __version__  # noqa: E402

# What a browser fetches by itself. A link to another site is the reader's choice.
FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
_IN_STYLES = re.compile(r"url\(\s*['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*;")
_EXTERNAL = re.compile(r"(?:https?:)?//")
_SCHEME = re.compile(r"\w+:|//")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_MARKED = re.compile(r"^```sh \w+$", re.MULTILINE)


def stage(work: Path, *, in_a_folder: bool) -> dict[str, Any]:
    """Lay the pages and the configuration out for the generator in a folder; the configuration.

    in_a_folder: whether the site gets a folder of its version beside others. SystemExit for pages of docs/ that the
    navigation lacks, and for the reverse.
    """
    pages = work / "pages"
    shutil.copytree(DOCS, pages)
    (pages / "index.md").write_text((ROOT / "README.md").read_text("utf-8").replace("](docs/", "]("), "utf-8")
    for name, make in PAGES.items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(make(), "utf-8")
    for page in pages.rglob("*.md"):
        # Commands that need a cluster are marked for the tests, by a word that Markdown does not know.
        page.write_text(_MARKED.sub("```sh", page.read_text("utf-8")), "utf-8")
    shutil.copytree(FOLDER / "theme", work / "theme")
    shutil.copytree(FOLDER / "theme" / "assets", pages / "assets")
    settings: dict[str, Any] = yaml.safe_load((FOLDER / "site.yml").read_text("utf-8"))
    found = {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}
    shown = [name for name, _, _ in navigation(settings)]
    wrong = [f"{name}: in docs/, and not in the navigation" for name in sorted(found - {*shown})]
    wrong += [f"{name}: in the navigation, and not in docs/" for name in sorted({*shown} - found)]
    if wrong:
        sys.exit(
            "\n".join([*wrong, "error: not every page is reached", f"  next: correct `nav` in {FOLDER / 'site.yml'}"])
        )
    settings["site_name"] = f"trainkit {__version__}"
    settings["docs_dir"], settings["site_dir"] = "pages", "site"
    settings["theme"]["custom_dir"] = "theme"
    settings["extra"]["version_folder"] = in_a_folder
    (work / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")
    return settings


def navigation(settings: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Every page in order: its file, its title, its group."""
    for group in settings["nav"]:
        for name, pages in group.items():
            for page in pages:
                yield from ((file, title, name) for title, file in page.items())


def build(target: Path) -> None:
    """Build the version of this checkout into a folder below the target, and list the versions there.

    SystemExit for a broken link, a page outside the navigation, and what a browser would fetch from elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-docs-") as temporary:
        work = Path(temporary)
        settings = stage(work, in_a_folder=True)
        argv = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
        done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
        told = _COLOUR.sub("", done.stdout + done.stderr.partition("Traceback")[0]).splitlines()
        site = work / "site"
        (site / "404.html").unlink(missing_ok=True)  # for servers, and wrong below a version's folder
        beside(site, work / "pages", settings)
        found = [*unsound(site)]
        if done.returncode or found:
            what = ("error: the site is not built", "  next: correct what is named above in docs/")
            sys.exit("\n".join([*told, *found, *what]))
        folder = target / __version__
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(site, folder)
    (target / "index.html").write_text(versions(target), encoding="utf-8")
    print(folder / "index.html")


def unsound(site: Path) -> Iterator[str]:
    """What the pages, styles and drawings of a site fetch from other sites, and links to files that it lacks."""
    for page in sorted(site.rglob("*.html")):
        reader = _Addresses()
        reader.feed(page.read_text(encoding="utf-8"))
        yield from (f"{page.relative_to(site)}: fetches {each}" for each in reader.fetched if _EXTERNAL.match(each))
        for each in reader.fetched | reader.linked:
            path = unquote(each.partition("#")[0].partition("?")[0])
            file = (page.parent / path).resolve() if path else page
            if not _SCHEME.match(each) and not file.is_file() and file != site.parent / "index.html":
                yield f"{page.relative_to(site)}: there is no {each}"
    for file in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        yield from (f"{file.relative_to(site)}: fetches {each}" for each in _IN_STYLES.findall(file.read_text("utf-8")))


class _Addresses(HTMLParser):
    """fetched: addresses that a page fetches by itself; linked: those of its links."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: set[str] = set()
        self.linked: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if (address := dict(attrs).get(FETCHED.get(tag, ""))) is not None:
            self.fetched.add(address or "/")  # none at all is a mistake
        if tag == "a" and (address := dict(attrs).get("href")):
            self.linked.add(address)


def beside(site: Path, pages: Path, settings: dict[str, Any]) -> None:
    """Write each page as Markdown beside its HTML, and for programs that read a list of them and all of them."""
    listed, whole, group = [f"# {settings['site_name']}", "", "> A training launcher driven by config files."], [], ""
    for name, title, its_group in navigation(settings):
        if its_group != group:
            group = its_group
            listed += ["", f"## {group}", ""]
        text = (pages / name).read_text("utf-8")
        (site / name).write_text(text, "utf-8")
        listed.append(f"- [{title}]({name}): {first_sentence(text)}")
        whole.append(text.strip())
    (site / "llms.txt").write_text("\n".join(listed) + "\n", "utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole) + "\n", "utf-8")


def first_sentence(text: str) -> str:
    """Of the first paragraph below the title that is prose."""
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")[1:]]
    prose = next((each for each in paragraphs if re.match(r"[A-Za-z]|`\w|\*\*\w|\[\w", each)), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose).replace("**", "")
    return re.split(r"(?<=[.:]) ", plain)[0].rstrip(":")


def versions(target: Path) -> str:
    """The page above the versions' folders, the newest first."""
    found = sorted((each.parent.name for each in target.glob("*/index.html")), key=_parts, reverse=True)
    rows = "\n".join(f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a>' for name in found)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>trainkit</title>\n'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">\n'
        "<style>body { font: 1.1rem sans-serif; margin: 3rem }</style>\n"
        f"<h1>trainkit</h1>\n<p>Documentation of version:</p>\n<ul>\n{rows}\n</ul>\n"
    )


def _parts(version: str) -> list[tuple[int, str]]:
    """1.10 comes behind 1.9."""
    return [(int(part) if part.isdigit() else -1, part) for part in version.split(".")]


def serve(address: str) -> int:
    """Show the site until Ctrl-C, and lay its pages out again when a file of docs/, or README, has changed."""
    with tempfile.TemporaryDirectory(prefix="trainkit-docs-") as temporary:
        work = Path(temporary)
        stage(work, in_a_folder=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
        server = subprocess.Popen([sys.executable, "-m", "zensical", "serve", "--dev-addr", address], cwd=work)
        try:
            seen = changes()
            while server.poll() is None:
                time.sleep(0.5)
                if seen != (seen := changes()):
                    renew(work)
        finally:
            server.terminate()
            server.wait()
        return server.returncode


def changes() -> dict[Path, float]:
    """When each source was written."""
    return {path: path.stat().st_mtime for path in (*DOCS.rglob("*"), ROOT / "README.md") if path.is_file()}


def renew(work: Path) -> None:
    """Bring the pages that a server shows up to date; those that are the same stay untouched."""
    with tempfile.TemporaryDirectory(prefix="trainkit-docs-") as temporary:
        try:
            stage(Path(temporary), in_a_folder=False)
        except SystemExit as error:  # a page outside the navigation, while somebody writes it
            print(error, file=sys.stderr)
            return
        for new in (path for path in (Path(temporary) / "pages").rglob("*") if path.is_file()):
            old = work / "pages" / new.relative_to(Path(temporary) / "pages")
            if not old.exists() or old.read_bytes() != new.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(new, old)


def main() -> int:
    """Build, show, draw or walk; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build the site of the documentation.")
    parser.add_argument("--serve", action="store_true", help="show it, and build it again after each change")
    parser.add_argument("--address", default="127.0.0.1:8000", help="where --serve shows it")
    parser.add_argument("--pictures", nargs="*", metavar="NAME", help="draw docs/pictures again, or these of them")
    parser.add_argument("--walk", nargs="*", metavar="TASK", help="walk the tasks of newcomers by the pages alone")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "docs", help="the folder above the versions")
    given = parser.parse_args()
    if given.pictures is not None:
        import pictures

        pictures.draw(given.pictures)
    elif given.walk is not None:
        import walk

        return walk.walk_all(given.walk)
    elif given.serve:
        return serve(given.address)
    else:
        build(given.into.resolve())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
