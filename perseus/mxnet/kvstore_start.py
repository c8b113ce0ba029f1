"""Checks that ranks begin to train with the same values. Thread-safe."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from perseus import control
from perseus.mxnet.kvstore_arguments import Key


def check_start(key: Key, value: Any, held: Any, scope: str) -> None:
    """ValueError on all ranks if a rank's value of a key differs from rank 0's, which is `held`.

    If Module updates the weights itself, it does not take rank 0's (as with MXNet's own stores), so
    ranks would train different models. In other cases nothing is checked. scope: the store's.
    """
    if os.environ.get("MXNET_UPDATE_ON_KVSTORE", "1") != "0":
        return
    same = np.array_equal(value.asnumpy(), held.asnumpy())
    if "" in control.gather_lines("same" if same else "", f"{scope}.start.{key}"):
        raise ValueError(
            f"[kvstore] ranks begin with different values of {key!r}, and with "
            f"MXNET_UPDATE_ON_KVSTORE=0 Module takes no others: unset it, or begin alike "
            f"everywhere, by mx.random.seed or arg_params"
        )
