"""Checks the built site: each link and anchor leads somewhere, and no page loads anything from elsewhere.

`python docs/site/check.py build/docs` prints what is wrong and exits with 1.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: What a browser loads by itself: element → attribute.
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Page(HTMLParser):
    """What a page has: anchors, links, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.anchors.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in _LOADED and _LOADED[tag] in found:
            self.loaded.append(found[_LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return what is wrong with the site, one line each."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        wrong = {link: problem_of(link, path, pages) for link in page.links + page.loaded}
        found += [f"{name}: {link}: {problem}" for link, problem in wrong.items() if problem]
        found += [f"{name}: {loaded}: is loaded from elsewhere" for loaded in page.loaded if is_elsewhere(loaded)]
    for path in sorted(site.rglob("*.css")):
        urls = [first or second for first, second in _CSS_URL.findall(path.read_text(encoding="utf-8"))]
        found += [f"{path.relative_to(site)}: {url}: is loaded from elsewhere" for url in urls if is_elsewhere(url)]
    return found


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc)


def problem_of(link: str, path: Path, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link of the page `path`; "" for nothing, and for links out of the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "there is no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "the page has no such anchor"
    return ""


def main() -> int:
    site = Path(sys.argv[1])
    found = problems(site)
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
