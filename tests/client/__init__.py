"""The client and the command's remote half: a live server on loopback, and scripted answers."""
