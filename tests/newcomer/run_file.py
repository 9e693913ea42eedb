"""Runs a program that a page has, in a process that has the project imported."""

import runpy
import sys

runpy.run_path(sys.argv[1], run_name="__main__")
