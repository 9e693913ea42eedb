"""The ``nvfp4-indexer`` command."""
