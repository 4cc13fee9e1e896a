/* The kernels of csrc/tp_kernels/gpu.cu, for the stand-in's cuLaunchKernel. */
#ifndef SMP_TESTS_STAND_IN_GPU_H
#define SMP_TESTS_STAND_IN_GPU_H

#include <stddef.h>

#define STAND_IN_PARAMETERS 2

typedef struct {
    const char *name;
    size_t      bytes[STAND_IN_PARAMETERS]; /* of each */
    void (*run)(const void *const *parameters);
} stand_in_function;

#ifdef __cplusplus
extern "C" {
#endif

/* NULL: there is none of that name. */
const stand_in_function *stand_in_find(const char *name);

/* Runs it; returns when it is over.  One thread at a time. */
void stand_in_run(const stand_in_function *function, const void *const *parameters,
                  unsigned blocks, unsigned threads);

#ifdef __cplusplus
}
#endif

#endif
