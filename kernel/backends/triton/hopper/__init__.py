"""Kernels for compute capability 9.0 (H100, H200), written in Gluon: layouts and asynchronous products by
hand."""
