"""Hook of mkdocs: links of the pages to files of the repository, which the site does not contain.

Figures are copied to the site; other links become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_FIGURES = "bench/results"
_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the figures to the files of the site."""
    for figure in sorted((_ROOT / _FIGURES).glob("*.png")):
        files.append(File.generated(config, f"{_FIGURES}/{figure.name}", abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with links to the copied figures and without links to other files of the repository."""
    return _LINK.sub(_rewritten, markdown)


def _rewritten(link: re.Match[str]) -> str:
    mark, text, target = link.groups()
    return f"{mark}[{text}]({target})" if target.startswith(_FIGURES) and target.endswith(".png") else text
