"""The one place of the version: CMakeLists.txt and setup.py read it here, and the core has it."""

__version__ = "0.1.0"
