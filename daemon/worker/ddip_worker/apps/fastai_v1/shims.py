# SPDX-License-Identifier: Apache-2.0
"""fastai 1.0.61, of 2020, on the NumPy, pandas and torch of today.

Importing this file changes nothing yet: what stands below is done when fastai is imported, to each
module as it is loaded, since they copy names from each other. The file needs nothing of ddip: a
kernel without ranks takes it as its sitecustomize.py, or runs it first.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings

PACKAGE = "fastai"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of fastai as ever, and goes to work before and after they are loaded."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != PACKAGE:
            return None
        if name == PACKAGE:
            _before_all()
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and name in SHIMS:
            run = spec.loader.exec_module

            def exec_module(module):
                with_shim = SHIMS[name](module)
                next(with_shim)
                run(module)
                next(with_shim, None)

            spec.loader.exec_module = exec_module
        return spec


def _before_all():
    import numpy

    # numpy 1.24 took these names of Python's types away
    for alias in (int, float, object):
        if alias.__name__ not in numpy.__dict__:
            setattr(numpy, alias.__name__, alias)
    # torch 2.6 loads weights only, unless told otherwise; exported Learners are pickles of objects
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    warnings.filterwarnings("ignore", message=".*TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated")


# Each is a generator: what is done before its module is loaded, then what is done after.


def _core(module):
    yield
    import numpy

    array = module.array

    def array_of_any(a, *args, **kwargs):
        """numpy 1.24 makes no array of lists of different lengths, such as tokenised texts."""
        try:
            return array(a, *args, **kwargs)
        except ValueError:
            a = list(a)
            result = numpy.empty(len(a), dtype=object)
            result[:] = a
            return result

    module.array = array_of_any


def _basic_data(module):
    yield
    # DataLoaders get pin_memory=True; torch warns of it where there is no GPU since 1.13
    if not module.torch.cuda.is_available():
        init = module.torch.utils.data.DataLoader.__init__
        init.__defaults__ = tuple(False if value is True else value for value in init.__defaults__)


def _tabular_transform(module):
    yield
    # pandas 1.5 keeps the type of a column where it is assigned to by df.loc[:, name]

    def apply_train(self, df):
        self.categories = {}
        for name in self.cat_names:
            df[name] = df[name].astype("category").cat.as_ordered()
            self.categories[name] = df[name].cat.categories

    def apply_test(self, df):
        for name in self.cat_names:
            values = self.categories[name]
            df[name] = module.pd.Categorical(df[name], categories=values, ordered=True)

    module.Categorify.apply_train, module.Categorify.apply_test = apply_train, apply_test


def _vision_transform(module):
    yield
    # torch 1.13 took torch.solve away
    module._solve_func = lambda b, a: (module.torch.linalg.solve(a, b), None)


def _text_data(module):
    yield
    np = module.np

    def in_chunks(self):
        """SortishSampler.__iter__, but for how the chunks, the last one shorter, are shuffled."""
        order = np.random.permutation(len(self.data_source))
        for size in (50 * self.bs, self.bs):
            chunks = [order[i : i + size] for i in range(0, len(order), size)]
            if size > self.bs:
                order = np.concatenate([sorted(c, key=self.key, reverse=True) for c in chunks])
        longest = np.argmax([self.key(chunk[0]) for chunk in chunks])
        chunks[0], chunks[longest] = chunks[longest], chunks[0]
        rest = [chunks[1 + i] for i in np.random.permutation(len(chunks) - 1)]
        return iter(np.concatenate([chunks[0], *rest]))

    module.SortishSampler.__iter__ = in_chunks


def _text_transform(module):
    """spacy is needed by one tokenizer only, whose call of it is that of spacy 2."""
    absent = importlib.util.find_spec("spacy") is None
    if absent:
        spacy, symbols = types.ModuleType("spacy"), types.ModuleType("spacy.symbols")
        spacy.symbols, symbols.ORTH = symbols, None
        sys.modules.update({"spacy": spacy, "spacy.symbols": symbols})
    yield
    if absent:
        del sys.modules["spacy"], sys.modules["spacy.symbols"]

    def blank(self, lang):
        if absent:
            raise ImportError(
                "fastai's default tokenizer needs spacy: pip install spacy, or name another one, "
                "Tokenizer(tok_func=BaseTokenizer)"
            )
        self.tok = module.spacy.blank(lang)

    module.SpacyTokenizer.__init__ = blank


SHIMS = {
    "fastai.basic_data": _basic_data,
    "fastai.core": _core,
    "fastai.tabular.transform": _tabular_transform,
    "fastai.text.data": _text_data,
    "fastai.text.transform": _text_transform,
    "fastai.vision.transform": _vision_transform,
}

if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
