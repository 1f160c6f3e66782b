# SPDX-License-Identifier: Apache-2.0
"""Learners that train on all ranks: `fit` is wrapped, and gets one callback more.

Outside of `fit` every rank works alone on the whole data; so fastai is told that nothing is
distributed (functions.py), and what is shared in a fit is shared here.
"""

import contextlib
import functools
import math

import fastai.basics as fastai
import torch
import torch.distributed as dist
from fastai.callbacks import LRFinder

from ddip_worker.apps import agree, cell, ddp
from ddip_worker.apps.fastai_v1 import metrics, shards
from ddip_worker.apps.first import rank0_first

_under_way = []  # Learners whose fit is on all ranks


def install():
    learner = fastai.Learner
    learner.fit, learner.save = _fit_in_ddp(learner.fit), _save_first(learner.save)
    LRFinder.on_train_begin = _remember(LRFinder.on_train_begin)
    LRFinder.on_train_end = _put_back(LRFinder.on_train_end)


class Wrapped(ddp.Wrapped):
    """Ranks do not wait for each other while they validate."""

    def forward(self, *args, **kwargs):
        if self.training:
            return super().forward(*args, **kwargs)
        return self.module(*args, **kwargs)


class Sharing(fastai.Callback):
    """Makes the numbers of all ranks of what each has got, before other callbacks see them."""

    _order = -100

    def __init__(self, model):
        self.model, self.loss = model, None

    def on_epoch_begin(self, **kwargs):
        self.validated = 0

    def on_batch_begin(self, train, **kwargs):
        if not train and self.validated == 0:
            agree.share_buffers(self.model)

    def on_backward_begin(self, last_loss, smooth_loss, **kwargs):
        """So that all ranks stop, or none does: early, for NaN, or when lr_find diverges."""
        loss = last_loss.detach().float()
        both = torch.stack([loss, smooth_loss.to(loss)])
        dist.all_reduce(both)
        self.loss, smooth_loss = (both / dist.get_world_size()).cpu()
        return {"smooth_loss": smooth_loss}

    def on_batch_end(self, train, last_target, **kwargs):
        if train:
            return {"last_loss": self.loss}
        self.validated += metrics.batch_size(last_target)

    def on_epoch_end(self, last_metrics, **kwargs):
        if last_metrics[0] is not None:
            loss = metrics.mean(last_metrics[0] * self.validated, self.validated)
            last_metrics = [loss, *last_metrics[1:]]
        return {"last_metrics": agree.from_rank_0(agree.copied(last_metrics))}


def _fit_in_ddp(fit):
    @functools.wraps(fit)
    def fit_in_ddp(learn, epochs, lr=fastai.defaults.lr, wd=None, callbacks=None):
        if not cell.is_shared() or any(one is learn for one in _under_way):
            ddp.check_cell()
            return fit(learn, epochs, lr, wd, callbacks)
        if not getattr(learn, "opt", False):
            learn.create_opt(learn.lr_range(lr), learn.wd if wd is None else wd)
        callbacks = fastai.listify(callbacks)
        with _in_ddp(learn) as sharing:
            for finder in callbacks:  # it counted the batches before they were shared out
                if isinstance(finder, LRFinder):
                    epochs = math.ceil(finder.sched.n_iter / len(learn.data.train_dl))
            fit(learn, epochs, lr, wd, [*callbacks, sharing])

    return fit_in_ddp


@contextlib.contextmanager
def _in_ddp(learn):
    """The Learner's model, data and metrics are shared with the other ranks, then its own again."""
    data, seeds = learn.data, ddp.Seeds()
    saved = learn.model, learn.metrics, data.train_dl, data.valid_dl
    _under_way.append(learn)
    try:
        seeds.part()
        agree.check(_describe(learn))
        agree.share_optimizer(learn.opt, learn.opt.load_state_dict)
        data.train_dl = shards.shard(data.train_dl, fill=True, split=ddp.split_batches)
        ddp.check_share(len(data.train_dl), data.train_dl.batch_size)
        if not data.empty_val:
            data.valid_dl = shards.shard(data.valid_dl, fill=False)
        learn.metrics = metrics.shared(learn.metrics)
        learn.model = _wrap(learn.model)
        yield Sharing(saved[0])
        agree.share_buffers(saved[0])
    finally:
        _under_way.pop()
        learn.model, learn.metrics, data.train_dl, data.valid_dl = saved
        seeds.join()


def _wrap(model):
    """What WeightDropout makes anew at each step, of its raw weights, is no parameter to DDP."""
    dropouts = [m for m in model.modules() if hasattr(m, "_setweights")]
    for dropout in dropouts:
        for name in dropout.layer_names:
            dropout.module._parameters.pop(name, None)
    try:
        return ddp.wrap(model, Wrapped)
    finally:
        for dropout in dropouts:
            dropout.reset()


def _describe(learn):
    """(name, value) of all that must be the same."""
    data = learn.data
    for kind, dl in (("training", data.train_dl), ("validation", data.valid_dl)):
        if dl is None:
            continue
        dataset = data._grab_dataset(dl)
        yield f"number of {kind} items", agree.length(dataset)
        yield f"{kind} batch size", dl.batch_size
        x, y = (getattr(dataset, part, None) for part in "xy")
        yield f"{kind} items", agree.sample(getattr(x, "items", None))
        yield f"{kind} rows", agree.sample(getattr(x, "inner_df", None))  # items just count them
        yield f"{kind} labels", agree.sample(getattr(y, "items", None))
    x, y = (getattr(data.train_ds, part, None) for part in "xy")
    yield "vocabulary", agree.words(getattr(getattr(x, "vocab", None), "itos", None))
    yield "categories", agree.words(getattr(x, "classes", None))
    yield "classes", agree.words(getattr(y, "classes", None))
    yield "model", agree.parameters(learn.model)


def _save_first(save):
    """What a callback saves, another loads when the fit ends, if it is there."""

    @functools.wraps(save)
    def saved(learn, *args, **kwargs):
        if _under_way:
            return rank0_first(save, learn, *args, **kwargs)
        return save(learn, *args, **kwargs)

    return saved


# LRFinder saves the Learner to a file and loads it again. Each rank remembers its own instead.


def _remember(on_train_begin):
    def remember(finder, **kwargs):
        learn = finder.learn

        def save(name):
            state = fastai.get_model(learn.model).state_dict(), learn.opt.state_dict()
            finder.remembered = [agree.copied(one) for one in state]

        with _instead(learn, save=save):
            return on_train_begin(finder, **kwargs)

    return remember


def _put_back(on_train_end):
    def put_back(finder, **kwargs):
        learn = finder.learn

        def load(name, purge):
            model, opt = finder.__dict__.pop("remembered")
            fastai.get_model(learn.model).load_state_dict(model)
            learn.opt.load_state_dict(opt)

        with _instead(learn, load=load):
            return on_train_end(finder, **kwargs)

    return put_back


@contextlib.contextmanager
def _instead(learn, **methods):
    vars(learn).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(learn)[name]
