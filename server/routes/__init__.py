"""The routes, one concern a file."""

from __future__ import annotations
