"""Capture and replay of steps whose exchanges are part of the CUDA graph."""

from ulysses_ops.graphs.buckets import Bucket
from ulysses_ops.graphs.cache import GraphCache, GraphStats
from ulysses_ops.graphs.step import CapturedStep, capture_step

__all__ = ["Bucket", "CapturedStep", "GraphCache", "GraphStats", "capture_step"]
