# SPDX-License-Identifier: Apache-2.0
"""Metrics of all ranks' items, while each rank validates on its share of them."""

from fastai.basics import AverageMetric, Callback, camel2snake, first_el, listify

from ddip_worker.apps import agree


def shared(metrics):
    """The metrics of a Learner, made to count what all ranks have seen."""
    return [_Replayed(m) if isinstance(m, Callback) else _Averaged(m) for m in listify(metrics)]


class _Averaged(AverageMetric):
    def on_epoch_end(self, last_metrics, **kwargs):
        self.val, self.count = _sums(self.val, self.count)
        return super().on_epoch_end(last_metrics, **kwargs)


class _Replayed(Callback):
    """A metric that collects what it wants: it is given the outputs of all ranks at the end."""

    def __init__(self, metric):
        self.metric, self.batches = metric, []
        self.name = getattr(metric, "name", camel2snake(type(metric).__name__))

    def on_train_begin(self, **kwargs):
        return self.metric.on_train_begin(**kwargs)

    def on_train_end(self, **kwargs):
        return self.metric.on_train_end(**kwargs)

    def on_epoch_begin(self, **kwargs):
        self.batches = []
        return self.metric.on_epoch_begin(**kwargs)

    def on_batch_end(self, last_output, last_target, **kwargs):
        self.batches.append(agree.copied([last_output, last_target]))

    def on_epoch_end(self, **kwargs):
        for batches in agree.gather(self.batches):
            for output, target in batches:
                self.metric.on_batch_end(**{**kwargs, "last_output": output, "last_target": target})
        self.batches = []
        return self.metric.on_epoch_end(**kwargs)


def batch_size(target):
    return first_el(target).shape[0]


def mean(total, count):
    """Of all ranks' items, from this rank's total and count of them."""
    total, count = _sums(total, count)
    return total / count


def _sums(*numbers):
    return [sum(column) for column in zip(*agree.gather(numbers), strict=True)]
