"""The gfx950 backend: kernels in FlyDSL, launched by HIP on the device or on the simulated one."""
