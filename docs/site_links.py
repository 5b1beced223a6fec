"""Hook of mkdocs: links of the pages to files of the repository, which the site does not contain.

They become plain text.
"""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page without links to files of the repository."""
    return _LINK.sub(r"\1", markdown)
