"""Virtual hosts under the name that they had: they are in the package now."""

from perseus.bench.virtual_hosts import *  # noqa: F403
