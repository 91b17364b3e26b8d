"""Benchmarks: cases, the harness that times them, and the peers they are held against."""

from penstock.bench.case import CASES, Case, Window, register
from penstock.bench.measure import Meter, Sample
from penstock.bench.report import compare, compare_table, result_table
from penstock.bench.runner import compare_files, complete, list_cases, run_case

__all__ = [
    "CASES",
    "Case",
    "Meter",
    "Sample",
    "Window",
    "compare",
    "compare_files",
    "compare_table",
    "complete",
    "list_cases",
    "register",
    "result_table",
    "run_case",
]
