"""Names of KVStores: MXNet silently takes most names that it does not know for "local".

With a misspelt dist_sync_perseus every rank would train alone, or look for parameter servers.
Thread-safe after import.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import wraps
from typing import Any

import mxnet as mx

TYPE = "dist_sync_perseus"
SPELLINGS = (TYPE, "dist-sync-perseus")

# No name of MXNet's is as similar: dist_sync_device has 0.67.
_CLOSE = 0.75


def check_name(name: Any) -> None:
    """ValueError for a name that MXNet would misunderstand; MXNet judges all others itself."""
    known = mx.kvstore.KVStoreBase.kv_registry
    if not isinstance(name, str) or name.lower() in known:
        return
    words = name.lower()
    if "perseus" in words or get_close_matches(words, SPELLINGS, cutoff=_CLOSE):
        raise ValueError(f"[kvstore] Unknown store {name!r}; did you mean {TYPE!r}?")
    if words.startswith("dist") and not os.environ.get("DMLC_NUM_WORKER"):
        raise ValueError(
            f"[kvstore] {name!r} is MXNet's store on parameter servers, of which this job has none "
            f"(DMLC_NUM_WORKER is not set): did you mean {TYPE!r}?"
        )


def check_names() -> None:
    """Have mx.kvstore.create check names; gluon's Trainer and Module call it."""
    create = mx.kvstore.create

    @wraps(create)
    def checked(name: str = "local") -> Any:
        check_name(name)
        return create(name)

    mx.kvstore.create = checked
