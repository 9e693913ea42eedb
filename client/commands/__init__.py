"""The commands, one a file. What is slow to import is imported when a command runs, so that help is quick."""
