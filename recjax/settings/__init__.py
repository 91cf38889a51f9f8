"""Settings: overrides, lossless JSON, difference and hash of frozen config dataclasses."""

from recjax.settings.overrides import (
    assignments,
    config_hash,
    diff,
    flatten,
    from_json,
    matches,
    named_keys,
    override,
    to_json,
)

__all__ = ["assignments", "config_hash", "diff", "flatten", "from_json", "matches", "named_keys", "override", "to_json"]
