# SPDX-License-Identifier: Apache-2.0
"""Learners that train on all ranks: a callback that each Learner gets, and what has no hook.

The callback wraps model and data when `fit` begins; `fit` itself is wrapped because callbacks are
not told of an exception, and the Learner must be whole again after one. Outside of `fit` every rank
works alone on the whole data: validate, get_preds, predict and show_results give the same on each.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from fastai.basics import Callback, Learner, Recorder, defaults, get_model, noop
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import LRFinder, ParamScheduler
from fastai.callback.tracker import TerminateOnNaNCallback, TrackerCallback
from fastai.metrics import CorpusBLEUMetric, Dice, DiceMulti
from torch.nn.parallel import DistributedDataParallel

from ddip_worker.apps import agree, cell, ddp
from ddip_worker.apps.fastai_v2 import shards

SUMS = {  # and of their subclasses, those of the Jaccard coefficient
    Dice: ("inter", "union"),
    DiceMulti: ("inter", "union"),
    CorpusBLEUMetric: ("pred_len", "targ_len", "corrects", "counts"),
}


def install():
    defaults.callbacks.append(DdipCallback)
    Learner.fit = _fit_in_ddp(Learner.fit)
    LRFinder.before_fit, LRFinder.after_fit = _remember, _put_back


class DdipCallback(Callback):
    """`learn.ddip`: wraps model and data of a fit, once the model is on its device."""

    order = 11  # after mixed precision, as fastai's DistributedTrainer

    def __init__(self):
        self.is_fitting, self.saved, self.extra, self.seeds = False, None, [], None

    def __reduce__(self):
        return Callback, ()  # an exported Learner must not need this module

    @contextlib.contextmanager
    def fitting(self):
        self.is_fitting = True
        self.seeds = ddp.Seeds()
        logger = self.learn.logger
        try:
            yield
        finally:
            self.is_fitting = False
            self._unwrap()
            self.learn.logger = logger
            self.seeds.join()

    def before_fit(self):
        if not self.is_fitting:
            return
        learn = self.learn
        self.seeds.part()
        agree.check(_describe(learn))
        agree.share_optimizer(learn.opt, functools.partial(_load_optimizer, learn.opt))
        self.saved = learn.model, list(learn.dls.loaders)
        learn.dls.loaders = [shards.shard(dl) for dl in learn.dls.loaders]
        ddp.check_share(len(learn.dls.train), _batch_size(learn.dls.train))
        if not isinstance(learn.model, DistributedDataParallel):
            learn.model = ddp.wrap(learn.model)
        if not cell.is_first() and not learn._grab_cbs(ProgressCallback):
            learn.logger = noop
        if hasattr(learn, "lr_finder"):  # it counted the batches before they were shared out
            learn.n_epoch = learn.lr_finder.num_it // len(learn.dls.train) + 1
        self._add_agreement()

    def before_train(self):
        sampler = getattr(self.learn.dl, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.learn.epoch)

    def before_validate(self):
        if self.is_fitting and not hasattr(self.learn, "gather_preds"):
            self.learn.dl = shards.shard(self.learn.dl)
        elif cell.is_shared():
            self.learn.dl = shards.Alone(self.learn.dl)

    def after_fit(self):
        if self.saved:
            agree.share_buffers(get_model(self.learn.model))
            self._unwrap()

    def _add_agreement(self):
        if any(_sums(metric) for metric in self.learn.metrics):
            self.extra.append(SumMetrics())
        if self.learn._grab_cbs(TerminateOnNaNCallback):
            self.extra.append(AgreeOnNaN())
        if self.learn._grab_cbs(TrackerCallback):
            self.extra.append(AgreeOnValues())
        self.learn.add_cbs(self.extra)

    def _unwrap(self):
        if self.saved:
            self.learn.remove_cbs(self.extra)
            self.learn.model, self.learn.dls.loaders = self.saved
            self.saved, self.extra = None, []


class SumMetrics(Callback):
    """Metrics that add up by themselves, without fastai's to_detach, add up over all ranks."""

    order = Recorder.order - 0.5

    def after_validate(self):
        for metric in self.learn.metrics:
            for name in _sums(metric):
                every = agree.gather(getattr(metric, name))
                setattr(metric, name, functools.reduce(_add, every))


class AgreeOnNaN(Callback):
    """A loss that is not finite on one rank counts as such on all, so that all stop, or none."""

    order = TerminateOnNaNCallback.order - 0.5

    def after_batch(self):
        bad = (~torch.isfinite(self.learn.loss.detach())).any().float()
        dist.all_reduce(bad)
        if bad:
            self.learn.loss = torch.full_like(self.learn.loss, float("nan"))


class AgreeOnValues(Callback):
    """Early stopping and its kind decide by rank 0's numbers."""

    order = Recorder.order + 1

    def after_epoch(self):
        values = self.learn.recorder.values
        values[-1][:] = agree.from_rank_0(list(values[-1]))


def _sums(metric):
    """The names of what such a metric adds up."""
    return next((names for kind, names in SUMS.items() if isinstance(metric, kind)), ())


def _add(a, b):
    if isinstance(a, dict):
        return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    return [_add(*pair) for pair in zip(a, b, strict=True)] if isinstance(a, list) else a + b


def _fit_in_ddp(fit):
    @functools.wraps(fit)
    def fit_in_ddp(learn, *args, **kwargs):
        ddip = _callback_of(learn)
        if ddip.is_fitting or not cell.is_shared():
            ddp.check_cell()
            return fit(learn, *args, **kwargs)
        with ddip.fitting():
            return fit(learn, *args, **kwargs)

    return fit_in_ddp


def _callback_of(learn):
    """Its DdipCallback; a Learner that was made elsewhere gets one."""
    found = learn._grab_cbs(DdipCallback)
    return found[0] if found else learn.add_cb(DdipCallback()).ddip


def _describe(learn):
    """(name, value) of all that must be the same."""
    for kind, dl in zip(("training", "validation"), learn.dls.loaders, strict=False):
        dataset = getattr(dl, "dataset", None)
        yield f"number of {kind} items", agree.length(dataset)
        yield f"{kind} batch size", _batch_size(dl)
        yield f"{kind} items", agree.sample(getattr(dataset, "items", dataset))
    for name in ("vocab", "classes"):
        words = agree.words(getattr(learn.dls, name, None))
        yield "vocabulary" if name == "vocab" else name, words
    yield "model", agree.parameters(learn.model)


def _batch_size(dl):
    return getattr(dl, "bs", None) or getattr(dl, "batch_size", None)


# LRFinder saves the model to a file and loads it again: in DDP only rank 0 would do either, and
# then wait for the others. Each rank remembers its own in memory instead.


def _remember(self):
    ParamScheduler.before_fit(self)
    model, opt = get_model(self.learn.model), self.learn.opt
    self.remembered = agree.copied(model.state_dict()), agree.copied(opt.state_dict())
    self.best_loss = float("inf")


def _put_back(self):
    self.learn.opt.zero_grad()  # as fastai's, before the optimizer is detached
    model, opt = self.remembered
    get_model(self.learn.model).load_state_dict(model)
    _load_optimizer(self.learn.opt, opt)
    self.remembered = None


def _load_optimizer(opt, state):
    """opt.load_state_dict, with tensors where their parameters are."""
    opt.load_state_dict(state)
    for p, *_ in opt.all_params():
        if p in opt.state:
            opt.state[p] = agree.moved(opt.state[p], p.device)
