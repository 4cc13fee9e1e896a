/* Device memory allocated by the user (PyTorch's allocator), shown to other ranks of
 * the host, and opened by them.
 *
 * Owner: *exports*.  An address belongs to an allocation, with an identity that no
 * other allocation of the process has, then or later.  Each is exported once, and has a
 * state:
 *
 *   NEW     its readers have not opened it yet
 *   OPEN    all of them have
 *   CLOSED  it cannot be exported, or one of them cannot open it: for good
 *
 * Reader: *imports*.  An allocation is opened once by each.  It stays open until its
 * owner names it as gone, or while it is of use; the rest is closed at the end.  The
 * driver refuses an allocation while an earlier one at its owner's addresses is open
 * anywhere in the process [UCX, pull request 2738].  So what else is open there is
 * closed first, also by other imports: its owner has freed it, and no copy from it is
 * under way.
 *
 * An owner names an allocation as gone that it finds freed, or that was used least
 * recently among SMP_EXPORTS.  In both cases no reader's copy from it is under way: the
 * owner's memory is the user's again only behind those copies, and the second case
 * waits for the rest of the stream behind them.
 *
 * CUDA leaves it undefined that an owner frees memory while a reader has it open [CUDA
 * Driver API, cuIpcOpenMemHandle].  No reader uses such memory.  UCX's cache of opened
 * handles (cuda_ipc) closes those as late: when another handle has their address.
 *
 * Status   Run with the tests' stand-in for the driver (tests/core/stand_in.c), not yet
 *          on a GPU.
 * Threads  one at a time, for exports, and for the imports of one owner; imports of
 *          others any.  The device's context is current, but for find() and forget() of
 *          imports.
 */
#ifndef SMP_COMM_DEVICE_ALLOCATIONS_H
#define SMP_COMM_DEVICE_ALLOCATIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/driver.h"

/* The most of an owner's allocations known to its readers. */
#define SMP_EXPORTS 256

/* The most allocations named as gone at a time: freed ones, and one for room. */
#define SMP_GONE 8

/* An allocation, for its readers. */
typedef struct {
    uint64_t          identity; /* from 1 */
    uint64_t          base;     /* its owner's address */
    uint64_t          bytes;
    smp_driver_handle memory;
} smp_allocation;

typedef enum { SMP_EXPORT_CLOSED, SMP_EXPORT_NEW, SMP_EXPORT_OPEN } smp_export_state;

typedef struct {
    smp_allocation   allocation;
    smp_export_state state;
    uint64_t         used; /* the time of its last use */
} smp_export;

/* All-zero, but for the driver, are none. */
typedef struct {
    const smp_driver *driver;
    int               n;
    uint64_t          time; /* uses so far */
    uint32_t          next; /* to be looked after */
    smp_export        entries[SMP_EXPORTS];
} smp_exports;

/* The allocation with the `bytes` at `at`, until the next call; all uses of such
 * addresses end before the rest of `stream`.  gone: identities, then 0, to be told to
 * all readers.  NULL with `why`: there is none for readers now. */
smp_export *smp_exports_find(smp_exports *exports, uint64_t at, size_t bytes,
                             void *stream, uint64_t gone[SMP_GONE],
                             char why[SMP_DRIVER_TEXT]);

/* An open allocation of another rank. */
typedef struct smp_import smp_import;

/* One owner's.  All-zero, but for the first three, are none. */
typedef struct {
    const smp_driver *driver;
    void             *context;
    uint64_t          owner; /* its smp_allocations_owner() */
    smp_import       *first; /* owned, linked; the last one used */
} smp_imports;

/* This process's number as an owner, unlike any other's; from 1. */
uint64_t smp_allocations_owner(void);

/* Closes what any imports of this process have open at these addresses of an owner, but
 * for the allocation with this identity (0: for none): before something else there is
 * opened.  Any thread; no context is needed. */
void smp_imports_make_way(uint64_t owner, uint64_t identity, uint64_t base,
                          uint64_t bytes);

/* Whether there is any to be closed.  Closing waits for the device. */
bool smp_imports_are_in_the_way(uint64_t owner, uint64_t identity, uint64_t base,
                                uint64_t bytes);

/* The address here of the open allocation with this identity; 0: there is none.  No
 * context is needed. */
uint64_t smp_imports_find(smp_imports *imports, uint64_t identity);

/* Opens an allocation, after making way: its address here, or 0 with `why`. */
uint64_t smp_imports_open(smp_imports *imports, const smp_allocation *allocation,
                          char why[SMP_DRIVER_TEXT]);

/* Closes the one with this identity, if it is open. */
void smp_imports_drop(smp_imports *imports, uint64_t identity);

/* Closes those neither found nor opened since the last call. */
void smp_imports_close_unused(smp_imports *imports);

/* Closes all. */
void smp_imports_close(smp_imports *imports);

/* Frees the books, and leaves what is open to the end of the process. */
void smp_imports_forget(smp_imports *imports);

#endif
