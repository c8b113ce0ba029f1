"""The elastic sampler as PyTorch's data loaders take it.

Source of behaviour: Horovod 0.28.1, horovod.torch.elastic.sampler.
"""

from __future__ import annotations

import torch

from perseus.elastic import sampler


class ElasticSampler(sampler.ElasticSampler, torch.utils.data.Sampler[int]):
    __doc__ = sampler.ElasticSampler.__doc__
