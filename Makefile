# ddipd: `make` builds; `make demo` and `make check` also set up what they need (see README.md).
SHELL := /bin/bash
VERSION := 0.1.0

PREFIX     ?= /usr/local
BINDIR     ?= $(PREFIX)/bin
LIBEXECDIR ?= $(PREFIX)/libexec/ddipd
UNITDIR    ?= $(PREFIX)/lib/systemd/system
USERUNITDIR ?= $(PREFIX)/lib/systemd/user
SYSUSERSDIR ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR ?= $(PREFIX)/lib/tmpfiles.d
DOCDIR     ?= $(PREFIX)/share/doc/ddipd
DESTDIR    ?=

B      ?= build
V      ?=
Q      := $(if $(V),,@)
say     = $(if $(V),,@echo "  $(1)")
CC     ?= gcc
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
V1     := .venv-fastai-v1

# --- what the build needs ------------------------------------------------------------------------
APT_BUILD := build-essential pkg-config libmicrohttpd-dev libwebsockets-dev \
             libwebsockets-evlib-uv libuv1-dev libcjson-dev
APT_DEMO  := python3-venv curl procps
APT_CHECK := clang clang-format universal-ctags systemd chromium

PKGS := libmicrohttpd libwebsockets libuv libcjson

# Headers of the CUDA runtime, NVML and NCCL: a toolkit, or NVIDIA's wheels in .venv. Each part is
# built when its header is found; WITH_CUDA=no builds without any of them.
WITH_CUDA ?= auto
CUDA_DIRS := $(CUDA_HOME)/include $(dir $(realpath $(shell command -v nvcc)))../include \
             /usr/local/cuda/include /usr/include \
             $(wildcard $(VENV)/lib/python3*/site-packages/nvidia/*/include)
find_header = $(if $(filter no,$(WITH_CUDA)),,$(firstword $(foreach d,$(CUDA_DIRS),$(wildcard $(d)/$(1)))))
# crt/ is a package of its own in the wheels; without it the CUDA headers do not compile
CUDART_H := $(if $(call find_header,crt/host_defines.h),$(call find_header,cuda_runtime_api.h))
NVML_H   := $(call find_header,nvml.h)
NCCL_H   := $(call find_header,nccl.h)
CUDA_FLAGS := $(if $(CUDART_H),-DHAVE_CUDART -isystem $(dir $(CUDART_H))) \
              $(if $(NVML_H),-DHAVE_NVML -isystem $(dir $(NVML_H))) \
              $(if $(NCCL_H),-DHAVE_NCCL -isystem $(dir $(NCCL_H)))

WARN     := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes
# messages are cut to their buffers on purpose; which such places a compiler sees varies by version
WARN     += $(shell $(CC) -Werror -Wno-format-truncation -fsyntax-only -x c /dev/null 2>/dev/null && \
                    echo -Wno-format-truncation)
OPT      ?= -O2 -g -fstack-protector-strong -D_FORTIFY_SOURCE=2
SANITIZE ?=
CFLAGS_ALL = -std=c17 -D_GNU_SOURCE $(WARN) $(OPT) $(SANITIZE) -iquote daemon -iquote proto -MMD -MP \
             -DDDIPD_VERSION='"$(VERSION)"' -DDDIPD_WORKER_DIR='"$(LIBEXECDIR)"' \
             $(CUDA_FLAGS) $(shell pkg-config --cflags $(PKGS)) $(CFLAGS)
LIBS     = $(shell pkg-config --libs $(PKGS)) -ldl -lm

DAEMON_SRC := $(filter-out daemon/main.c,$(wildcard daemon/*.c)) proto/frame.c
WORKER_SRC := $(wildcard daemon/worker/*.c) daemon/wire.c daemon/kin.c daemon/util.c daemon/err.c proto/frame.c
DAEMON_OBJ := $(DAEMON_SRC:%.c=$(B)/%.o)
WORKER_OBJ := $(WORKER_SRC:%.c=$(B)/pic/%.o)
UNIT_TESTS := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))
FUZZ_SRC   := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_REPLAY := $(patsubst tests/fuzz/%.c,$(B)/tests/%,$(FUZZ_SRC))
FAKES      := $(patsubst tests/fakes/%.c,$(B)/fakes/%.so,$(wildcard tests/fakes/lib*.c))

.PHONY: all build deps deps-build deps-demo deps-check demo check check-gpu check-fastai-v1 screenshots unit e2e asan lint format size fuzz chaos install clean
all: build

build: $(B)/ddipd $(B)/libddipworker.so $(B)/ddip_worker
	@echo "built $(B)/ddipd and $(B)/libddipworker.so"
	@echo "  CUDA runtime: $(or $(CUDART_H),header cuda_runtime_api.h not found: built without it)"
	@echo "  NVML:         $(or $(NVML_H),header nvml.h not found: built without it)"
	@echo "  NCCL:         $(or $(NCCL_H),header nccl.h not found: built without it)"

$(B)/ddipd: $(B)/daemon/main.o $(DAEMON_OBJ)
	$(call say,LD $@)
	$(Q)$(CC) $(OPT) $(SANITIZE) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/libddipworker.so: $(WORKER_OBJ)
	$(call say,LD $@)
	$(Q)$(CC) $(OPT) $(SANITIZE) $(LDFLAGS) -shared -o $@ $^ -pthread -ldl

# The build tree is a working worker_dir: the binary finds the library and the package beside itself.
$(B)/ddip_worker:
	@mkdir -p $(B)
	ln -sfn $(CURDIR)/daemon/worker/ddip_worker $@

# Objects are rebuilt when the flags change (headers found or not, sanitizers on or off).
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CFLAGS_ALL)' | cmp -s - $@ || echo '$(CC) $(CFLAGS_ALL)' > $@
.PHONY: FORCE

$(B)/%.o: %.c $(B)/flags
	@pkg-config --exists $(PKGS) || { echo "missing headers: run \`make deps-build\`" >&2; exit 1; }
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -c -o $@ $<

$(B)/pic/%.o: %.c $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -fvisibility=hidden -pthread -c -o $@ $<

# --- setting up ----------------------------------------------------------------------------------
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
# apt-get runs only when a package is missing.
define apt_install
	@missing=$$(for p in $(1); do dpkg -s $$p >/dev/null 2>&1 || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	  echo "installing Debian packages:" $$missing; \
	  $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi
endef

deps: deps-demo deps-check

deps-demo: deps-build $(VENV)/.ready

deps-build:
	$(call apt_install,$(APT_BUILD))

deps-check:
	$(call apt_install,$(APT_CHECK))

$(VENV)/.ready: tests/requirements.txt tests/requirements-apps.txt client/pyproject.toml | deps-build
	$(call apt_install,$(APT_DEMO))
	@echo "setting up $(VENV) from tests/requirements.txt"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -r tests/requirements.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r tests/requirements-apps.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e client
	@touch $@

# fastai 1 has the name of fastai 2, so it gets an environment of its own, which has all else from .venv.
$(V1)/.ready: tests/requirements-fastai-v1.txt $(VENV)/.ready
	@echo "setting up $(V1) from tests/requirements-fastai-v1.txt"
	$(PY) -m venv --clear $(V1)
	$(V1)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/requirements-fastai-v1.txt
	@$(V1)/bin/python -c 'import pathlib, sysconfig; here = sysconfig.get_path("purelib"); \
	  there = here.replace("/$(V1)/", "/$(VENV)/"); \
	  pathlib.Path(here, "venv.pth").write_text(f"import site; site.addsitedir({there!r})\n")'
	@touch $@

# --- using and checking --------------------------------------------------------------------------
demo: deps-demo
	@$(MAKE) --no-print-directory build
	$(PY) tests/demo.py --build $(B) --out $(B)/demo

check: deps
	@$(MAKE) --no-print-directory build
	$(PY) tests/check.py --build $(B)

check-fastai-v1: deps $(V1)/.ready
	@$(MAKE) --no-print-directory build
	$(V1)/bin/python tests/check.py --build $(B) --fastai-v1

check-gpu: deps
	@$(MAKE) --no-print-directory build
	$(PY) -m pytest -p no:cacheprovider -rs tests/gpu

# The pictures of the documents, taken anew.
screenshots: deps
	@$(MAKE) --no-print-directory build
	DDIP_SCREENSHOTS=$(CURDIR)/docs/images $(PY) -m pytest -p no:cacheprovider -q tests/e2e/test_jupyterlab.py -k "training or rendering"

unit: build $(UNIT_TESTS) $(FUZZ_REPLAY) $(FAKES)

$(B)/tests/%: tests/unit/%.c $(wildcard tests/unit/*.h) $(DAEMON_OBJ) $(FAKES) $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -iquote tests/unit $(LDFLAGS) -o $@ $< $(DAEMON_OBJ) $(LIBS)

# The worker library is tested from inside: its objects instead of the daemon's.
$(B)/tests/test_ddip%: tests/unit/test_ddip%.c $(wildcard tests/unit/*.h) $(WORKER_OBJ) $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -iquote tests/unit -iquote daemon/worker $(LDFLAGS) -o $@ $< $(WORKER_OBJ) -pthread -ldl

# Targets with a daemon in them must start no processes (tests/fuzz/world.h).
$(B)/tests/fuzz_body $(B)/tests/fuzz_rank $(B)/fuzz/fuzz_body $(B)/fuzz/fuzz_rank: \
  LDFLAGS += -Wl,--wrap=start_worker,--wrap=worker_new,--wrap=worker_close,--wrap=worker_pid
$(B)/tests/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/replay.c $(wildcard tests/fuzz/*.h) $(DAEMON_OBJ) $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) $(LDFLAGS) -o $@ $< tests/fuzz/replay.c $(DAEMON_OBJ) $(LIBS)

# The same targets with clang's fuzzer (tests/fuzz/run.py says how).
$(B)/fuzz/%: tests/fuzz/%.c $(wildcard tests/fuzz/*.h) $(DAEMON_OBJ) $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -fsanitize=fuzzer $(LDFLAGS) -o $@ $< $(DAEMON_OBJ) $(LIBS)

# Stand-ins for hardware that is not there; tests name them to ddipd by path.
$(B)/fakes/%.so: tests/fakes/%.c tests/fakes/fake_gpu.h $(B)/flags
	@mkdir -p $(dir $@)
	$(call say,CC $@)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -shared $(LDFLAGS) -o $@ $<

# The whole suite again, against a daemon and worker library built with ASan and UBSan.
asan: deps
	$(PY) tests/check.py --build build-asan --asan

FUZZ_SECONDS ?= 60
fuzz:
	$(PY) tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

# Kills, stops and starves clients, ranks and the daemon while cells run, then checks what was told.
# What is done follows from SEED alone; a failure prints the command that repeats it.
STEPS ?= 1000
SEED  ?= 1
chaos: deps
	@$(MAKE) --no-print-directory build
	$(PY) tests/chaos.py --build $(B) --steps $(STEPS) --seed $(SEED) --verbose

lint: deps
	$(PY) tests/lint.py

format:
	clang-format -i $$(git ls-files '*.c' '*.h')
	$(VENV)/bin/ruff format -q . && $(VENV)/bin/ruff check -q --fix .

size:
	@python3 tests/size.py

install: build
	install -D -m 755 $(B)/ddipd $(DESTDIR)$(BINDIR)/ddipd
	install -D -m 755 $(B)/libddipworker.so $(DESTDIR)$(LIBEXECDIR)/libddipworker.so
	rm -rf $(DESTDIR)$(LIBEXECDIR)/ddip_worker
	cp -rL daemon/worker/ddip_worker $(DESTDIR)$(LIBEXECDIR)/ddip_worker
	find $(DESTDIR)$(LIBEXECDIR) -name __pycache__ -prune -exec rm -rf {} +
	install -d $(DESTDIR)$(UNITDIR) $(DESTDIR)$(USERUNITDIR)
	for u in ddipd.service ddipd.socket; do \
	  sed 's|@BINDIR@|$(BINDIR)|g' systemd/system/$$u > $(DESTDIR)$(UNITDIR)/$$u; \
	  sed 's|@BINDIR@|$(BINDIR)|g' systemd/user/$$u > $(DESTDIR)$(USERUNITDIR)/$$u; done
	install -D -m 644 -t $(DESTDIR)$(SYSUSERSDIR) systemd/sysusers.d/ddipd.conf
	install -D -m 644 -t $(DESTDIR)$(TMPFILESDIR) systemd/tmpfiles.d/ddipd.conf
	install -D -m 644 -t $(DESTDIR)$(DOCDIR) README.md LICENSE docs/*.md

clean:
	rm -rf build build-*

-include $(DAEMON_OBJ:.o=.d) $(WORKER_OBJ:.o=.d) $(B)/daemon/main.d
