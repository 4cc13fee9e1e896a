/* The names in messages of the ranks of the session's comm: "pp_rank 1"; if the job has
 * several of these "rank 3 (pp_rank 1)", "rank 3 (tp_rank 0, pp_rank 1)".
 *
 * Threads  any, with the GIL.
 */
#ifndef SMP_PYTHON_VALUES_RANK_NAMES_H
#define SMP_PYTHON_VALUES_RANK_NAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* Keeps a tuple of str, one a rank, until the next call.  False with an exception:
 * another number than `size`, no str, or no memory; the names are as they were. */
bool smp_rank_names_keep(PyObject *tuple, int size);

/* The name of a rank of the comm.  Borrowed until the next smp_rank_names_keep(). */
const char *smp_rank_name(int rank);

/* All, by rank; likewise. */
const char *const *smp_rank_names(void);

#endif
