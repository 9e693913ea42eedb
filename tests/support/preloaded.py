"""What the process that tests are forked from has done: imports, and the trial of the cpu backend.

A fork inherits all of it.
"""

# ruff: noqa: F401 - for the forks

import gc

import matplotlib.pyplot
import numpy.random
import torch
import uvicorn.lifespan.on
import uvicorn.loops.auto

import client.cli
import client.demonstration
import client.engine_report
import client.plots
import client.report.page
import kernel.gfx950.hip
import server.serve
import tests.support.process_group
from kernel.backends.cpu.backend import agreeing_shapes

_threads = torch.get_num_threads()
torch.set_num_threads(1)  # OpenMP's threads would not be there in a fork, which would wait for them
agreeing_shapes()
torch.set_num_threads(_threads)
# A collection in a fork would search all this, and copy its pages.
gc.collect()
gc.freeze()
