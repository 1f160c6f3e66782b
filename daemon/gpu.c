/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.c - the GPUs of this machine: which there are, how busy they are, which ones a user means.
 *
 * CUDA is asked once, in a process of its own (probe.c); NVML stays open here for gpu_refresh. The
 * two number devices differently and NVML ignores CUDA_VISIBLE_DEVICES, so devices are matched by
 * UUID, or by PCI address where CUDA gives a MIG instance's UUID.
 */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "dl.h"
#include "log.h"
#include "probe.h"

#define GPU_UUID_DIGITS_MIN 8

#ifdef HAVE_NVML
#include <nvml.h>

struct gpu_nvml {
    __typeof__(nvmlInit_v2) *init;
    __typeof__(nvmlShutdown) *shutdown;
    __typeof__(nvmlErrorString) *error_string;
    __typeof__(nvmlSystemGetDriverVersion) *driver_version;
    __typeof__(nvmlDeviceGetCount_v2) *count;
    __typeof__(nvmlDeviceGetHandleByIndex_v2) *handle;
    __typeof__(nvmlDeviceGetUUID) *uuid;
    __typeof__(nvmlDeviceGetName) *name;
    __typeof__(nvmlDeviceGetPciInfo_v3) *pci;
    __typeof__(nvmlDeviceGetMemoryInfo) *memory;
    __typeof__(nvmlDeviceGetUtilizationRates) *utilisation;
    __typeof__(nvmlDeviceGetComputeRunningProcesses_v3) *processes;
};

#define NVML(slot, name, required) DL_SYMBOL(struct gpu_nvml, slot, name, required)

static const struct dl_symbol gpu_nvml_symbols[] = {
    NVML(init, "nvmlInit_v2", true),
    NVML(shutdown, "nvmlShutdown", true),
    NVML(error_string, "nvmlErrorString", true),
    NVML(driver_version, "nvmlSystemGetDriverVersion", true),
    NVML(count, "nvmlDeviceGetCount_v2", true),
    NVML(handle, "nvmlDeviceGetHandleByIndex_v2", true),
    NVML(uuid, "nvmlDeviceGetUUID", true),
    NVML(name, "nvmlDeviceGetName", true),
    NVML(pci, "nvmlDeviceGetPciInfo_v3", true),
    NVML(memory, "nvmlDeviceGetMemoryInfo", true),
    NVML(utilisation, "nvmlDeviceGetUtilizationRates", true),
    NVML(processes, "nvmlDeviceGetComputeRunningProcesses_v3", false), /* drivers since 510 */
};
#endif

struct gpu {
    char reason[768];      /* empty: devices can be used */
    char nvml_reason[512]; /* empty: NVML answers */
    char driver_version[96], cuda_version[16], runtime_version[16];
    struct gpu_device *devices;
    size_t count;
#ifdef HAVE_NVML
    struct gpu_nvml nvml;
    void *nvml_handle; /* NULL: NVML is not open */
    nvmlDevice_t *nvml_devices;
#endif
};

#ifdef HAVE_NVML

static void gpu_nvml_close(struct gpu *g)
{
    if (g->nvml_handle)
        g->nvml.shutdown();
    dl_close(g->nvml_handle);
    free(g->nvml_devices);
    g->nvml_handle = NULL;
    g->nvml_devices = NULL;
}

static void gpu_nvml_open(struct gpu *g, const char *library)
{
    char why[400];
    const char *name = library && *library ? library : "libnvidia-ml.so.1";
    void *handle =
        dl_open(name, gpu_nvml_symbols, UTIL_COUNT(gpu_nvml_symbols), &g->nvml, why, sizeof(why));
    if (!handle) {
        snprintf(g->nvml_reason, sizeof(g->nvml_reason), "NVML not found: %s", why);
        return;
    }
    nvmlReturn_t error = g->nvml.init();
    if (error) {
        snprintf(g->nvml_reason, sizeof(g->nvml_reason), "NVML cannot be used: error %d (%.300s)",
                 (int)error, g->nvml.error_string(error));
        dl_close(handle);
        return;
    }
    g->nvml_handle = handle;
    if (g->nvml.driver_version(g->driver_version, sizeof(g->driver_version)))
        g->driver_version[0] = '\0';
}

