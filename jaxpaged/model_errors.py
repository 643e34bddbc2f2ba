"""What goes wrong with the files of a model."""

from __future__ import annotations


class ModelFilesError(OSError):
    """A model's file or folder is missing or unreadable; one line that names it."""
