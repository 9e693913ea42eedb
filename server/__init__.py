<<<<<<< HEAD
"""The HTTP sidecar: one `IndexScorer` for people who test and profile it apart from an engine."""

from __future__ import annotations
=======
"""Reserved for the HTTP sidecar around one scorer; nothing is here yet."""
>>>>>>> main
