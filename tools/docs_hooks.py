"""MkDocs hooks: the documentation is read on the repository's pages and as a site, from the same files.

Notebooks, changelog and CONTRIBUTING stay where they are and become pages of the site. Links from a page to a file
outside of docs/ lead to the file's page, or to the file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
_BADGE = re.compile(r'<img(?=[^>]*\ssrc="https?://)[^>]*\salt="([^"]*)"[^>]*>')
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def outside() -> list[str]:
    """Files outside of docs/ that are part of the site, by their path in the repository."""
    notebooks = [path for kind in ("*.ipynb", "images/*") for path in sorted((ROOT / "notebooks").glob(kind))]
    return [*PAGES, *(path.relative_to(ROOT).as_posix() for path in notebooks)]


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of docs/."""
    from mkdocs.structure.files import File

    for path in outside():
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


on_files.mkdocs_priority = 100  # before the plugin that turns notebooks into pages  # type: ignore[attr-defined]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that leave docs/, or that start outside of it."""
    source = page.file.src_uri
    place = posixpath.dirname(source if source in outside() else f"docs/{source}")
    return rewritten(markdown, place, source, config.repo_url)


def rewritten(markdown: str, place: str, source: str, repo_url: str) -> str:
    """A page with its links to files as the site has them.

    Args:
        place: the page's folder in the repository.
        source: the page's path in the site.
        repo_url: where the repository is found on the web.
    """
    pages = outside()

    def link(match: re.Match[str]) -> str:
        before, target, anchor, after = match[1], match[2], match[3] or "", match[4]
        if re.match(r"[a-z]+:", target) or target.startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(place, target))
        if path.startswith("docs/"):
            new = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(source) or ".")
        elif path in pages:
            new = posixpath.relpath(path, posixpath.dirname(source) or ".")
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            new = f"{repo_url.rstrip('/')}/{kind}/main/{path}"
        return f"{before}{new}{anchor}{after}"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Notebook pages: pictures are found from the folder of the page, and badges from the web become plain links."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    if config.use_directory_urls:
        html = html.replace('src="images/', 'src="../images/')
    return _BADGE.sub(lambda match: f"{match[1]} ", html)
