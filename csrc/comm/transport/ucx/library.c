/* Loading libucp and looking its functions up. */
#define _GNU_SOURCE
#include "comm/transport/ucx/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/lock.h"

#define NAME "libucp.so.0"

static smp_lock lock = SMP_LOCK_INIT(SMP_LOCK_REGISTRY); /* guards all below */
static char    *packaged;                                /* owned, for ever */
static smp_ucp  functions;
static bool     loaded;

static _Thread_local char trouble[512];

/* The path of UCX in this process already.  False: it has none.  Caller holds the lock,
 * as for all functions below. */
static bool
find_loaded(char path[PATH_MAX])
{
    void            *base = dlopen("libucs.so.0", RTLD_LAZY | RTLD_NOLOAD);
    struct link_map *map;
    const char      *slash = NULL;
    bool             found = false;

    if (base == NULL) {
        return false;
    }
    if (dlinfo(base, RTLD_DI_LINKMAP, &map) == 0) {
        slash = strrchr(map->l_name, '/');
    }
    if (slash != NULL) {
        int folder = (int)(slash - map->l_name);

        found =
            snprintf(path, PATH_MAX, "%.*s/%s", folder, map->l_name, NAME) < PATH_MAX;
    }
    dlclose(base);
    return found;
}

static void *
open_at(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        snprintf(trouble, sizeof(trouble), "%s", dlerror());
    }
    return library;
}

static void *
open_library(void)
{
    const char *forced = getenv("SMP_UCX_LIBRARY");
    char        path[PATH_MAX];
    void       *library;

    if (find_loaded(path)) {
        return open_at(path);
    }
    if (forced != NULL && *forced != '\0') {
        return open_at(forced);
    }
    library = open_at(NAME);
    return library == NULL && packaged != NULL ? open_at(packaged) : library;
}

/* POSIX lets dlsym's pointer be one to a function; C has no cast for it. */
static bool
look_up(void *library)
{
    const struct {
        const char *name;
        void       *to;
    } wanted[] = {
        {"ucp_get_version", &functions.ucp_get_version},
        {"ucp_get_version_string", &functions.ucp_get_version_string},
        {"ucp_config_read", &functions.ucp_config_read},
        {"ucp_config_modify", &functions.ucp_config_modify},
        {"ucp_config_release", &functions.ucp_config_release},
        {"ucp_init_version", &functions.ucp_init_version},
        {"ucp_cleanup", &functions.ucp_cleanup},
        {"ucp_worker_create", &functions.ucp_worker_create},
        {"ucp_worker_destroy", &functions.ucp_worker_destroy},
        {"ucp_worker_query", &functions.ucp_worker_query},
        {"ucp_worker_release_address", &functions.ucp_worker_release_address},
        {"ucp_worker_progress", &functions.ucp_worker_progress},
        {"ucp_worker_get_efd", &functions.ucp_worker_get_efd},
        {"ucp_worker_arm", &functions.ucp_worker_arm},
        {"ucp_worker_set_am_recv_handler", &functions.ucp_worker_set_am_recv_handler},
        {"ucp_ep_create", &functions.ucp_ep_create},
        {"ucp_ep_query", &functions.ucp_ep_query},
        {"ucp_ep_close_nbx", &functions.ucp_ep_close_nbx},
        {"ucp_am_send_nbx", &functions.ucp_am_send_nbx},
        {"ucp_am_recv_data_nbx", &functions.ucp_am_recv_data_nbx},
        {"ucp_request_check_status", &functions.ucp_request_check_status},
        {"ucp_request_free", &functions.ucp_request_free},
    };

    _Static_assert(sizeof(wanted) / sizeof(wanted[0]) ==
                       sizeof(smp_ucp) / sizeof(void (*)(void)),
                   "every function of the table is looked up");
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        void *found = dlsym(library, wanted[i].name);

        if (found == NULL) {
            snprintf(trouble, sizeof(trouble), "%s has no function %s", NAME,
                     wanted[i].name);
            return false;
        }
        memcpy(wanted[i].to, &found, sizeof(found));
    }
    return true;
}

static bool
load(void)
{
    unsigned major;
    unsigned minor;
    unsigned release;
    void    *library = open_library();

    if (library == NULL) {
        return false;
    }
    if (!look_up(library)) {
        dlclose(library);
        return false;
    }
    functions.ucp_get_version(&major, &minor, &release);
    if (major != SMP_UCP_MAJOR || minor < SMP_UCP_MINOR) {
        snprintf(trouble, sizeof(trouble),
                 "%s is UCX %u.%u.%u; needed is %d.%d or a later %d", NAME, major,
                 minor, release, SMP_UCP_MAJOR, SMP_UCP_MINOR, SMP_UCP_MAJOR);
        dlclose(library);
        return false;
    }
    return true;
}

smp_status
smp_ucx_packaged(const char *path)
{
    char *copy = strdup(path);

    if (copy == NULL) {
        return SMP_ERR_NO_MEMORY;
    }
    smp_lock_acquire(&lock);
    if (packaged == NULL) {
        packaged = copy;
        copy = NULL;
    }
    smp_lock_release(&lock);
    free(copy);
    return SMP_OK;
}

smp_status
smp_ucx_library(const smp_ucp **out)
{
    bool ok;

    smp_lock_acquire(&lock);
    loaded = loaded || load();
    ok = loaded;
    smp_lock_release(&lock);
    if (!ok) {
        return SMP_ERR_SYSTEM;
    }
    *out = &functions;
    return SMP_OK;
}

const char *
smp_ucx_trouble(void)
{
    return trouble;
}
