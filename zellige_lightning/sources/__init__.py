"""Where tokens come from. A source reads any token range of any sample; which range, the plan decides."""

from zellige_lightning.sources.base import FieldSpec, Sample, TokenSource
from zellige_lightning.sources.dataset import DatasetSource
from zellige_lightning.sources.sampler import GlobalBatchSampler
from zellige_lightning.sources.synthetic import SyntheticSource

__all__ = ["DatasetSource", "FieldSpec", "GlobalBatchSampler", "Sample", "SyntheticSource", "TokenSource"]
