/* The process grid: the pipeline and the pp_rank of each rank of the comm.
 *
 * The comm's ranks are those of several pipelines one behind the other, pipeline *
 * pp_size + pp_rank: of the MP_GROUP, by tp_rank; with a sequence (server/sequence.h)
 * of all replicas, by dp_rank.  The ranks of one pp_rank are a stage.  Requests stay in
 * a pipeline; keys of collectives, or the sequence, in a stage.  The end of a step is
 * said to all.
 *
 * Threads  any: nothing changes.
 */
#ifndef SMP_SERVER_GRID_H
#define SMP_SERVER_GRID_H

typedef struct {
    int pp_rank; /* of this process */
    int pp_size;
    int pipeline; /* of this process */
    int pipelines;
} smp_grid;

/* The grid seen from `rank` among `size`. */
static inline smp_grid
smp_grid_of(int rank, int size, int pipelines)
{
    const int pp_size = size / pipelines;

    return (smp_grid){.pp_rank = rank % pp_size,
                      .pp_size = pp_size,
                      .pipeline = rank / pp_size,
                      .pipelines = pipelines};
}

/* The rank of the comm with this pp_rank in this pipeline, */
static inline int
smp_grid_rank(const smp_grid *grid, int pipeline, int pp_rank)
{
    return pipeline * grid->pp_size + pp_rank;
}

/* ... of this process's pipeline, */
static inline int
smp_grid_in_pipeline(const smp_grid *grid, int pp_rank)
{
    return smp_grid_rank(grid, grid->pipeline, pp_rank);
}

/* ... with this process's pp_rank: of its stage. */
static inline int
smp_grid_in_stage(const smp_grid *grid, int pipeline)
{
    return smp_grid_rank(grid, pipeline, grid->pp_rank);
}

/* The pipeline, and the pp_rank, of a rank of the comm. */
static inline int
smp_grid_pipeline_of(const smp_grid *grid, int rank)
{
    return rank / grid->pp_size;
}

static inline int
smp_grid_pp_rank_of(const smp_grid *grid, int rank)
{
    return rank % grid->pp_size;
}

#endif
