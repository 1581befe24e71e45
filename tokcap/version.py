"""The version of this package; nothing else lives here, so that builds can read it without imports."""

__version__ = "0.1.0"
