"""A stand-in HIP: FlyDSL's own launcher runs on it, and the interpreter executes each kernel it launches."""

from __future__ import annotations

from kernel.gfx950.hip.device import HipCallError, LaunchRecord, SimulatedDevice, simulated_device

__all__ = ["HipCallError", "LaunchRecord", "SimulatedDevice", "simulated_device"]
