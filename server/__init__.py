"""Reserved for the HTTP sidecar around one scorer; nothing is here yet."""