static const struct probe_device *gpu_find_probed(const struct probe *p, const char *uuid,
                                                  const char *bus_id)
{
    for (size_t i = 0; i < p->count; i++)
        if (strcasecmp(p->devices[i].uuid, uuid) == 0)
            return &p->devices[i];
    for (size_t i = 0; i < p->count; i++)
        if (strcmp(p->devices[i].bus_id, bus_id) == 0)
            return &p->devices[i];
    return NULL;
}

/* Adds NVML's device `index` when CUDA offers it too. */
static void gpu_nvml_add(struct gpu *g, unsigned index, const struct probe *p)
{
    nvmlDevice_t handle;
    nvmlPciInfo_t pci;
    struct gpu_device *d = &g->devices[g->count];
    if (g->nvml.handle(index, &handle) || g->nvml.pci(handle, &pci) ||
        g->nvml.uuid(handle, d->uuid, sizeof(d->uuid))) {
        log_warn("gpu: NVML says nothing about device %u; it is left out", index);
        return;
    }
    probe_bus_id(pci.busId, d->bus_id, sizeof(d->bus_id));
    const struct probe_device *probed = gpu_find_probed(p, d->uuid, d->bus_id);
    if (!probed)
        return;
    d->index = (int)index;
    d->memory_total = probed->memory_total;
    if (g->nvml.name(handle, d->name, sizeof(d->name)))
        snprintf(d->name, sizeof(d->name), "%s", probed->name);
    g->nvml_devices[g->count++] = handle;
}

/* false: NVML is not open, the list has to come from the probe alone. */
static bool gpu_nvml_list(struct gpu *g, const struct probe *p)
{
    unsigned known = 0;
    if (!g->nvml_handle)
        return false;
    if (g->nvml.count(&known))
        known = 0;
    g->nvml_devices = util_calloc(p->count, sizeof(nvmlDevice_t));
    for (unsigned i = 0; i < known && g->count < p->count; i++)
        gpu_nvml_add(g, i, p);
    if (g->count < p->count)
        log_warn("gpu: of %zu devices CUDA offers, NVML knows %zu; the others are left out",
                 p->count, g->count);
    if (g->count == 0)
        snprintf(g->reason, sizeof(g->reason), "CUDA and NVML have no device in common");
    gpu_refresh(g);
    return true;
}

static void gpu_refresh_processes(struct gpu *g, struct gpu_device *d, nvmlDevice_t handle)
{
    nvmlProcessInfo_t few[GPU_PROCESSES_MAX], *list = few;
    unsigned count = GPU_PROCESSES_MAX;
    d->process_count = d->process_total = 0;
    nvmlReturn_t error = g->nvml.processes(handle, &count, list);
    if (error == NVML_ERROR_INSUFFICIENT_SIZE) {
        count += GPU_PROCESSES_MAX; /* some may start between the two calls */
        list = util_calloc(count, sizeof(*list));
        error = g->nvml.processes(handle, &count, list);
    }
    for (unsigned i = 0; !error && i < count && i < GPU_PROCESSES_MAX; i++) {
        unsigned long long used = list[i].usedGpuMemory;
        bool unknown = used == (unsigned long long)NVML_VALUE_NOT_AVAILABLE;
        d->processes[i].pid = (int)list[i].pid;
        d->processes[i].memory_used = unknown ? -1 : (int64_t)used;
        d->process_count = i + 1;
    }
    if (!error)
        d->process_total = count;
    if (list != few)
        free(list);
}

static void gpu_refresh_device(struct gpu *g, struct gpu_device *d, nvmlDevice_t handle)
{
    nvmlMemory_t memory;
    nvmlUtilization_t rates;
    d->memory_used = -1;
    if (g->nvml.memory(handle, &memory) == NVML_SUCCESS) {
        d->memory_total = (int64_t)memory.total;
        d->memory_used = (int64_t)memory.used;
    }
    d->utilisation = g->nvml.utilisation(handle, &rates) == NVML_SUCCESS ? (int)rates.gpu : -1;
    if (g->nvml.processes)
        gpu_refresh_processes(g, d, handle);
}

