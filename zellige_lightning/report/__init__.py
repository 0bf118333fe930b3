"""What a run looked like: figures, tables and pictures. All of it measured or computed by the run."""

from zellige_lightning.report.records import StepRecord, summary

__all__ = ["StepRecord", "summary"]
