/* The reasons for calls of a chain in vain, for traces of a step.
 *
 * Threads  any.
 */
#ifndef SMP_PYTHON_MODULES_MISSES_H
#define SMP_PYTHON_MODULES_MISSES_H

typedef enum {
    SMP_MISS_MODULE,    /* the caller makes another call, */
    SMP_MISS_MODES,     /* ... in another grad mode, or around hooks or a checkpoint, */
    SMP_MISS_NODES,     /* ... after operators on a tensor of both calls, */
    SMP_MISS_DRAWN,     /* ... after random numbers, */
    SMP_MISS_VALUES,    /* ... with other arguments beside tensors, */
    SMP_MISS_TENSORS,   /* ... with other tensors, */
    SMP_MISS_CHANGED,   /* ... with a tensor changed, or with a hook, since then, */
    SMP_MISS_END,       /* ... or none: its forward is over */
    SMP_MISS_USED,      /* an operator of the caller's uses an output before it */
    SMP_MISS_ELSEWHERE, /* another tp_rank makes another call */
    SMP_MISS_UNDONE,    /* an owner has undone it: python/modules/serve_chain.h */
    SMP_MISSES
} smp_miss;

/* A clause about a foreseen call; static. */
static inline const char *
smp_miss_in_words(smp_miss miss)
{
    static const char *const words[SMP_MISSES] = {
        [SMP_MISS_MODULE] = "another module was called",
        [SMP_MISS_MODES] = "called in another grad mode, with hooks or a checkpoint",
        [SMP_MISS_NODES] = "called after operators on an argument",
        [SMP_MISS_DRAWN] = "called after random numbers",
        [SMP_MISS_VALUES] = "called with other arguments",
        [SMP_MISS_TENSORS] = "called with other tensors",
        [SMP_MISS_CHANGED] = "called with a tensor changed since, or with a hook",
        [SMP_MISS_END] = "not called any more",
        [SMP_MISS_USED] = "its argument was used by an operator",
        [SMP_MISS_ELSEWHERE] = "another tp_rank made another call",
        [SMP_MISS_UNDONE] = "it may run once only, or has failed on its owner",
    };

    return words[miss];
}

#endif
