"""Titles and names of people as parts of file names.

>>> slug("Label flip, T_G = 5")
'label-flip-t-g-5'
"""

import hashlib
import re

# Characters of a part of a file name. File systems allow 255 bytes, suffixes included.
_MAX_SLUG = 200


def slug(text: str) -> str:
    """Convert a title to lower-case letters, digits and hyphens; a long one ends in a hash."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(words) <= _MAX_SLUG:
        return words
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{words[: _MAX_SLUG - 9]}-{digest}"
