/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_gpu.c - gpu.c against the fake libraries (tests/fakes), and against the toolkit's libcudart.
 *
 * DDIP_FAKES names the fakes' folder. DDIP_REAL_CUDART names a real libcudart to try as well.
 */
#include "gpu.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "log.h"
#include "tap.h"

static void check_absent(void)
{
    struct gpu *g = gpu_open("/nonexistent/libcudart.so", "/nonexistent/libnvidia-ml.so");
    ok(!gpu_available(g) && gpu_count(g) == 0, "without libraries there are no devices");
    ok(gpu_reason(g) && gpu_nvml_reason(g), "both reasons are given");
#ifdef HAVE_CUDART
    ok(strstr(gpu_reason(g), "libcudart not found: /nonexistent/"), "reason names the library");
#else
    is_str(gpu_reason(g), "this ddipd was built without CUDA headers", "reason names the build");
#endif
    gpu_refresh(g);
    is_str(gpu_driver_version(g), "", "no driver version");
    gpu_close(g);
    gpu_close(NULL);
}

/* gpu_resolve on JSON text: the devices' indices as "2,0", or the error as "!message | hint". */
static const char *resolve(const struct gpu *g, const char *text, size_t max)
{
    static char out[2048];
    struct err err = ERR_INIT;
    size_t places[64], count = 99, n = 0;
    json *selection = json_parse(text, strlen(text), &err);
    out[0] = '\0';
    if (!selection || gpu_resolve(g, selection, places, max, &count, &err) < 0)
        snprintf(out, sizeof(out), "%s%s | %s", err.code == ERR_INVALID ? "!" : "?", err.msg,
                 err.hint);
    else
        for (size_t i = 0; i < count; i++)
            n += (size_t)snprintf(out + n, sizeof(out) - n, "%s%d", i ? "," : "",
                                  gpu_at(g, places[i])->index);
    json_free(selection);
    return out;
}

static bool refused(const struct gpu *g, const char *text, const char *part)
{
    const char *out = resolve(g, text, 64);
    if (*out == '!' && strstr(out, part))
        return true;
    printf("# %s -> %s\n", text, out);
    return false;
}

static void check_resolve_absent(void)
{
    struct gpu *g = gpu_open("/nonexistent/libcudart.so", "");
    ok(refused(g, "\"all\"", "no GPU can be used: "), "all, without GPUs, is refused");
    ok(refused(g, "[0]", gpu_reason(g)), "the reason is passed on");
    ok(refused(g, "[0]", "use \"ranks\": N for CPU ranks"), "the hint says what works");
    ok(refused(g, "3", "must be \"all\" or an array"), "a wrong type is refused for its type");
    gpu_close(g);
}

#ifdef HAVE_CUDART

static const char *fake(const char *name)
{
    static char paths[4][512];
    static int next;
    const char *folder = getenv("DDIP_FAKES");
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/lib%s_fake.so", folder ? folder : "build/fakes", name);
    return path;
}

static void check_error_35(void)
{
    setenv("FAKE_CUDA_ERROR", "35", 1);
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(gpu_reason(g),
           "the CUDA driver is not installed or too old for this CUDA runtime (13.0): error 35 "
           "(CUDA driver version is insufficient for CUDA runtime version)",
           "error 35 in words");
    ok(!gpu_available(g) && gpu_count(g) == 0, "an unwritten count is not used");
    is_str(gpu_runtime_version(g), "13.0", "runtime version");
    gpu_close(g);
    setenv("FAKE_CUDA_DRIVER", "12020", 1);
    g = gpu_open(fake("cudart"), "");
    ok(strstr(gpu_reason(g), "supports CUDA 12.2 and is too old"), "an old driver is named");
    gpu_close(g);
    unsetenv("FAKE_CUDA_DRIVER");
    setenv("FAKE_CUDA_ERROR", "999", 1);
    g = gpu_open(fake("cudart"), "");
    is_str(gpu_reason(g), "CUDA cannot be used: error 999 (fake CUDA error)", "another error");
    gpu_close(g);
    unsetenv("FAKE_CUDA_ERROR");
}

