"""The site of these pages: pip install -e '.[docs]' && sphinx-build -W docs build/site

Pages are written to read well in the repository, so what only a site needs is added here.
"""

import re
from importlib.metadata import version as installed

from sphinx.application import Sphinx

project = "attncli"
author = "The attncli authors"
version = release = installed("attncli")
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"attncli {version}"
html_show_copyright = False
# Terminals and trees have no language of their own.
highlight_language = "text"

# Folders whose pages need not be listed one by one.
FOLDERS = {"zh": "中文"}


def adapt(site: Sphinx, page: str, source: list[str]) -> None:
    """Name files of the repository, which a site cannot link, and list the pages of the index."""
    outside = "../" * (page.count("/") + 1)
    link = rf"\[([^]]+)\]\({re.escape(outside)}([^)]+\.md)\)"
    text = re.sub(link, r"\1 (`\2` of the repository)", source[0])
    if page == "index":
        for caption, links in re.findall(r"^\*\*(.+)\*\*\n((?:- .*\n)+)", text, re.MULTILINE):
            text += contents(caption, re.findall(r"\(([\w/-]+)\.md\)", links))
        for folder, caption in FOLDERS.items():
            if (site.srcdir / folder).is_dir():
                text += contents(caption, [f"{folder}/*"])
    source[0] = text


def contents(caption: str, pages: list[str]) -> str:
    """A list of pages for the side bar."""
    options = f":caption: {caption}\n:hidden:\n:glob:\n"
    return "\n".join(("\n```{toctree}", options, *pages, "```\n"))


def setup(site: Sphinx) -> None:
    """What Sphinx calls first."""
    site.connect("source-read", adapt)
