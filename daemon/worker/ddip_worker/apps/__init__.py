# SPDX-License-Identifier: Apache-2.0
"""Apps: modules that prepare a rank for a library. docs/apps.md is their interface.

Nothing here raises while a rank starts: why an app will not do is kept, and is the answer to the
first order to join, since that is when the daemon listens.
"""

import ast
import contextlib
import importlib
import inspect
import shlex
import sys
import traceback

BUILT_IN = {
    "torch": "ddip_worker.apps.torch",
    "fastai_v1": "ddip_worker.apps.fastai_v1",
    "fastai_v2": "ddip_worker.apps.fastai_v2",
    "fastai": "ddip_worker.apps.fastai_v2",
    "accelerate": "ddip_worker.apps.accelerate",
    "lightning": "ddip_worker.apps.lightning",
}
HOOKS = ("initializer", "rejoined", "before_cell", "after_cell", "set_verbose", "finalizer")
TABLES = ("requires", "imports")


class Unusable(Exception):
    """The app will not do on this interpreter: the group cannot be made with it."""

    def __init__(self, detail, hint=None):
        super().__init__(detail)
        self.content = {"detail": detail, "hint": hint}


class App:
    """The app of this rank; one for its life."""

    def __init__(self, name):
        self.name = name
        self._module = self._failure = None
        self._started = False
        try:
            self._module = _load(name)
        except Unusable as e:
            self._failure = e

    def check(self):
        """Raises Unusable if the app could not be loaded."""
        if self._failure:
            raise self._failure

    def joined(self, generation, namespace):
        """The rank is in a process group: its first one, or the one after an earlier one."""
        if self._started:
            self._call("rejoined", generation)
            return
        try:
            for statement in getattr(self._module, "imports", ()):
                exec(statement, namespace)
            self._call("initializer")
        except Exception as e:
            raise Unusable(f"the app {self.name} failed to start: {_words(e)}") from e
        self._started = True

    def before_cell(self, ranks):
        self._call("before_cell", ranks)

    def after_cell(self, ranks, status):
        self._call("after_cell", ranks, status)

    def leave(self):
        if self._started:
            try:
                self._call("finalizer")
            except Exception:
                traceback.print_exc()

    def command(self, text):
        """Runs `NAME argument key=value`; what it returns is printed."""
        name, *words = shlex.split(text) or [""]
        if name == "set_verbose" and not hasattr(self._module, name):
            return  # what a notebook says to whatever app there is
        commands = _commands(self._module)
        if name not in commands:
            has = f"; it has {', '.join(sorted(commands))}" if commands else ""
            raise ValueError(f"the app {self.name} has no command {name!r}{has}")
        pairs = [word.partition("=") for word in words]
        result = commands[name](
            *[_value(key) for key, sign, _ in pairs if not sign],
            **{key: _value(value) for key, sign, value in pairs if sign},
        )
        if result is not None:
            print(result)

    def _call(self, hook, *args):
        function = getattr(self._module, hook, None)
        if function is not None:
            function(*args)


def _load(name):
    module = _import_app(name, BUILT_IN.get(name, name))
    if not any(hasattr(module, each) for each in HOOKS + TABLES):
        raise Unusable(
            f"the module {name} is no app: it defines none of {', '.join(HOOKS + TABLES)}",
            _known(),
        )
    for library, package in getattr(module, "requires", {}).items():
        try:
            importlib.import_module(library)
        except ImportError as e:
            raise _lacks(name, package, e) from e
        except Exception as e:
            raise Unusable(f"the app {name} failed to load: {_words(e)}") from e
    return module


def _import_app(name, path):
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        missing = e.name or path
        if path == missing or path.startswith(f"{missing}."):
            raise Unusable(f"there is no app {name}: {e}", _known()) from e
        raise _lacks(name, missing.partition(".")[0], e) from e
    except (Exception, SystemExit) as e:
        raise Unusable(f"the app {name} failed to load: {_words(e)}") from e


def _lacks(name, package, error):
    return Unusable(
        f"the app {name} needs {package}, which {sys.executable} cannot import: {error}",
        f"{sys.executable} -m pip install {shlex.quote(package)}",
    )


def _known():
    return f"there are {', '.join(BUILT_IN)}; or name a module that {sys.executable} can import"


def _words(e):
    return f"{type(e).__name__}: {e}"


def _commands(module):
    """The public functions of an app, but for the hooks that are not meant to be asked for."""
    found = inspect.getmembers(module, inspect.isfunction) if module else []
    hidden = set(HOOKS) - {"set_verbose"}
    return {n: f for n, f in found if not n.startswith("_") and n not in hidden}


def _value(word):
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(word)
    return word
