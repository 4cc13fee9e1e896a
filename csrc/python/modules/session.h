/* One rank's session: the comm, the server and Python's objects for them.
 *
 * Threads  There is one session a process.  Its fields are written on the main thread
 *          between steps, or by the worker with the baton; all with the GIL held.
 */
#ifndef SMP_PYTHON_MODULES_SESSION_H
#define SMP_PYTHON_MODULES_SESSION_H

#include "python/values/torch_api.h"
#include "server/server.h"

/* An entry, to be called from other ranks: a module, or a run of nn.Sequential
 * children.
 */
typedef struct {
    PyObject *callable; /* owned; executed by the owner: called with (args, kwargs) */
    PyObject *module;   /* owned; its hooks count; None for a run */
    PyObject *path;     /* owned; for messages */
    int       owner;    /* pp_rank */
    bool      trains; /* has parameters with requires_grad; set at each step's begin */
    bool      chains; /* its calls may run before their caller has made them: chain.h */
    bool      nests;  /* a call of it has called other ranks, so it is in no chain */
    bool collective;  /* its calls have collectives of the TP_GROUP: a chain with one
                         runs on all tp_ranks, or on none (server/ballots.h) */
} smp_entry;

typedef struct {
    smp_comm   *comm;
    smp_server *server;
    smp_turns  *turns;    /* owned; NULL: this job has no gates */
    int         rank;     /* pp_rank */
    int         size;     /* of this pipeline */
    int         pipeline; /* tp_rank, in a sequence dp_rank */
    int         pipelines;
    bool        in_sequence; /* server/sequence.h */
    uint32_t    opened;      /* the count of the session's openings */
    uint32_t    step;        /* number of the last one begun */
    bool        in_step;
    bool        ended_well; /* the last one begun, on every rank */
    smp_entry  *entries;
    size_t      nentries;
    PyObject   *entry_numbers; /* dict: module address -> entry */
    PyObject   *contexts;      /* dict: call -> Context; open forwards of this rank */
    PyObject   *run_root;      /* microbatch -> None, during a step */
    PyObject   *described; /* bytes: the step's description; its server borrows them */
    PyObject   *context_vars; /* the main thread's, copied at the step's begin */
    PyObject   *error;        /* the first failure here, from describe_error */
    /* Python's side, given by configure(). */
    PyObject *send_apply, *recv_apply, *change_apply, *enter_apply;
    PyObject *leaf;        /* a tensor with requires_grad, for nodes without another */
    PyObject *seed_tensor; /* int64, where seeds are drawn */
    int64_t  *seed;        /* its data; borrowed from seed_tensor */
    PyObject *describe_error; /* exception, path, microbatch, phase -> value */
    PyObject *raised_there;   /* describe_error's value -> the exception to raise */
    PyObject *refuse_changed; /* path, args, kwargs, tensor, tensors: raises */
    PyObject *serve; /* callable, args, kwargs -> result, in a frame of Python: torch's
                        profiler looks for the caller of a module; NULL: without */
    PyObject *call_hooked; /* module, args, kwargs: a remote call around hooks */
    PyObject
        *serve_hooked; /* module, args, kwargs, bare, inputs: pre-hooks and forward */
    PyObject
        *warn_of_tensor;     /* path, a tensor with a class or attributes left behind */
    PyObject *warn_of_hook;  /* path, of a module with a hook on one of its arguments */
    PyObject *capture_state; /* path -> (state to travel, after or None, whether the
                                call may be a chain's), or None; after gets with_state's
                                value, and gives the module's value */
    PyObject *capture_backward; /* -> state to travel with a backward, or None */
    PyObject *with_state;       /* state, callable, args, kwargs -> result */
    PyObject *run_first; /* callable, args, kwargs -> result, as a checkpoint's first
                            forward */
    PyObject *checkpoint_of;    /* hooks of saved tensors -> 1: of a checkpoint's first
                                   forward, 2: of its second one, 0: neither */
    PyObject *worker_begin;     /* -> None, on each new worker thread */
    PyObject *enter_device;     /* -> None, before each task; NULL or None: no device */
    PyObject *device_generator; /* its random numbers; NULL or None likewise */
    PyObject *aborted;          /* the exception type to unwind workers */
    int32_t   backwards; /* forwards may begin before so many model.backward calls */
    uint64_t  step_seed; /* seeds the microbatches' streams (pp_rank 0) */
} smp_session;

extern smp_session smp_the_session;

/* The comm's ranks are pipeline * pp_size + pp_rank; of this pipeline, from pp_rank. */
static inline int
smp_session_rank_of_comm(int pp_rank)
{
    return smp_the_session.pipeline * smp_the_session.size + pp_rank;
}

/* The name of this rank in messages.  Borrowed. */
const char *smp_session_own_name(void);

/* The module path of an entry, for messages; borrowed. */
const char *smp_entry_path(const smp_entry *entry);

/* Raises the status's exception, naming `doing`.  NULL. */
PyObject *smp_session_raise(smp_status status, const char *doing);

/* Warns once of a tensor's parts left behind in a call of the entry.  0, or -1 with an
 * exception: warnings may be errors.  laden: NULL, or that tensor. */
int smp_session_warn_if_laden(PyObject *laden, const smp_entry *entry);

#endif
