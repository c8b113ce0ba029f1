"""Stands where the native core is missing, which Python would import in its place."""

from perseus.installed import MissingCoreError, remedy

raise MissingCoreError(f"perseus has no native core: {remedy()}", name=__name__)
