"""The images, without a Docker engine: linted, read, and their steps executed."""
