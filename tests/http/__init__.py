"""The sidecar as its users meet it: a live server on loopback."""
