"""Errors of pipelines on Spark: part of the tree in penstock.model.errors."""

from __future__ import annotations

from penstock.model.error import PenstockError


class PipelineError(PenstockError):
    """A pipeline on Spark, or what it needs to run."""

    code = "pipeline"


class UnfitEnvironment(PipelineError):
    """Java or a package is missing or of a version that Spark does not take; nothing was started."""

    code = "pipeline.environment"


class PipelineFailed(PipelineError):
    """A query ended with an error; its checkpoint holds the last batch that was done."""

    code = "pipeline.failed"


class BatchChanged(PipelineError):
    """A batch of the sink was published in part, and its next attempt has other rows."""

    code = "pipeline.batch-changed"
