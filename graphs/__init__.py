"""Capture and replay of steps whose exchanges are part of the CUDA graph."""

from ulysses_ops.graphs.step import CapturedStep, capture_step

__all__ = ["CapturedStep", "capture_step"]
