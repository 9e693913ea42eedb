"""The HTTP sidecar: one `IndexScorer`, to test and profile it apart from an engine."""