static void check_none_visible(void)
{
    setenv("FAKE_CUDA_DEVICES", "0", 1);
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(gpu_reason(g), "no NVIDIA GPU is visible", "no device");
    gpu_close(g);
    unsetenv("FAKE_CUDA_DEVICES");
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(gpu_reason(g), "no NVIDIA GPU is visible (CUDA_VISIBLE_DEVICES is \"\")", "all hidden");
    gpu_close(g);
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static void check_crash(void)
{
    setenv("FAKE_CUDA_CRASH", "1", 1);
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(gpu_reason(g), "the CUDA library ended the process it was tried in (signal 6)",
           "a crash in CUDA is survived");
    ok(waitpid(-1, NULL, WNOHANG) < 0, "no process is left behind");
    gpu_close(g);
    unsetenv("FAKE_CUDA_CRASH");
}

static void check_no_nvml(const char *library)
{
    setenv("FAKE_CUDA_ORDER", "2,0,1,3", 1);
    setenv("FAKE_NVML_FAIL", "1", 1);
    struct gpu *g = gpu_open(fake("cudart"), library);
    ok(gpu_available(g) && gpu_count(g) == 4, "CUDA alone gives four devices");
    ok(gpu_nvml_reason(g) != NULL, "why there is no NVML: %s", gpu_nvml_reason(g));
    const struct gpu_device *d = gpu_at(g, 2);
    ok(d->index == 2, "index counts in PCI order");
    is_str(d->name, "Fake GPU C", "name");
    is_str(d->bus_id, "00000000:39:00.0", "PCI address");
    is_str(d->uuid, "GPU-9acf0439-a8dd-1247-7cb1-e61b5085baef", "uuid");
    ok(d->memory_total == 16LL << 30, "total memory");
    ok(d->memory_used == -1 && d->utilisation == -1 && d->process_count == 0, "use is unknown");
    is_str(resolve(g, "[3, 0]", 64), "3,0", "selection works");
    gpu_refresh(g);
    gpu_close(g);
    unsetenv("FAKE_NVML_FAIL");
    unsetenv("FAKE_CUDA_ORDER");
}

/* Run as `test_gpu usual` with LD_LIBRARY_PATH set: only a driver library is there. */
static int usual_names(void)
{
    struct gpu *g = gpu_open("", NULL);
    bool good = gpu_available(g) && gpu_count(g) == 4 && !*gpu_runtime_version(g) &&
                strcmp(gpu_cuda_version(g), "13.0") == 0 &&
                strcmp(gpu_at(g, 1)->bus_id, "00000000:28:00.0") == 0;
    if (!good)
        printf("# %s\n", gpu_reason(g));
    gpu_close(g);
    return good ? 0 : 1;
}

static void check_usual_names(char *self)
{
    char folder[] = "/tmp/test_gpu.XXXXXX", link[64];
    char *target = realpath(fake("cuda"), NULL);
    int status = -1;
    if (access("/dev/nvidiactl", F_OK) == 0) {
        ok(true, "usual names # SKIP a real driver would meet the fake one");
        free(target);
        return;
    }
    ok(target && mkdtemp(folder), "a folder for libcuda.so.1");
    snprintf(link, sizeof(link), "%s/libcuda.so.1", folder);
    ok(target && symlink(target, link) == 0, "libcuda.so.1 is the fake");
    pid_t pid = fork();
    if (pid == 0) {
        setenv("LD_LIBRARY_PATH", folder, 1);
        execl("/proc/self/exe", self, "usual", (char *)NULL);
        _exit(127);
    }
    waitpid(pid, &status, 0);
    ok(status == 0, "without a usable CUDA runtime the driver library answers");
    unlink(link);
    rmdir(folder);
    free(target);
}

static void check_real(void)
{
    const char *library = getenv("DDIP_REAL_CUDART");
    if (!library || access(library, R_OK) < 0) {
        ok(true, "the real libcudart # SKIP DDIP_REAL_CUDART names no file");
        return;
    }
    struct gpu *g = gpu_open(library, "");
    printf("# real: %s, runtime %s, CUDA %s\n", gpu_available(g) ? "available" : gpu_reason(g),
           gpu_runtime_version(g), gpu_cuda_version(g));
    ok(*gpu_runtime_version(g), "the real libcudart has a version");
    if (access("/dev/nvidiactl", F_OK) == 0)
        ok(gpu_available(g) || gpu_reason(g), "the real libcudart answers");
    else
        ok(strstr(gpu_reason(g), "not installed or too old") && strstr(gpu_reason(g), "error 35"),
           "the real libcudart without a driver gives error 35");
    gpu_close(g);
}

#endif

#if defined(HAVE_CUDART) && defined(HAVE_NVML)

static void check_devices(void)
{
    setenv("FAKE_CUDA_ORDER", "2,0,1,3", 1);
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    ok(gpu_available(g) && !gpu_reason(g) && !gpu_nvml_reason(g), "four fake devices");
    ok(gpu_count(g) == 4, "count");
    is_str(gpu_driver_version(g), "580.95.05", "driver version");
    is_str(gpu_cuda_version(g), "13.0", "CUDA version");
    bool good = true;
    for (size_t i = 0; i < gpu_count(g); i++) {
        const struct gpu_device *d = gpu_at(g, i);
        char name[48];
        snprintf(name, sizeof(name), "NVIDIA Fake %zu", i);
        good = good && d->index == (int)i && strcmp(d->name, name) == 0 &&
               d->memory_total == (16 + 8 * (int64_t)(i % 2)) << 30 &&
               d->memory_used == 512 << 20 && d->utilisation == 10 + (int)i &&
               d->process_count == 1 && d->processes[0].pid == 1000 * ((int)i + 1);
    }
    ok(good, "order, names and figures are NVML's");
    gpu_close(g);
    unsetenv("FAKE_CUDA_ORDER");
}

static void check_visible(void)
{
    setenv("FAKE_CUDA_ORDER", "2,0,1,3", 1);
    setenv("CUDA_VISIBLE_DEVICES", "3,0", 1); /* CUDA's numbers: the machine's 3 and 2 */
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(resolve(g, "\"all\"", 64), "2,3", "only what CUDA_VISIBLE_DEVICES leaves");
    ok(refused(g, "[0]", "there is no GPU 0; there are: 2 (GPU-"), "a hidden device is unknown");
    gpu_close(g);
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("FAKE_NVML_DEVICES", "3", 1);
    log_set_level(LOG_LEVEL_ERROR);
    g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(resolve(g, "\"all\"", 64), "0,1,2", "only what NVML knows");
    gpu_close(g);
    setenv("FAKE_NVML_DEVICES", "0", 1);
    g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(gpu_reason(g), "CUDA and NVML have no device in common", "nothing in common");
    gpu_close(g);
    unsetenv("FAKE_NVML_DEVICES");
    setenv("FAKE_CUDA_UUID", "other", 1);
    g = gpu_open(fake("cudart"), fake("nvml"));
    is_str(resolve(g, "\"all\"", 64), "0,1,2,3", "PCI addresses match when UUIDs do not");
    gpu_close(g);
    unsetenv("FAKE_CUDA_UUID");
    log_set_level(LOG_LEVEL_INFO);
    unsetenv("FAKE_CUDA_ORDER");
}

static void check_resolve(void)
{
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    char text[256], prefix[16];
    const char *u1 = gpu_at(g, 1)->uuid, *u2 = gpu_at(g, 2)->uuid, *u3 = gpu_at(g, 3)->uuid;
    is_str(resolve(g, "\"all\"", 64), "0,1,2,3", "all");
    is_str(resolve(g, "[1]", 64), "1", "one");
    is_str(resolve(g, "[3, 1]", 64), "3,1", "a subset in the order given");
    is_str(resolve(g, "[3,2,1,0]", 64), "3,2,1,0", "reversed");
    snprintf(text, sizeof(text), "[\"%s\", 0, \"%.12s\"]", u3, u2);
    is_str(resolve(g, text, 64), "3,0,2", "UUID, index and the first 8 digits of a UUID");
    snprintf(prefix, sizeof(prefix), "%.12s", u1);
    for (char *c = prefix + 4; *c; c++)
        *c = (char)(*c >= 'a' ? *c - 'a' + 'A' : *c);
    ok(strncmp(u1, u3, 12) == 0 && strcmp(u1, u3) != 0, "two UUIDs begin alike");
    snprintf(text, sizeof(text), "[\"%s\"]", prefix);
    ok(refused(g, text, "fits more than one GPU: "), "an ambiguous beginning");
    snprintf(text, sizeof(text), "[\"%.20s\"]", u1);
    is_str(resolve(g, text, 64), "1", "a longer beginning tells them apart");
    snprintf(text, sizeof(text), "[\"%.11s\"]", u2);
    ok(refused(g, text, "there is no GPU \"GPU-"), "7 digits are too few");
    ok(refused(g, text, "8 digits of it suffice"), "and the hint says so");
    ok(refused(g, "[1, 2, 1]", "GPU 1 (GPU-") &&
           refused(g, "[1, 2, 1]", "twice in \"gpus\": 1 and 1"),
       "an index twice");
    snprintf(text, sizeof(text), "[0, 2, \"%s\"]", u2);
    snprintf(prefix, sizeof(prefix), "%.10s", u2);
    ok(refused(g, text, "twice in \"gpus\": 2 and \"GPU-") && refused(g, text, prefix),
       "the same device by index and by UUID");
    ok(refused(g, "[0, 4]", "there is no GPU 4; there are: 0 (GPU-"), "an unknown index");
    ok(refused(g, "[-1]", "there is no GPU -1"), "a negative index");
    ok(refused(g, "[\"GPU-00000000\"]", "there is no GPU \"GPU-00000000\""), "an unknown UUID");
    ok(refused(g, "[\"0\"]", "there is no GPU \"0\""), "an index as text");
    ok(refused(g, "[]", "empty list"), "an empty list");
    ok(refused(g, "[1.5]", "not by 1.5") && refused(g, "[true]", "not by true") &&
           refused(g, "[null]", "not by null") && refused(g, "[[0]]", "not by [0]"),
       "entries of a wrong type");
    ok(refused(g, "\"none\"", "must be \"all\" or an array") &&
           refused(g, "{\"a\": 0}", "must be") && refused(g, "0", "must be"),
       "selections of a wrong type");
    ok(*resolve(g, "[0,1,2]", 2) == '!' && *resolve(g, "\"all\"", 3) == '!', "more than the limit");
    is_str(resolve(g, "[0,1]", 2), "0,1", "exactly the limit");
    gpu_close(g);
}

static void check_refresh(void)
{
    struct gpu *g = gpu_open(fake("cudart"), fake("nvml"));
    const struct gpu_device *d = gpu_at(g, 1);
    setenv("FAKE_NVML_USED", "1048576", 1);
    setenv("FAKE_NVML_UTILISATION", "93", 1);
    setenv("FAKE_NVML_PROCESSES", "3", 1);
    ok(d->memory_used == 512 << 20, "nothing changes by itself");
    gpu_refresh(g);
    ok(d->memory_used == 1048576 && d->utilisation == 93, "memory and utilisation are new");
    ok(d->process_count == 3 && d->process_total == 3 && d->processes[2].pid == 2002, "processes");
    ok(d->processes[0].memory_used == 1 << 20 && d->processes[1].memory_used == -1,
       "a process's memory, or that it is unknown");
    setenv("FAKE_NVML_PROCESSES", "100", 1);
    gpu_refresh(g);
    ok(d->process_count == GPU_PROCESSES_MAX && d->process_total == 100, "more than are kept");
    setenv("FAKE_NVML_PROCESSES", "0", 1);
    setenv("FAKE_NVML_UTILISATION", "-1", 1);
    setenv("FAKE_NVML_LOST", "1", 1);
    gpu_refresh(g);
    ok(d->memory_used == -1 && d->process_count == 0 && d->process_total == 0, "a lost device");
    ok(gpu_at(g, 0)->memory_used == 1048576 && gpu_at(g, 0)->utilisation == -1,
       "another, without utilisation");
    gpu_close(g);
    unsetenv("FAKE_NVML_USED");
    unsetenv("FAKE_NVML_UTILISATION");
    unsetenv("FAKE_NVML_PROCESSES");
    unsetenv("FAKE_NVML_LOST");
}

#endif

int main(int argc, char **argv)
{
    unsetenv("CUDA_VISIBLE_DEVICES");
#ifdef HAVE_CUDART
    if (argc > 1)
        return usual_names();
#endif
    (void)argc, (void)argv;
    check_absent();
    check_resolve_absent();
#ifdef HAVE_CUDART
    check_error_35();
    check_none_visible();
    check_crash();
    check_no_nvml("/nonexistent/libnvidia-ml.so");
    check_no_nvml(fake("nvml"));
    check_usual_names(argv[0]);
    check_real();
#else
    ok(true, "fake CUDA # SKIP built without CUDA headers");
#endif
#if defined(HAVE_CUDART) && defined(HAVE_NVML)
    check_devices();
    check_visible();
    check_resolve();
    check_refresh();
#else
    ok(true, "fake NVML # SKIP built without CUDA or NVML headers");
#endif
    return tap_done();
}
