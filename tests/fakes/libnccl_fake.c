/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnccl_fake.c - the part of NCCL the daemon uses. Like the real one, each unique id leaves an
 * open socket without close-on-exec behind.
 *
 * FAKE_NCCL_VERSION=22809   what ncclGetVersion says; 0: it fails
 * FAKE_NCCL_ERROR=5         ncclGetUniqueId fails so
 * FAKE_NCCL_NO_SOCKET=1     no sockets, for a test that wants all the ids there are
 */
#include "fake_gpu.h"

#include <sys/random.h>
#include <sys/socket.h>

FAKE(int, ncclGetVersion, int *version)
{
    *version = fake_env("FAKE_NCCL_VERSION", 22809);
    return *version ? 0 : 3; /* ncclInternalError */
}

FAKE(int, ncclGetUniqueId, char *id)
{
    int error = fake_env("FAKE_NCCL_ERROR", 0);
    if (error)
        return error;
    if (!fake_env("FAKE_NCCL_NO_SOCKET", 0) && socket(AF_UNIX, SOCK_STREAM, 0) < 0)
        return 2; /* ncclSystemError */
    return getrandom(id, 128, 0) == 128 ? 0 : 2;
}

FAKE(const char *, ncclGetErrorString, int error)
{
    return error == 5 ? "invalid usage" : error == 3 ? "internal error" : "fake NCCL error";
}

FAKE(const char *, ncclGetLastError, void *comm)
{
    (void)comm;
    return "no socket interface found";
}