void gpu_refresh(struct gpu *g)
{
    for (size_t i = 0; g->nvml_handle && i < g->count; i++)
        gpu_refresh_device(g, &g->devices[i], g->nvml_devices[i]);
}

#else

static void gpu_nvml_close(struct gpu *g)
{
    (void)g;
}

static bool gpu_nvml_list(struct gpu *g, const struct probe *p)
{
    (void)g, (void)p;
    return false;
}

void gpu_refresh(struct gpu *g)
{
    (void)g;
}

static void gpu_nvml_open(struct gpu *g, const char *library)
{
    (void)library;
    snprintf(g->nvml_reason, sizeof(g->nvml_reason), "this ddipd was built without NVML headers");
}

#endif

static int gpu_compare_bus(const void *a, const void *b)
{
    const struct probe_device *x = a, *y = b;
    return strcmp(x->bus_id, y->bus_id);
}

/* CUDA's own order is "fastest first"; PCI order is what nvidia-smi would count in. */
static void gpu_take_probed(struct gpu *g, struct probe *p)
{
    qsort(p->devices, p->count, sizeof(p->devices[0]), gpu_compare_bus);
    for (size_t i = 0; i < p->count; i++) {
        const struct probe_device *from = &p->devices[i];
        struct gpu_device *d = &g->devices[g->count++];
        d->index = (int)i;
        d->memory_total = from->memory_total;
        snprintf(d->uuid, sizeof(d->uuid), "%s", from->uuid);
        snprintf(d->bus_id, sizeof(d->bus_id), "%s", from->bus_id);
        snprintf(d->name, sizeof(d->name), "%s", from->name);
    }
}

static void gpu_version_text(char *out, size_t size, int version)
{
    if (version > 0)
        snprintf(out, size, "%d.%d", version / 1000, version % 1000 / 10);
}

static void gpu_list(struct gpu *g, struct probe *p)
{
    g->devices = util_calloc(p->count, sizeof(g->devices[0]));
    for (size_t i = 0; i < p->count; i++)
        g->devices[i].memory_used = g->devices[i].utilisation = -1;
    if (!gpu_nvml_list(g, p))
        gpu_take_probed(g, p);
}

struct gpu *gpu_open(const char *cudart_library, const char *nvml_library)
{
    struct gpu *g = util_calloc(1, sizeof(*g));
    struct probe *p = util_malloc(sizeof(*p));
    /* NVML first: while it is open, the driver need not start every GPU anew for the probe. */
    gpu_nvml_open(g, nvml_library);
    probe_run(cudart_library, p);
    gpu_version_text(g->cuda_version, sizeof(g->cuda_version), p->driver);
    gpu_version_text(g->runtime_version, sizeof(g->runtime_version), p->runtime);
    if (p->available)
        gpu_list(g, p);
    else
        snprintf(g->reason, sizeof(g->reason), "%s", p->reason);
    if (!gpu_available(g))
        gpu_nvml_close(g);
    free(p);
    if (g->nvml_reason[0] && gpu_available(g))
        log_warn("gpu: %s; use of GPUs is not shown", g->nvml_reason);
    return g;
}

void gpu_close(struct gpu *g)
{
    if (!g)
        return;
    gpu_nvml_close(g);
    free(g->devices);
    free(g);
}

bool gpu_available(const struct gpu *g)
{
    return !g->reason[0];
}

const char *gpu_reason(const struct gpu *g)
{
    return g->reason[0] ? g->reason : NULL;
}

const char *gpu_nvml_reason(const struct gpu *g)
{
    return g->nvml_reason[0] ? g->nvml_reason : NULL;
}

const char *gpu_driver_version(const struct gpu *g)
{
    return g->driver_version;
}

const char *gpu_cuda_version(const struct gpu *g)
{
    return g->cuda_version;
}

const char *gpu_runtime_version(const struct gpu *g)
{
    return g->runtime_version;
}

size_t gpu_count(const struct gpu *g)
{
    return g->count;
}

const struct gpu_device *gpu_at(const struct gpu *g, size_t at)
{
    return &g->devices[at];
}

/* An entry of the selection as its JSON text, cut to what fits a message. */
static void gpu_entry_text(const json *entry, char *out, size_t size)
{
    struct buf text = BUF_INIT;
    struct jw w = JW_INIT(&text);
    jw_json(&w, NULL, entry);
    snprintf(out, size, "%s", buf_cstr(&text));
    buf_deinit(&text);
}

