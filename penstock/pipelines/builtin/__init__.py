"""The pipelines that come with Penstock, each one command: `penstock pipeline run NAME`."""

from __future__ import annotations

import importlib

MODULES = {
    "risk-tags": "penstock.pipelines.builtin.risk_tags",
    "usage": "penstock.pipelines.builtin.usage",
    "dead-letters": "penstock.pipelines.builtin.dead_letters",
    "audit": "penstock.pipelines.builtin.audit",
    "replay-compare": "penstock.pipelines.builtin.replay_compare",
    "topic-to-table": "penstock.pipelines.builtin.topic_to_table",
}
"""The module of each built-in pipeline, by the pipeline's name."""


def load() -> None:
    """Register all of them; needs PySpark, and no session."""
    for module in MODULES.values():
        importlib.import_module(module)
