"""Credentials stay out of configs, run folders and messages.

Access to object storage comes from where its own tools keep it (application default credentials, ~/.aws, environment
variables), never from a path.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=:/)(/?)[^/\s@'\"]*@")  # a path may have lost a slash
_QUERY = re.compile(
    r"([?&;][^=&;#\s'\"]*(?:token|key|secret|password|passwd|pwd|signature|sig|credential|auth)[^=&;#\s'\"]*=)[^&;#\s'\",)]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """`text` without what in its URLs grants access: `https://user:secret@host/x?token=abc` has *** for both."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


def holds_secret(text: str) -> bool:
    """Returns whether `text` has a URL with user information, or a parameter whose name speaks of a credential."""
    return "://" in text and masked(text) != text