static int gpu_unknown(const struct gpu *g, const char *text, struct err *err)
{
    struct buf list = BUF_INIT;
    for (size_t i = 0; i < g->count; i++)
        buf_addf(&list, "%s%d (%s)", i ? ", " : "", g->devices[i].index, g->devices[i].uuid);
    err_set(err, ERR_INVALID, "there is no GPU %s; there are: %s", text, buf_cstr(&list));
    buf_deinit(&list);
    return err_hint(err,
                    "name GPUs by index or UUID (%d digits of it suffice) as GET /v1/gpus "
                    "shows them, or use \"all\"",
                    GPU_UUID_DIGITS_MIN);
}

/* Does this UUID, or beginning of one, name the device? */
static bool gpu_uuid_matches(const struct gpu_device *d, const char *text)
{
    const char *dash = strchr(text, '-');
    return dash && strlen(dash + 1) >= GPU_UUID_DIGITS_MIN &&
           strncasecmp(d->uuid, text, strlen(text)) == 0;
}

/* One entry of the list -> the place of the one device it names. */
static int gpu_resolve_entry(const struct gpu *g, const json *entry, size_t *place, struct err *err)
{
    char text[80];
    int64_t index = -1;
    const char *uuid = json_string(entry);
    size_t found = 0;
    gpu_entry_text(entry, text, sizeof(text));
    if (!uuid && !json_integer(entry, &index))
        return err_set(err, ERR_INVALID,
                       "a GPU is named by its index (a whole number) or its UUID (a string), not "
                       "by %s",
                       text);
    for (size_t i = 0; i < g->count; i++) {
        const struct gpu_device *d = &g->devices[i];
        if (uuid ? !gpu_uuid_matches(d, uuid) : d->index != index)
            continue;
        if (found++)
            return err_set(err, ERR_INVALID, "%s fits more than one GPU: %s and %s", text,
                           g->devices[*place].uuid, d->uuid);
        *place = i;
    }
    return found ? 0 : gpu_unknown(g, text, err);
}

static int gpu_resolve_list(const struct gpu *g, const json *selection, size_t *places, size_t max,
                            size_t *count, struct err *err)
{
    *count = 0;
    for (const json *e = json_first(selection); e; e = json_next(e)) {
        size_t place = 0;
        if (gpu_resolve_entry(g, e, &place, err) < 0)
            return -1;
        const json *same = json_first(selection);
        for (size_t i = 0; i < *count; i++, same = json_next(same)) {
            char first[80], second[80];
            if (places[i] != place)
                continue;
            gpu_entry_text(same, first, sizeof(first));
            gpu_entry_text(e, second, sizeof(second));
            return err_set(err, ERR_INVALID, "GPU %d (%s) is named twice in \"gpus\": %s and %s",
                           g->devices[place].index, g->devices[place].uuid, first, second);
        }
        if (*count == max)
            return err_set(err, ERR_INVALID, "\"gpus\" names more than %zu devices", max);
        places[(*count)++] = place;
    }
    if (*count == 0)
        return err_set(err, ERR_INVALID, "\"gpus\" is an empty list");
    return 0;
}

int gpu_resolve(const struct gpu *g, const json *selection, size_t *places, size_t max,
                size_t *count, struct err *err)
{
    const char *word = json_string(selection);
    if (!json_is_array(selection) && !(word && strcmp(word, "all") == 0)) {
        err_set(err, ERR_INVALID, "\"gpus\" must be \"all\" or an array");
        return err_hint(err, "for example [0, 2] or [\"GPU-8f1c22d0\"]");
    }
    if (!gpu_available(g)) {
        err_set(err, ERR_INVALID, "no GPU can be used: %s", g->reason);
        return err_hint(err, "use \"ranks\": N for CPU ranks");
    }
    if (!word)
        return gpu_resolve_list(g, selection, places, max, count, err);
    if (g->count > max)
        return err_set(err, ERR_INVALID, "all %zu GPUs are more than %zu", g->count, max);
    for (*count = 0; *count < g->count; ++*count)
        places[*count] = *count;
    return 0;
}
